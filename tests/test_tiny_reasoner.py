"""The tiny reasoner really reasons: right under greedy decoding, whoever opens the thinking; cut by a low budget."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_reasoner import END, Reply, parse_reasoner, reasoner_prompts, right_output

split = pytest.mark.exhaustive
both_tokenizers = pytest.mark.parametrize(
    "verifier", ["tiny_reasoner", pytest.param("tiny_reasoner_split", marks=split)]
)


@pytest.fixture
def folder(verifier: str, request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(verifier)
    return found


def write(folder: Path, questions: list[str], *, open_thinking: bool, budget: int = 64) -> list[str]:
    """Greedy outputs, with their special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.set_num_threads(1)  # the models are tiny; threads that wait for each other on a busy machine take minutes
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in questions],
        add_generation_prompt=True,
        open_thinking=open_thinking,
        padding=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        made = model.generate(**prompts, max_new_tokens=budget, do_sample=False)
    outputs = tokenizer.batch_decode(made[:, prompts["input_ids"].shape[1] :])
    return [output.split(END)[0] for output in outputs]


@pytest.mark.slow
@both_tokenizers
@pytest.mark.parametrize("open_thinking", [False, True])
def test_nearly_all_greedy_rows_are_right(folder: Path, open_thinking: bool) -> None:
    questions = reasoner_prompts(100, seed=1)
    outputs = write(folder, questions, open_thinking=open_thinking)
    wanted = [right_output(question, opened_by_prompt=open_thinking) for question in questions]
    assert sum(output == want for output, want in zip(outputs, wanted, strict=True)) >= 95
    replies = [parse_reasoner(output) for output in outputs]
    assert sum(reply.right and reply.opened is not open_thinking for reply in replies) >= 95


@pytest.mark.slow
@both_tokenizers
def test_a_low_budget_cuts_some_rows_in_the_thinking_and_some_in_the_answer(folder: Path) -> None:
    questions = reasoner_prompts(60, seed=2)
    outputs = write(folder, questions, open_thinking=False, budget=24)
    right = [right_output(question).startswith(output) for question, output in zip(questions, outputs, strict=True)]
    assert sum(right) >= 57
    replies = [parse_reasoner(output) for output in outputs]
    in_thinking = sum(reply.thinking_end is None for reply in replies)
    whole = sum(reply.stopped for reply in replies)
    assert min(in_thinking, whole, len(replies) - in_thinking - whole) >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "tokens"), [("tiny_reasoner", 1), pytest.param("tiny_reasoner_split", 3, marks=split)]
)
def test_markers_are_one_token_or_several_and_decode_to_the_same_text(folder: Path, tokens: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for marker in ("<think>", "</think>"):
        assert len(tokenizer.encode(marker)) == tokens
    text = right_output("Reverse KDAF")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_output_is_taken_apart() -> None:
    whole = right_output("Reverse KDAF")
    assert parse_reasoner(whole) == Reply(True, "K,D,A,F\n", len("<think>\nK,D,A,F\n</think>"), "\n\nFADK", True)
    assert parse_reasoner(whole).right
    assert parse_reasoner(right_output("Reverse KDAF", opened_by_prompt=True)) == Reply(
        False, "K,D,A,F\n", len("K,D,A,F\n</think>"), "\n\nFADK", True
    )
    assert parse_reasoner("<think>\nK,D,") == Reply(True, "K,D,", None, None, False)
    assert parse_reasoner("K,D\n</think>\n\nD") == Reply(False, "K,D\n", len("K,D\n</think>"), "\n\nD", False)
    empty = "<think>\n\n</think>\n\n<|im_end|>"
    for wrong in (whole.replace("FADK", "FADD"), whole.replace("K,D", "KD"), whole.removesuffix("<|im_end|>"), empty):
        assert not parse_reasoner(wrong).right
