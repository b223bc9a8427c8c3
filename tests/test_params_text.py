"""params.yaml is edited as text: comments, order and spelling stay, other values do not."""

from pathlib import Path
from typing import Any

import pytest

from eagle3.params import Params, parse_params
from eagle3.params_text import edited, parse_setting

TEXT = (Path(__file__).parent.parent / "params.yaml").read_text()


def parsed(text: str) -> Params:
    return parse_params(text, Path("params.yaml"))


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


def test_no_edit_changes_no_letter() -> None:
    assert edited(TEXT, {}) == TEXT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verifier.model", "/somewhere/else"),
        ("verifier.aux_layer_ids", [1, 2, 3]),
        ("verifier.revision", "0123456789"),
        ("generate.temperature", [0.6, 1.0]),
        ("generate.chat_template_kwargs", {"enable_thinking": True}),
        ("train.draft_vocab_size", 32000),
        ("train.draft_vocab_size", None),
        ("engine.enforce_eager", False),
        ("prompts.seed", 7),
    ],
)
def test_an_edit_changes_its_value_and_nothing_else(name: str, value: Any) -> None:
    section, key = name.split(".")
    text = edited(TEXT, {name: value})
    changed = [(a, b) for a, b in zip(TEXT.splitlines(), text.splitlines(), strict=True) if a != b]
    assert all(line.startswith(f"  {key}:") for pair in changed for line in pair) and len(changed) <= 1
    assert comments(text) == comments(TEXT)
    now, before = parsed(text).model_dump(), parsed(TEXT).model_dump()
    before[section][key] = value
    assert now == before


def test_several_sources_keep_the_comments_of_the_first() -> None:
    like = parsed(TEXT).prompts.sources[0].model_dump()
    text = edited(TEXT, {"prompts.sources": [like | {"path": "a", "name": "a"}, like | {"path": "b", "name": "b"}]})
    assert [source.path for source in parsed(text).prompts.sources] == ["a", "b"]
    assert comments(text) == comments(TEXT)


@pytest.mark.parametrize("name", ["train.lrr", "trian.epochs", "train", "train.epochs.x"])
def test_an_unknown_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"has no {name}"):
        edited(TEXT, {name: 1})


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("train.epochs=3", "train.epochs", 3),
        ("train.learning_rate=1e-4", "train.learning_rate", 1e-4),
        ("verifier.aux_layer_ids=[1,2,3]", "verifier.aux_layer_ids", [1, 2, 3]),
        ("engine.enforce_eager=false", "engine.enforce_eager", False),
        ("verifier.chat_template=", "verifier.chat_template", None),
        ("verifier.model=a=b", "verifier.model", "a=b"),
    ],
)
def test_a_setting_on_the_command_line_is_read_as_yaml(text: str, name: str, value: Any) -> None:
    assert parse_setting(text) == (name, value)


@pytest.mark.parametrize("text", ["train.epochs", "epochs=3", "train.epochs=[1"])
def test_a_setting_that_is_none_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"SECTION\.KEY=VALUE|not readable as YAML"):
        parse_setting(text)
