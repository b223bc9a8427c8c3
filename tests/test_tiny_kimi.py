"""The tiny Kimi is like the large one where it matters: ids of the markers, and reasoning in its templates."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.tiny_kimi import CONTROL_IDS, STRUCTURE_IDS, build_kimi_tokenizer

QUESTION = {"role": "user", "content": "Hi"}
CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
STYLES = ["k2.5", "k2-thinking"]


def render(style: Any, messages: list[dict[str, Any]], **arguments: bool) -> str:
    tokenizer, _ = build_kimi_tokenizer(style)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    return text


def test_ids_are_those_of_the_large_one(tiny_kimi: Path) -> None:
    tokenizer, config = AutoTokenizer.from_pretrained(tiny_kimi), AutoConfig.from_pretrained(tiny_kimi)
    assert (len(tokenizer), config.vocab_size, config.eos_token_id) == (163840, 163840, 163586)
    assert {name: tokenizer.encode(name) for name in CONTROL_IDS} == {name: [i] for name, i in CONTROL_IDS.items()}
    text = "".join(STRUCTURE_IDS)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_words_that_no_merge_leads_to_are_tokenised_to_other_ids() -> None:
    tokenizer, readable = build_kimi_tokenizer("k2.5")
    for number in (readable[-1] + 1000, 163583):
        assert tokenizer.encode(tokenizer.decode([number])) != [number]


@pytest.mark.parametrize(
    ("style", "arguments", "ending"),
    [
        ("k2.5", {}, "<think>"),
        ("k2.5", {"thinking": True}, "<think>"),
        ("k2.5", {"thinking": False}, "<think></think>"),
        ("k2-thinking", {}, ""),
    ],
)
def test_who_opens_the_thinking(style: str, arguments: dict[str, bool], ending: str) -> None:
    turn = "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert render(style, [QUESTION], add_generation_prompt=True, **arguments) == turn + ending


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_finished_conversation_shows_no_reasoning(style: str, field: str) -> None:
    answer = {"role": "assistant", "content": "It is so.", field: "Let me see."}
    assert render(style, [QUESTION, answer]).endswith("<|im_middle|><think></think>It is so.<|im_end|>")


@pytest.mark.parametrize("style", STYLES)
def test_reasoning_stays_while_tools_are_at_work(style: str) -> None:
    calling = {"role": "assistant", "content": "", "reasoning_content": "Let me see.", "tool_calls": [CALL]}
    text = render(style, [QUESTION, calling, {"role": "tool", "content": "x"}])
    assert (
        "<think>Let me see.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
        '<|tool_call_argument_begin|>{"at": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    ) in text
    assert text.endswith("<|im_system|>tool<|im_middle|>x<|im_end|>")
