"""Where thinking is: markers as single tokens and as several, however they are split; presets; what opens nothing."""

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle3.params import ReasoningParams
from eagle3.reasoning import NO_MARKERS, Markers, Pieces, Thinking, ThinkingFinder, find_markers, parser_name
from tests.draft_data import REASONING

TEXT = ["<think>\nLet me see.</think>\n\nThe answer is 4 <", "a < b > c / d think twice"]


def tokenizer(*single: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE; the markers in `single` are tokens of their own."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    made.add_tokens(list(single))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def params(**changes: Any) -> ReasoningParams:
    return REASONING.model_copy(update=changes)


CUSTOM = params(format="custom", start="<think>", end="</think>")


def find(markers: Markers, words: Any, prompt: str, output: list[str], truncated: bool = False) -> tuple[Thinking, int]:
    """The thinking of a row whose output is encoded in the given pieces, and how many tokens the prompt has."""
    prompt_ids = np.array(words.encode(prompt), dtype=np.int32)
    output_ids = np.array([i for text in output for i in words.encode(text)], dtype=np.int32)
    return ThinkingFinder(markers, Pieces(words)).find(prompt_ids, output_ids, truncated), len(prompt_ids)


def text_of(words: Any, prompt: str, output: list[str], thinking: Thinking) -> str:
    ids = words.encode(prompt) + [i for text in output for i in words.encode(text)]
    return str(words.decode(ids[thinking.start : thinking.end]))


@pytest.mark.parametrize("single", [(), ("<think>", "</think>")], ids=["several tokens", "single tokens"])
@pytest.mark.parametrize(
    ("prompt", "output", "opened", "ended", "thinking"),
    [
        ("Q<think>\n", ["hm", "</think>", "A"], "prompt", "marker", "hm</think>"),
        ("Q", ["<think>", "hm", "</think>", "A"], "model", "marker", "<think>hm</think>"),
        ("Q", ["\n<think>", "hm", "</think>\n\nA"], "model", "marker", "\n<think>hm</think>"),
        ("Q<think>", ["hm and hm"], "prompt", "end_of_turn", "hm and hm"),
        ("Q<think>", ["a </th", "ink> b"], "prompt", "marker", "a </think>"),  # split where no encoder would
        ("Q says <think>", ["x"], "prompt", "end_of_turn", "x"),
        ("Q <think> said the user", ["A"], None, None, ""),
        ("Q<think>\n\n</think>\n\n", ["A"], None, None, ""),
        ("Q", ["A quotes <think> and </think>"], None, None, ""),
    ],
)
def test_r12_thinking_is_found_whether_markers_are_single_tokens_or_not(
    single: tuple[str, ...], prompt: str, output: list[str], opened: str | None, ended: str | None, thinking: str
) -> None:
    words = tokenizer(*single)
    if single and any("</th" in text and "</think>" not in text for text in output):
        return  # a single token is never split
    found, begin = find(find_markers(CUSTOM, words), words, prompt, output)
    assert (found.opened_by, found.ended_by) == (opened, ended)
    assert found.start == begin
    # a token may hold the marker's end and what follows: it belongs to the thinking
    assert text_of(words, prompt, output, found).rstrip("\n") == thinking.rstrip("\n")


def test_r12_a_marker_of_several_tokens_is_several_tokens_here() -> None:
    markers = find_markers(CUSTOM, tokenizer())
    assert markers.end is not None and len(markers.end.ids) > 1


def test_r12_a_marker_whose_letters_are_split_into_bytes_is_found() -> None:
    words = tokenizer()
    markers = find_markers(params(format="custom", start="◁think▷", end="◁/think▷"), words)
    assert markers.end is not None and any("\ufffd" in words.decode([i]) for i in markers.end.ids)
    found, begin = find(markers, words, "Q", ["◁think▷", "hm ◁ 🦜", "◁/think▷", "A"])
    assert (found.opened_by, found.ended_by, found.start, found.stray) == ("model", "marker", begin, 0)
    assert text_of(words, "Q", ["◁think▷", "hm ◁ 🦜", "◁/think▷", "A"], found) == "◁think▷hm ◁ 🦜◁/think▷"


class Fallback:
    """A vocabulary as SentencePiece writes it: a blank as ▁, and bytes by name."""

    names = ("▁a", "<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>", "\ufffd")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.names[token]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "a" if ids == [0] else "\ufffd"


def test_the_bytes_of_a_token_are_known_in_both_kinds_of_vocabulary() -> None:
    words = tokenizer()
    level, fallback = Pieces(words), Pieces(Fallback())
    assert b"".join(level[i] for i in words.encode("a 🦜 ◁\n")) == "a 🦜 ◁\n".encode()
    assert [fallback[i] for i in range(6)] == [b" a", b"\xf0", b"\x9f", b"\xa6", b"\x9c", "\ufffd".encode()]


def test_the_budget_and_the_end_of_the_turn_are_told_apart() -> None:
    words = tokenizer("<think>", "</think>")
    markers = find_markers(params(), words)
    assert find(markers, words, "Q<think>", ["hm"], truncated=True)[0].ended_by == "budget"
    assert find(markers, words, "Q<think>", ["hm"], truncated=False)[0].ended_by == "end_of_turn"


def test_a_tool_call_section_ends_thinking() -> None:
    words = tokenizer("<think>", "</think>", "<|tool_calls_section_begin|>")
    found, begin = find(
        find_markers(params(format="kimi-k2.5"), words), words, "Q<think>", ["a", "<|tool_calls_section_begin|>", "b"]
    )
    assert (found.ended_by, found.end) == ("tool_call", begin + 1)


def test_markers_out_of_place_are_counted() -> None:
    words = tokenizer("<think>", "</think>")
    markers = find_markers(params(), words)
    assert find(markers, words, "Q<think>", ["a</think>b</think><think>"])[0].stray == 2
    assert find(markers, words, "Q", ["a</think>b"])[0].stray == 1
    assert find(markers, words, "Q<think>", ["a</think>b"])[0].stray == 0


@pytest.mark.parametrize("name", ["kimi-k2.5", "kimi-k2-thinking", "deepseek-r1", "qwen3"])
def test_presets_need_their_tokens(name: str) -> None:
    assert find_markers(params(format=name), tokenizer("<think>", "</think>")).end is not None
    assert parser_name(params(format=name))
    with pytest.raises(ValueError, match=r"has no token <think> or </think>; use another format, or custom"):
        find_markers(params(format=name), tokenizer())


def test_formats_without_thinking() -> None:
    assert find_markers(params(format="none"), tokenizer("<think>", "</think>")) == NO_MARKERS
    assert find_markers(params(format="auto"), tokenizer()) == NO_MARKERS
    assert parser_name(params(format="auto")) is None


def test_a_template_that_shows_thinking_makes_auto_look_for_it_in_text() -> None:
    words = tokenizer()
    words.chat_template = "... <think> ... </think> ..."
    markers = find_markers(params(format="auto"), words)
    assert markers.end is not None and len(markers.end.ids) > 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "custom"}, "reasoning.start and reasoning.end are needed"),
        ({"format": "custom", "start": "<t>"}, "reasoning.start and reasoning.end are needed"),
        ({"format": "auto", "end": "</t>"}, "reasoning.end is set, but reasoning.format is auto"),
    ],
)
def test_contradictory_settings_are_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        find_markers(params(**changes), tokenizer())
