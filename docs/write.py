"""Refills the tables of parameters.md and formats.md from the code, where each thing is said once. Run:
python -m docs.write

A table stands between `<!-- NAME: made by docs/write.py -->` and `<!-- end -->`; what is around it is written by hand.
"""

import ast
import re
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
from pydantic import BaseModel
from ruamel.yaml import YAML

from eagle3 import lineage, schemas
from eagle3.params import Params
from eagle3.reasoning import Marker, Markers
from eagle3.verifier import VerifierIdentity

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
PAGES = ("parameters.md", "formats.md")
HOLE = re.compile(r"(?<=<!-- )(\w+)(: made by docs/write\.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", dict: "mapping"}
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "multiple_of": "a multiple of"}
RECORDS = (VerifierIdentity, Markers, Marker, lineage.Lineage, lineage.VocabularyFacts, lineage.StatesFacts)
RECORDS += (lineage.SamplesFacts, lineage.PromptsFacts, lineage.Origin, lineage.GitState, lineage.StageRecord)
RECORDS += (lineage.Imported,)


def pages() -> dict[str, str]:
    """File name of each page -> its text with the tables as the code has them now."""
    formats = schema_tables() | {"json_files": record_tables(), "shard": shard_tables()}
    return {name: filled(name, tables) for name, tables in zip(PAGES, (parameter_tables(), formats), strict=True)}


def filled(page: str, tables: dict[str, str]) -> str:
    """The text of a page with these tables, each where its name stands."""
    return HOLE.sub(lambda hole: f"{hole[1]}{hole[2]}\n{tables[hole[1]]}\n", (FOLDER / page).read_text())


def parameter_tables() -> dict[str, str]:
    """Name of each section of params.yaml -> its table: key, default, type, what its comment says."""
    text = (ROOT / "params.yaml").read_text()
    stages = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text())["stages"]
    told, values = comments(text), YAML(typ="base", pure=True).load(text)
    found = {}
    for section, field in Params.model_fields.items():
        assert isinstance(field.annotation, type)
        readers = [f"`{stage}`" for stage, body in stages.items() if section in body.get("params", [])]
        rows = [
            (f"`{key}`", f"`{default}`" if default else "", escaped(spelled(kind)), escaped(told[section, key]))
            for key, kind, default in keys(field.annotation, values[section], "")
        ]
        table = as_table(("key", "as shipped", "takes", "what it is"), rows)
        found[section] = f"Read by {', '.join(readers)}.\n\n{table}\n"
    return found


def comments(text: str) -> dict[tuple[str, str], str]:
    """The comment behind each key of params.yaml, by section and key."""
    found, section = {}, ""
    for line in text.splitlines():
        if top := re.match(r"(\w+):", line):
            section = top[1]
        elif inner := re.match(r"\s+(?:- )?(\w+):[^#]*# (.*)", line):
            found[section, inner[1]] = inner[2]
    return found


def keys(section: type[BaseModel], values: Any, inside: str) -> Iterator[tuple[str, Any, str]]:
    """Key, type and shipped value of everything in a section; those of the sources behind the list that holds them."""
    for key, kind in get_type_hints(section, include_extras=True).items():
        if key == "model_config":
            continue
        item = get_args(get_args(kind)[0])[0] if get_origin(kind) is Annotated and get_args(get_args(kind)[0]) else None
        if isinstance(item, type) and issubclass(item, BaseModel):
            yield key, kind, ""
            yield from keys(item, values[key][0], f"{key}[].")
        else:
            value = values[key]
            yield key, kind, inline(value)


def inline(value: Any) -> str:
    """A value of params.yaml as it stands there."""
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return "{}" if value == {} else str(value) or "null"


def spelled(kind: Any) -> str:
    """A type of params.py in words."""
    origin, options = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = [
            f"{word} {getattr(limit, name):g}"
            for field in options[1:]
            for limit in field.metadata
            for name, word in BOUNDS.items()
            if getattr(limit, name, None) is not None
        ]
        return " ".join([spelled(options[0]), ", ".join(limits)]).strip()
    if origin in (types.UnionType, Union):
        return " or ".join(map(spelled, options))
    if origin is Literal:
        return " | ".join(map(str, options))
    if origin is list:
        return f"list of: {spelled(options[0])}"
    if kind is types.NoneType:
        return "null"
    return WORDS.get(origin or kind, "its keys below")


def schema_tables() -> dict[str, str]:
    """Name of each schema of schemas.py, in small letters -> its files and a table of its columns."""
    source = (ROOT / "eagle3/schemas.py").read_text()
    lines = source.splitlines()
    found: dict[str, str] = {}
    seen: dict[str, str] = {}
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name = node.targets[0].id
        schema = getattr(schemas, name)
        if not isinstance(schema, pa.Schema):
            continue
        assert isinstance(node.value, ast.Call) and isinstance(node.value.args[0], ast.List)
        rows = []
        for field, place in zip(schema, node.value.args[0].elts, strict=True):
            behind = re.search(r"\),?  # (.*)", lines[(place.end_lineno or 0) - 1])
            told = behind[1] if behind else seen.get(field.name, "")
            seen.setdefault(field.name, told)
            rows.append((f"`{field.name}`", column_type(field.type), escaped(told)))
        places, _, what = lines[node.lineno - 2].removeprefix("#: ").partition(": ")
        table = as_table(("column", "type", "what it is"), rows)
        found[name.lower()] = f"`{places}`: {escaped(what)}\n\n{table}\n"
    return found


def column_type(kind: pa.DataType) -> str:
    """An Arrow type as a reader knows it."""
    if pa.types.is_list(kind):
        return f"list of {column_type(kind.value_type)}"
    if pa.types.is_struct(kind):
        return f"({', '.join(field.name for field in kind)})"
    return {"string": "text", "double": "float64"}.get(str(kind), str(kind))


def shard_tables() -> str:
    """Tensors and metadata of a shard."""
    tensors = [(f"`{name}`", escaped(told)) for name, told in schemas.SHARD_TENSORS.items()]
    scales = [(f"`{name}`", escaped(f"with fp8 alone: {told}")) for name, told in schemas.SHARD_SCALES.items()]
    told = dict(re.findall(r'^    "(\w+)",(?:  # (.*))?$', (ROOT / "eagle3/schemas.py").read_text(), re.MULTILINE))
    metadata = [(f"`{key}`", escaped(told[key])) for key in schemas.SHARD_METADATA]
    return (
        f"{as_table(('tensor', 'what it is'), tensors + scales)}\n\n{as_table(('metadata', 'what it is'), metadata)}\n"
    )


def record_tables() -> str:
    """Keys of verifier.json and lineage.json, object by object."""
    parts = []
    for record in RECORDS:
        hints = get_type_hints(record)
        rows = [(f"`{field.name}`", f"`{annotation(hints[field.name])}`") for field in fields(record)]
        said = escaped(" ".join((record.__doc__ or "").split()))
        parts.append(f"**{record.__name__}**: {said}\n\n{as_table(('key', 'type'), rows)}\n")
    return "\n".join(parts)


def annotation(kind: Any) -> str:
    """A type of a record, without the modules of its names."""
    name = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return re.sub(r"\b[\w.]+\.(?=\w)", "", name).replace("|", "\\|")


def escaped(text: str) -> str:
    """Plain text as Markdown that shows it: what stands between backticks is code and stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*<>$|{}])", r"\\\1", part) for part in parts)


def as_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ("---",) * len(head), *rows])


if __name__ == "__main__":
    for page, text in pages().items():
        (FOLDER / page).write_text(text)
