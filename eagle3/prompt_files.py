"""Prompt files that somebody brings along: what shape they have, and a copy inside the project."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.console import Progress, visible
from eagle3.params import SourceParams
from eagle3.prompts import FORMATS, SHAPE_ROWS, Unfit, parse_prompt
from eagle3.sources import read_rows
from eagle3.workstore import naming

TEXT_COLUMNS = ("prompt", "question", "instruction", "query", "input", "text", "problem")  # likeliest first
NOT_TEXT = {"category", "system", "source", "id"}
MOSTLY = 0.5  # of the first rows must become prompts
PIECE = 1 << 24


def recognise(path: Path, given: str | None, template: SourceParams, multi_turn: str) -> str:
    """The text column of a prompt file: `given`, or whichever makes prompts of its first rows.

    template: what else a source in params.yaml says. Files with `messages` or `conversations` need no text column and
    keep the template's. Raises ValueError that names the columns when none fits, or several may.
    """
    rows = list(islice(read_rows(path, None), SHAPE_ROWS))
    records = [row.record for row in rows if row.record is not None]
    if not records:
        told = f"{rows[0].reason}: {rows[0].detail}" if rows else "nothing but blank lines"
        raise ValueError(f"{path}: no row can be read ({visible(told)})")
    names = list(dict.fromkeys(name for record in records for name in record))

    def fits(column: str) -> bool:
        source = template.model_copy(update={"text_column": column})
        return sum(_is_prompt(record, source, multi_turn) for record in records) > MOSTLY * len(records)

    if given is not None:
        found = [given] if fits(given) else []
    else:
        known = [template.text_column, *TEXT_COLUMNS]
        found = [name for name in known if fits(name)][:1] or [n for n in names if n not in NOT_TEXT and fits(n)]
    if len(found) != 1:
        shown = visible(", ".join(names))
        told = f"several columns have text ({', '.join(found)})" if found else f"accepted are {FORMATS}"
        raise ValueError(f"{path}: {told}; it has {shown}. Say --text-column NAME")
    return found[0]


def _is_prompt(record: dict[str, Any], source: SourceParams, multi_turn: str) -> bool:
    try:
        parse_prompt(record, source, multi_turn)
    except Unfit:
        return False
    return True


def copy_prompts(files: Sequence[Path], targets: Sequence[Path]) -> None:
    """Copy files to new places: never a link, so that DVC's cache cannot make somebody's own file read-only."""
    with Progress("prompts", sum(file.stat().st_size for file in files), "bytes") as progress:
        for file, target in zip(files, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            with naming(target), file.open("rb") as reader, target.open("xb") as writer:
                while data := reader.read(PIECE):
                    writer.write(data)
                    progress.advance(len(data))
