"""params.yaml as text: other values under its keys, its comments and order kept."""

from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter


class _SpellsNull(RoundTripRepresenter):
    """Writes null as `null`, not as nothing."""

    def represent_none(self, _: None) -> ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_SpellsNull.add_representer(type(None), _SpellsNull.represent_none)


def round_trip() -> YAML:
    """Reads and writes YAML as it was: comments, order, quotes, indentation."""
    yaml = YAML()
    yaml.Representer = _SpellsNull
    yaml.width = 4096
    yaml.preserve_quotes = True
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def edited(text: str, values: dict[str, Any]) -> str:
    """The text with other values. values: by dotted key (`train.epochs`: 2). Raises ValueError for an unknown key.

    A list of mappings keeps the comments of its first one.
    """
    yaml = round_trip()
    document = yaml.load(text)
    for name, value in values.items():
        section, _, key = name.partition(".")
        if section not in document or key not in document[section]:
            raise ValueError(f"params.yaml has no {name}")
        document[section][key] = _like(document[section][key], value)
    return dumped(yaml, document)


def dumped(yaml: YAML, document: Any) -> str:
    """As text, each comment one space behind its value."""
    _pull_comments(document)
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def parse_setting(text: str) -> tuple[str, Any]:
    """`train.epochs=2` as a key and a value read as YAML. Raises ValueError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or name.count(".") != 1:
        raise ValueError(f"{text}: a setting is written SECTION.KEY=VALUE, e.g. train.epochs=2")
    try:
        return name, YAML(typ="safe", pure=True).load(value)
    except YAMLError as error:
        raise ValueError(f"{text}: not readable as YAML: {' '.join(str(error).split())}") from None


def _like(old: Any, new: Any) -> Any:
    """A value in the place of another: mappings in a list get the comments of the first one that stood there."""
    if not (isinstance(old, CommentedSeq) and old and isinstance(old[0], CommentedMap)):
        return _on_one_line(new)
    items = []
    for place, mapping in enumerate(new):
        item = CommentedMap(mapping)
        if place == 0:
            item.ca.items.update(old[0].ca.items)
        items.append(item)
    sequence = CommentedSeq(items)
    sequence.ca.comment = old.ca.comment
    return sequence


def _on_one_line(value: Any) -> Any:
    if isinstance(value, dict | list):
        value = CommentedMap(value) if isinstance(value, dict) else CommentedSeq(value)
        value.fa.set_flow_style()
    return value


def _pull_comments(node: Any) -> None:
    if isinstance(node, CommentedMap):
        for tokens in node.ca.items.values():
            for token in tokens:
                if token is not None and not isinstance(token, list):
                    token.start_mark.column = 0
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
        _pull_comments(child)
