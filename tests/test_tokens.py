"""Ids verbatim, mask exactly the generated tokens, spans from ids."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.digests import canonical_json
from eagle3.reasoning import Marker, Markers, ThinkingFinder
from eagle3.tokens import Unusable, is_greedy, reconstruct
from eagle3.verifier import VerifierIdentity
from tests.tiny_verifiers import build_tokenizer

THINK, END, TOOL, STOP = 90, 91, 92, 2
BLANK = {80: b"\n", 81: b"\n\n"}
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
MARKERS = Markers(Marker("<think>", (THINK,)), Marker("</think>", (END,)), (Marker("<tool>", (TOOL,)),))
FINDER = ThinkingFinder(MARKERS, defaultdict(lambda: b"x", BLANK))
IDENTITY = VerifierIdentity(
    name="x", digest="d" * 64, architecture="LlamaForCausalLM", hidden_size=8, num_layers=8, vocab_size=100,
    max_position_embeddings=64, rms_norm_eps=1e-5, aux_layer_ids=(2, 4, 5), stop_token_ids=(STOP,), dtype="float32",
    engine="vllm 0", markers=MARKERS,
)  # fmt: skip


def response(prompt: list[int], output: list[int], finish: str = "stop", **changes: Any) -> dict[str, Any]:
    return {
        "prompt_id": "p", "sample": 0, "source": "s", "category": "c", "split": "train", "messages": [],
        "reference": None,
        "prompt_token_ids": prompt, "output_token_ids": output, "reasoning": None, "content": "text that is ignored",
        "finish_reason": finish, "stop_reason": None, "prompt_tokens": len(prompt), "completion_tokens": len(output),
        "latency_s": 1.0, "attempts": 1, "sampling": canonical_json(GREEDY), "chat_template_kwargs": "{}",
        "verifier_digest": "d" * 64, "engine": "vllm 0", **changes,
    }  # fmt: skip


@given(st.lists(st.integers(3, 89), min_size=1, max_size=20), st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_ids_are_prompt_then_output_and_the_mask_is_the_output(prompt: list[int], output: list[int]) -> None:
    sample = reconstruct(response(prompt, output), IDENTITY, FINDER, 64)
    assert sample["input_ids"].tolist() == prompt + output
    assert [i for i, m in zip(sample["input_ids"], sample["loss_mask"], strict=True) if m] == output
    assert sample["length"] == len(prompt) + len(output)


@pytest.mark.parametrize(
    "pieces",
    [
        ["q", "u", "i", "c", "k"],
        ["The", " ", " ", "quick"],
        ["a 🦜 b"],
        ["<|im", "_end|>"],
        ["<|im_end|>", "<|im_end|>"],
    ],
    ids=["a word in letters", "two blanks", "an emoji of bytes", "a marker in pieces", "markers"],
)
def test_r01_ids_that_no_encoder_would_choose_are_kept(pieces: list[str]) -> None:
    tokenizer = build_tokenizer()
    output = [i for text in pieces for i in tokenizer.encode(text)]
    if pieces[0] in ("q", "<|im"):
        assert tokenizer.encode(tokenizer.decode(output)) != output
    identity = replace(IDENTITY, vocab_size=640)
    sample = reconstruct(response([5], output, content=tokenizer.decode(output)), identity, FINDER, 64)
    assert sample["input_ids"].tolist() == [5, *output]


def test_m04_the_mask_is_the_output_even_where_it_repeats_the_prompt() -> None:
    """The answer is an earlier assistant turn word for word, and its end of turn is no end of text."""
    turn = [7, 8, 9, STOP]
    sample = reconstruct(response([5, *turn, 6, *turn, 6], [*turn, *turn]), IDENTITY, FINDER, 64)
    assert sample["loss_mask"].tolist() == [False] * 11 + [True] * 8
    assert sample["loss_mask"].sum() == 8  # = completion_tokens


def test_p08_control_tokens_in_the_prompt_move_no_boundary() -> None:
    """A user's text that the tokenizer read as ends of turns and think markers."""
    prompt = [5, THINK, 7, END, STOP, TOOL, 6, THINK, STOP]
    sample = reconstruct(response(prompt, [7, STOP, THINK, END, 8]), IDENTITY, FINDER, 64)
    assert (sample["prompt_length"], sample["answer_start"], sample["thinking_opened_by"]) == (9, 9, None)
    assert sample["loss_mask"].tolist() == [False] * 9 + [True] * 5


@pytest.mark.parametrize("side", ["prompt", "output"])
def test_r09_a_null_among_the_ids_is_refused(side: str) -> None:
    """As from prompt logprobs, where the first token has none."""
    with pytest.raises(Unusable, match=f"{side} id 0 is null"):
        reconstruct(response([5, 6], [7, STOP], **{f"{side}_token_ids": [None, 6]}), IDENTITY, FINDER, 64)


@pytest.mark.parametrize(
    ("prompt", "output", "finish", "thinking", "truncated"),
    [
        ([5, THINK], [7, 8, END, 9, STOP], "stop", [7, 8, END], None),  # opened by the prompt
        ([5], [THINK, 7, END, 9, STOP], "stop", [THINK, 7, END], None),  # opened by the model
        ([5], [7, 8, STOP], "stop", [], None),  # never opened
        ([5], [7, THINK, 8, STOP], "stop", [], None),  # a marker quoted inside an answer opens nothing
        ([5, THINK, 6], [7, END, STOP], "stop", [], None),  # a marker quoted inside the question opens nothing
        ([5, THINK], [7, 8], "length", [7, 8], "thinking"),  # cut off inside the thinking
        ([5, THINK], [7, END, 8], "length", [7, END], "answer"),  # cut off inside the answer
        ([5, THINK], [7, END], "length", [7, END], "answer"),  # cut off right behind the marker
        ([5], [7, 8], "length", [], "answer"),
        ([5, THINK], [7, END, 8, END, STOP], "stop", [7, END], None),  # only the first closing marker ends it
        ([5, THINK, 80], [7, END, 9], "stop", [7, END], None),  # blanks behind the opening marker in the prompt
        ([5, THINK, 81, END, 81], [7, STOP], "stop", [], None),  # the prompt has closed it again: thinking is off
        ([5], [80, THINK, 7, END, 9], "stop", [80, THINK, 7, END], None),  # a blank before the model opens it
        ([5, THINK], [7, TOOL, 8, STOP], "stop", [7], None),  # a tool-call section ends it
        ([5, THINK], [7, END, TOOL, 8, STOP], "stop", [7, END], None),
        ([5, THINK], [7, TOOL, 8], "length", [7], "answer"),
    ],
)
def test_spans(prompt: list[int], output: list[int], finish: str, thinking: list[int], truncated: str | None) -> None:
    sample = reconstruct(response(prompt, output, finish), IDENTITY, FINDER, 64)
    ids = sample["input_ids"].tolist()
    assert ids[sample["thinking_start"] : sample["thinking_end"]] == thinking
    assert ids[sample["answer_start"] :] == output[len(thinking) :]
    assert sample["truncated_in"] == truncated


def test_without_truncation_an_unclosed_thinking_is_kept_and_not_flagged() -> None:
    sample = reconstruct(response([5, THINK], [7, STOP]), IDENTITY, FINDER, 64)
    assert sample["truncated_in"] is None
    assert sample["thinking_end"] == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion_tokens": 5}, "ids disagree with usage"),
        ({"prompt_tokens": 0}, "ids disagree with usage"),
        ({"output_token_ids": [7, 100, STOP]}, "id outside the vocabulary"),
        ({"output_token_ids": [7, None, STOP]}, "id outside the vocabulary"),
        ({"output_token_ids": [7, -1, STOP]}, "id outside the vocabulary"),
        ({"verifier_digest": "e" * 64}, "answered by another verifier"),
        ({"prompt_token_ids": [], "prompt_tokens": 0}, "no prompt ids"),
        ({"prompt_token_ids": [5] * 62, "prompt_tokens": 62}, "longer than verifier.max_model_len"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        reconstruct(response([5], [7, 8, STOP], **changes), IDENTITY, FINDER, 64)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("length", "fits"), [(63, True), (64, True), (65, False)])
def test_the_length_limit_is_exact(length: int, fits: bool) -> None:
    row = response([5], [7] * (length - 1))
    if fits:
        assert reconstruct(row, IDENTITY, FINDER, 64)["length"] == length
    else:
        with pytest.raises(Unusable):
            reconstruct(row, IDENTITY, FINDER, 64)


def test_penalties_and_temperature_make_a_row_not_greedy() -> None:
    assert is_greedy(GREEDY)
    assert not is_greedy({})  # a human answer
    for name, value in {"temperature": 0.6, "repetition_penalty": 1.1, "presence_penalty": 0.1}.items():
        assert not is_greedy(GREEDY | {name: value})


def test_the_text_fields_do_not_matter() -> None:
    plain = reconstruct(response([5, THINK], [7, END, 9, STOP]), IDENTITY, FINDER, 64)
    other = reconstruct(response([5, THINK], [7, END, 9, STOP], reasoning="x", content=None), IDENTITY, FINDER, 64)
    assert plain.keys() == other.keys()
    assert all(np.array_equal(plain[name], other[name]) for name in plain)
