"""The server's reasoning parser against the ids, and the arguments that make a server find and bound thinking."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from eagle3.params import ReasoningParams, load_params
from eagle3.reasoning import NO_MARKERS, Marker, Markers, ThinkingFinder
from eagle3.serving.answers import Answer
from eagle3.serving.server import server_command
from eagle3.serving.thinking import (
    LOOKED_AT,
    ParserCheck,
    budget_remedy,
    parser_remedy,
    thinking_arguments,
)

ROOT = Path(__file__).parent.parent
PARAMS = load_params(ROOT / "params.yaml")
MARKERS = Markers(Marker("<think>", (6,)), Marker("</think>", (7,)), ())
QWEN = ReasoningParams(format="qwen3", start=None, end=None, also_ended_by=[])
AUTO = ReasoningParams(format="auto", start=None, end=None, also_ended_by=[])
THOUGHT = [6, *range(20, 40), 7, 50, 51, 2]


def answer(ids: list[int], reasoning: str | None, content: str | None, finish: str = "stop") -> Answer:
    return Answer([1, 2, 3], ids, 3, len(ids), reasoning, content, finish, None)


def check(markers: Markers = MARKERS) -> ParserCheck:
    return ParserCheck(ThinkingFinder(markers, defaultdict(lambda: b"x")), parser_remedy(QWEN, local=False))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (answer(THOUGHT, "thought", "said"), None),
        (answer(THOUGHT, None, "<think>thought</think>said"), "leaves the thinking inside the content"),
        (answer(THOUGHT, None, "said"), "leaves the thinking inside the content"),
        (answer(THOUGHT, "th", "ought</think>said"), "leaves the thinking inside the content"),
        (answer(THOUGHT, None, None), "drops the thinking"),
        (answer([50, 51, 2], "said", None), "reports reasoning where the ids hold no think marker"),
    ],
)
def test_g04_one_answer_settles_whether_the_parser_fits(given: Answer, told: str | None) -> None:
    checked = check()
    warning = checked.look(given)
    assert checked.settled
    if told is None:
        assert warning is None
    else:
        assert warning is not None
        assert told in warning
        assert "--reasoning-parser qwen3" in warning
    assert checked.look(answer([50, 2], "said", None)) is None  # once is enough


@pytest.mark.parametrize(
    "given",
    [
        answer([50, 51, 2], None, "said"),
        answer([6, 30, 7, 50, 2], None, "said"),  # nothing between the markers but a blank
        answer([6, *range(20, 60)], None, "thought", "length"),  # cut while thinking: parsers differ
    ],
)
def test_what_settles_nothing_is_passed_over(given: Answer) -> None:
    checked = check()
    assert [checked.look(given) for _ in range(LOOKED_AT)] == [None] * LOOKED_AT
    assert not checked.settled
    assert checked.look(answer([50, 51, 2], "said", None)) is None  # no more looking


def test_reasoning_of_a_verifier_without_markers_is_told() -> None:
    assert "reasoning.format" in str(check(NO_MARKERS).look(answer([50, 51, 2], "thought", "said")))


def test_arguments_of_a_server_of_ours() -> None:
    assert thinking_arguments(AUTO, MARKERS, bounded=False) == {}
    assert thinking_arguments(QWEN, MARKERS, bounded=False) == {"reasoning_parser": "qwen3"}
    bounded = thinking_arguments(AUTO, MARKERS, bounded=True)
    config = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    assert bounded == {"reasoning_config": config}
    engine = PARAMS.engine.model_copy(update={"extra_args": bounded})
    command = server_command(PARAMS.verifier, engine, Path("/folder"), 1234)
    assert json.loads(command[command.index("--reasoning-config") + 1]) == config
    with pytest.raises(ValueError, match="no think markers"):
        thinking_arguments(AUTO, NO_MARKERS, bounded=True)


@pytest.mark.parametrize(("local", "told"), [(True, "engine.extra_args: {reasoning_"), (False, "start it with --rea")])
def test_remedies_name_the_place_to_change(local: bool, told: str) -> None:
    remedies: list[Any] = [parser_remedy(QWEN, local), parser_remedy(AUTO, local), budget_remedy(MARKERS, local)]
    assert all(told in remedy for remedy in remedies)
