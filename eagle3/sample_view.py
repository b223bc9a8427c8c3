"""Samples of data/tokens for a person to read: prompt, thinking and answer, what is masked and what is learnt.

Text that a user or the verifier wrote is hostile: no control character of it reaches the terminal, it stands indented
so that it cannot pass for a heading, and where it has the brackets that mark special tokens, they are spelled out.

    <|im_end|>      these characters, as ordinary tokens
    ⟨|im_end|⟩      the special token
    \\u27e8          the bracket ⟨, as ordinary text
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from eagle3.console import visible
from eagle3.reasoning import Pieces
from eagle3.schemas import TOKENS
from eagle3.tables import Row, check_part, count_parts, list_parts, read_columns, read_table

BRACKETS = "⟨⟩"
HEAD_TOKENS, TAIL_TOKENS = 400, 100  # of each part of a long sample
STYLES: dict[str, dict[str, Any]] = {
    "heading": {"bold": True},
    "prompt": {"fg": "cyan"},
    "thinking": {"fg": "yellow"},
    "answer": {"fg": "green"},
    "special": {"fg": "magenta", "bold": True},
    "mark": {"fg": "bright_black"},
    "spelled": {"fg": "red"},
}
ENDINGS = {
    "marker": "its closing marker",
    "tool_call": "a tool call",
    "end_of_turn": "the end of the turn",
    "budget": "the token budget",
}


@dataclass(frozen=True)
class View:
    """How samples are shown. words: the verifier's tokenizer; ids: token by token; whole: long ones too."""

    words: "Words"
    color: bool
    ids: bool
    whole: bool


class Words:
    """A tokenizer's ids as text. Special is every id that no ordinary text gives: added tokens and unknown ids."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known = set(tokenizer.get_vocab().values())
        self._added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        self._pieces = Pieces(tokenizer)

    def special(self, token: int) -> str | None:
        """How a special token is shown; None for an ordinary one."""
        if token in self._added:
            return f"⟨{self._added[token].removeprefix('<').removesuffix('>')}⟩"
        return None if token in self._known else f"⟨id {token}⟩"

    def text(self, ids: Sequence[int]) -> str:
        """The text of ordinary tokens that follow each other."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        """The text of one ordinary token; bytes that are no text by themselves are spelled out."""
        return self._pieces[token].decode(errors="backslashreplace")


def one_sample(folder: Path, which: str) -> tuple[int, Row]:
    """The sample with this 1-based number, or this id or unique beginning of an id. Raises ValueError for no such one.

    Reads the index, for an id the column of ids, and then the one part that holds the sample.
    """
    number = int(which) if which.isdecimal() and len(which) < 12 else _number_of(folder, which)
    total = count_parts(folder)
    if not 1 <= number <= total:
        raise ValueError(f"{folder}: there is no row {number}; rows are 1 to {total}")
    first = 1
    for part in list_parts(folder):
        if number < first + part.rows:
            check_part(part)
            rows = read_table(part.path, TOKENS, arrays=True)
            return number, next(islice(rows, number - first, None))
        first += part.rows
    raise AssertionError("the index counts more rows than its parts have")


def _number_of(folder: Path, beginning: str) -> int:
    found: list[tuple[int, str]] = []
    first = 1
    for part in list_parts(folder):
        names = read_columns(part.path, pa.schema([TOKENS.field("sample_id")]))["sample_id"]
        places = pc.indices_nonzero(pc.starts_with(names, beginning)).to_pylist()
        found += [(first + place, names[place].as_py()) for place in places]
        first += part.rows
    exact = [number for number, name in found if name == beginning]
    if exact or len(found) == 1:
        return exact[0] if exact else found[0][0]
    if not found:
        raise ValueError(
            f"{folder}: no sample id begins with {visible(beginning)}; give an id, or a row from 1 to {first - 1}"
        )
    listed = ", ".join(visible(name) for _, name in found[:3]) + (" ..." if len(found) > 3 else "")
    raise ValueError(f"{folder}: {len(found)} sample ids begin with {visible(beginning)}: {listed}; give more of one")


def matching_samples(folder: Path, wanted: dict[str, str]) -> Iterator[tuple[int, Row]]:
    """The samples whose columns have these values, with their 1-based numbers. Parts without one are not read.

    wanted: source, category, truncated_in. Raises ValueError, at the end, when there was none.
    """
    first, found = 1, False
    present: dict[str, Counter[str]] = {name: Counter() for name in wanted}
    for part in list_parts(folder):
        columns = read_columns(part.path, pa.schema([TOKENS.field(name) for name in wanted]))
        places = np.arange(part.rows)
        for name, value in wanted.items():
            values = np.array(columns[name].to_pylist(), dtype=object)
            present[name].update(str(seen) for seen in values if seen is not None)
            places = places[values[places] == value]
        if len(places):
            found = True
            check_part(part)
            rows = enumerate(islice(read_table(part.path, TOKENS, arrays=True), int(places[-1]) + 1))
            chosen = set(places.tolist())
            yield from ((first + place, row) for place, row in rows if place in chosen)
        first += part.rows
    if not found:
        raise ValueError(f"{folder}: none of {first - 1} samples has {_unmet(wanted, present)}")


def _unmet(wanted: dict[str, str], present: dict[str, Counter[str]]) -> str:
    asked = " and ".join(f"{name} {visible(value)}" for name, value in wanted.items())
    there = [
        f"{name}: " + (", ".join(visible(value) for value, _ in seen.most_common(10)) or "none")
        for name, seen in present.items()
    ]
    return f"{asked}; there is {'; '.join(there)}"


def show_sample(number: int, total: int, row: Row, view: View) -> str:
    """One sample: a heading of three lines, then its parts, each with a heading of its own."""
    blocks = [_heading(number, total, row, view)]
    for label, start, end in (
        ("prompt", 0, row["prompt_length"]),
        ("thinking", row["thinking_start"], row["thinking_end"]),
        ("answer", row["answer_start"], row["length"]),
    ):
        if end > start:
            blocks.append(_part(label, start, end, row, view))
    return "".join(blocks) + "\n"


def _heading(number: int, total: int, row: Row, view: View) -> str:
    thinking = row["thinking_end"] - row["thinking_start"]
    parts = f"{row['prompt_length']} prompt, {thinking} thinking, {row['length'] - row['answer_start']} answer"
    facts = ["no thinking"]
    if row["thinking_opened_by"]:
        ending = ENDINGS.get(row["thinking_ended_by"], visible(str(row["thinking_ended_by"])))
        facts = [f"thinking opened by the {visible(row['thinking_opened_by'])}, ended by {ending}"]
    cut = row["truncated_in"]
    facts.append(f"cut off in the {visible(cut)} by the token budget" if cut else "not cut off")
    facts.append("rebuilt from text" if row["rebuilt"] else "ids from the engine")
    facts.append(f"{row['stray_markers']} stray markers")
    facts += ["greedy"] if row["greedy"] else []
    title = _paint(f"sample {number} of {total}: {visible(row['sample_id'])}", "heading", view.color)
    origin = f"source {visible(row['source'])}, category {visible(row['category'])}, split {visible(row['split'])}"
    return f"{title}\n  {origin}, {row['length']} tokens ({parts})\n  {'; '.join(facts)}\n"


def _part(label: str, start: int, end: int, row: Row, view: View) -> str:
    learnt = int(np.sum(row["loss_mask"][start:end]))
    use = {0: "masked", end - start: "learnt"}.get(learnt, f"{learnt} of them learnt")
    heading = _paint(f"[{label}, {end - start} tokens, {use}]", "heading", view.color) + "\n"
    left_out = 0 if view.whole else max(0, end - start - HEAD_TOKENS - TAIL_TOKENS)
    write: Callable[[str, int, int, Row, View], str] = _id_lines if view.ids else _text_lines
    if not left_out:
        return heading + write(label, start, end, row, view)
    note = _paint(f"  ... {left_out} tokens left out; --whole shows them ...", "mark", view.color) + "\n"
    head = write(label, start, start + HEAD_TOKENS, row, view)
    return heading + head + note + write(label, end - TAIL_TOKENS, end, row, view)


def _text_lines(label: str, start: int, end: int, row: Row, view: View) -> str:
    """Indented lines. Masked tokens are dim; a line break of the text is a mark and a new line."""
    ids, mask = (np.asarray(row[name][start:end]).tolist() for name in ("input_ids", "loss_mask"))
    shown = []
    for (special, learnt), run in groupby(
        zip(ids, mask, strict=True), lambda pair: (view.words.special(pair[0]), pair[1])
    ):
        tokens = [token for token, _ in run]
        if special is not None:
            shown.append(_paint(visible(special), "special", view.color, dim=not learnt) * len(tokens))
        else:
            shown.append(_readable(view.words.text(tokens), label, view.color, dim=not learnt))
    text = "".join(shown).removesuffix("\n")
    return "".join(f"  {line}\n" for line in text.split("\n"))


def _id_lines(label: str, start: int, end: int, row: Row, view: View) -> str:
    """A line for each token: its place, its id, its text."""
    lines = []
    for place in range(start, end):
        token, dim = int(row["input_ids"][place]), not row["loss_mask"][place]
        special = view.words.special(token)
        if special is not None:
            shown = _paint(visible(special), "special", view.color, dim=dim)
        else:
            text = view.words.piece(token).replace(" ", "·")
            shown = _readable(text, label, view.color, dim=dim).replace("\n", "")
        lines.append(f"  {place:>6} {token:>7}  {shown}\n")
    return "".join(lines)


def _readable(text: str, style: str, color: bool, dim: bool) -> str:
    """Foreign text: line breaks, tabs and trailing blanks get a mark; what is not printable is spelled out."""
    lines = []
    for line in text.split("\n"):
        body = line.rstrip(" ")
        shown = [
            _paint("".join(run), style, color, dim=dim) if plain else "".join(_spell(c, color) for c in run)
            for plain, run in groupby(body, lambda c: c.isprintable() and c not in BRACKETS)
        ]
        lines.append("".join(shown) + _paint("·" * (len(line) - len(body)), "mark", color))
    return (_paint("↵", "mark", color) + "\n").join(lines)


def _spell(character: str, color: bool) -> str:
    if character == "\t":
        return _paint("⇥   ", "mark", color)
    spelled = character.encode("unicode_escape", "surrogatepass").decode()
    return _paint(spelled, "spelled", color)


def _paint(text: str, style: str, color: bool, dim: bool = False) -> str:
    return typer.style(text, **STYLES[style], dim=dim or None) if color and text else text
