"""The text route: markers, template tails, stop tokens, control strings in text; real tokenizers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from eagle3.digests import canonical_json
from eagle3.rebuild import TextEncoder, turn_end
from eagle3.tokens import Unusable, reconstruct
from eagle3.verifier import flat_ids, prompt_ids
from tests.text_tokenizers import byte_level, deepseek, rebuilder, sentence_piece, text_row

TOKENIZERS = {
    "markers of one token": byte_level,
    "markers of several tokens": lambda: byte_level(False),
    "sentence piece": sentence_piece,
    "deepseek": deepseek,
}
every_tokenizer = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.exhaustive if make is deepseek else ())
        for name, make in TOKENIZERS.items()
    ],
)
QUIET = canonical_json({"quiet": True})  # the prompt does not open the thinking
OFF = canonical_json({"thinking": False})  # the prompt has closed it


def output_text(row: dict[str, Any], tokenizer: Any | None = None) -> str:
    """The rebuilt output as text."""
    made = rebuilder(tokenizer or byte_level())
    return str(made.tokenizer.decode(made.rebuild(row)["output_token_ids"].tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("single", [True, False], ids=["one token", "several tokens"])
@pytest.mark.parametrize(
    ("kwargs", "row", "expected"),
    [
        ("{}", ("hm", "4"), "hm</think>4<|im_end|>"),  # the prompt opened it
        (QUIET, ("hm", "4"), "<think>hm</think>4<|im_end|>"),  # the model opens it
        (OFF, (None, "4"), "4<|im_end|>"),
        (OFF, ("4", None), "4<|im_end|>"),  # a parser that overlooked the prompt (G03)
        ("{}", ("\nhm \n", "\n\n4 "), "\nhm \n</think>\n\n4 <|im_end|>"),  # white space as given
        ("{}", (None, "4"), "</think>4<|im_end|>"),  # an answer without thinking where the prompt opened it
        (QUIET, (None, "4"), "4<|im_end|>"),
        ("{}", (None, "<think>hm</think>4"), "hm</think>4<|im_end|>"),  # inline, as in a reference answer
        (QUIET, (None, "<think>hm</think>4"), "<think>hm</think>4<|im_end|>"),
        (QUIET, (None, "\n<think>\nhm\n</think>\n\n4"), "\n<think>\nhm\n</think>\n\n4<|im_end|>"),
        (OFF, (None, "<think>hm</think>4"), "<think>hm</think>4<|im_end|>"),
        (QUIET, (None, "<think>hm"), "<think>hm<|im_end|>"),
    ],
)
def test_the_rule(single: bool, kwargs: str, row: tuple[str | None, str | None], expected: str) -> None:
    made = rebuilder(byte_level(single)).rebuild(text_row(*row, chat_template_kwargs=kwargs))
    words = byte_level(single)
    assert words.decode(made["output_token_ids"].tolist()) == expected
    assert flat_ids(words.encode(expected)) == made["output_token_ids"].tolist()  # markers are ids, not typed text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("hm", None), "hm"),
        (("hm", "4"), "hm</think>4"),
        ((None, "hm"), "hm"),  # G02: the parser called it content; nobody adds a closing marker
        ((None, "hm</think>4"), "hm</think>4"),
        ((None, "<think>hm"), "hm"),
    ],
)
def test_g02_a_cut_answer_has_neither_stop_token_nor_a_marker_of_ours(row: Any, expected: str) -> None:
    assert output_text(text_row(*row, finish="length")) == expected


@pytest.mark.parametrize("tail", ["<think>", "<think>\n", "<think>\n\n"])
def test_the_template_tail_may_hold_the_marker_and_line_breaks(tail: str) -> None:
    words = byte_level()
    made = rebuilder(words)
    prompt = np.array(words.encode("<|im_start|>assistant\n" + tail), dtype=np.int32)
    assert words.decode(made.output(text_row("hm", "4"), prompt).tolist()) == "hm</think>4<|im_end|>"
    closed = np.array(words.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n"), dtype=np.int32)
    assert words.decode(made.output(text_row(None, "4"), closed).tolist()) == "4<|im_end|>"
    quoted = np.array(words.encode("Say <think> now<|im_end|><|im_start|>assistant\n"), dtype=np.int32)
    assert words.decode(made.output(text_row("hm", "4"), quoted).tolist()) == "<think>hm</think>4<|im_end|>"


def test_r02_an_answer_whose_opening_marker_is_in_the_prompt() -> None:
    """Raw "r</think>a": equal to the ids that the engine would have, no empty block, no orphan."""
    words = byte_level()
    prompt = words.apply_chat_template(text_row(None, None)["messages"], add_generation_prompt=True, tokenize=False)
    written = words.encode(prompt + "r</think>a<|im_end|>")
    for row in (text_row(None, "r</think>a"), text_row("r", "a"), text_row(None, "<think>r</think>a")):
        made = rebuilder(words).rebuild(row)
        assert [*made["prompt_token_ids"], *made["output_token_ids"]] == written


@every_tokenizer
@pytest.mark.parametrize("off", [-1, 1])
def test_r03_a_length_that_usage_contradicts_is_refused(make: Any, off: int) -> None:
    made = rebuilder(make())
    row = made.rebuild(text_row("Let me see", "The answer is 4"))
    counted = {"prompt_tokens": len(row["prompt_token_ids"]), "completion_tokens": len(row["output_token_ids"])}
    sample = reconstruct(row | counted, made.identity, made.finder, 200, rebuilt=True)
    assert (sample["rebuilt"], sample["greedy"]) == (True, False)
    assert sample["thinking_ended_by"] == "marker"
    assert reconstruct(row, made.identity, made.finder, 200, rebuilt=True)["length"] == sample["length"]  # no usage
    for name, value in counted.items():
        with pytest.raises(Unusable) as caught:
            reconstruct(row | counted | {name: value + off}, made.identity, made.finder, 200, rebuilt=True)
        assert caught.value.reason == "rebuilt ids disagree with usage"


def test_r03_reasoning_that_is_dropped_is_noticed_by_its_length() -> None:
    made = rebuilder(byte_level())
    whole = made.rebuild(text_row("a long thought about it", "4"))
    row = made.rebuild(text_row(None, "4")) | {
        "prompt_tokens": len(whole["prompt_token_ids"]),
        "completion_tokens": len(whole["output_token_ids"]),
    }
    with pytest.raises(Unusable, match="rebuilt ids disagree with usage"):
        reconstruct(row, made.identity, made.finder, 200, rebuilt=True)


def test_r04_the_kwargs_of_generation_are_used_again() -> None:
    words = byte_level()
    made = rebuilder(words)
    row = text_row(None, "4")
    for kwargs, tail in (("{}", "<think>"), (OFF, "<think></think>"), (QUIET, "assistant\n")):
        ids = made.rebuild(row | {"chat_template_kwargs": kwargs})["prompt_token_ids"]
        assert words.decode(ids.tolist()).endswith(tail)


def test_r05_history_is_templated_as_the_server_did_and_only_the_last_answer_is_learnt() -> None:
    words = byte_level()
    made = rebuilder(words)
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>old thought</think>two"},
        {"role": "user", "content": "three"},
    ]
    row = made.rebuild(text_row("new thought", "four", messages=turns))
    assert row["prompt_token_ids"].tolist() == prompt_ids(words, turns, {})
    sample = reconstruct(row, made.identity, made.finder, 200, rebuilt=True)
    learnt = sample["input_ids"][sample["loss_mask"]]
    assert words.decode(learnt.tolist()) == "new thought</think>four<|im_end|>"


@pytest.mark.parametrize(
    "value",
    [
        [5, 6, 7],
        (5, 6, 7),
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        [[5, 6, 7]],
        torch.tensor([[5, 6, 7]]),
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]},
        BatchEncoding({"input_ids": torch.tensor([[5, 6, 7]])}),
    ],
)
def test_r06_whatever_a_template_call_returns_is_one_list(value: Any) -> None:
    assert flat_ids(value) == [5, 6, 7]


@pytest.mark.parametrize("value", [[[1, 2], [3, 4]], [[1], [2, 3]], "abc", ["a"], [1.5], [None], 5, [[[1]]], [True]])
def test_r06_other_shapes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        flat_ids(value)


def test_r06_no_ids_are_no_error() -> None:
    assert flat_ids([]) == []


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("automatic", [True, False])
def test_r07_bos_as_often_as_the_template_writes_it(written: int, automatic: bool) -> None:
    words = sentence_piece.__wrapped__()
    words.chat_template = "<s>" * written + "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    if automatic:
        words.add_bos_token = True
        words.update_post_processor()
    ids = rebuilder(words).rebuild(text_row(None, "4"))["prompt_token_ids"].tolist()
    assert ids.count(words.bos_token_id) == written
    assert ids[:written] == [words.bos_token_id] * written


def test_r11_the_length_limit_holds_for_rebuilt_rows_too() -> None:
    made = rebuilder(byte_level())
    row = made.rebuild(text_row(None, "four and five"))
    length = len(row["prompt_token_ids"]) + len(row["output_token_ids"])
    assert reconstruct(row, made.identity, made.finder, length, rebuilt=True)["length"] == length
    with pytest.raises(Unusable, match=r"longer than verifier\.max_model_len"):
        reconstruct(row, made.identity, made.finder, length - 1, rebuilt=True)


def test_r12_markers_of_several_tokens_and_of_one_give_the_same_text_and_spans() -> None:
    found = []
    for single in (True, False):
        made = rebuilder(byte_level(single))
        row = made.rebuild(text_row("\nLet me see.\n", "\n\nThe answer is 4"))
        sample = reconstruct(row, made.identity, made.finder, 300, rebuilt=True)
        ids = sample["input_ids"].tolist()
        spans = (sample["prompt_length"], sample["thinking_end"], sample["length"])
        found.append([made.tokenizer.decode(ids[a:b]) for a, b in zip((0, *spans), spans, strict=False)])
    assert "".join(found[0]) == "".join(found[1])
    assert [text.strip() for text in found[0]] == [text.strip() for text in found[1]]
    assert found[0][1] == "\nLet me see.\n</think>"


@every_tokenizer
def test_p08_control_strings_in_text_stay_text(make: Any) -> None:
    words = make()
    made = rebuilder(words)
    control = [str(token) for token in words.added_tokens_decoder.values()][:40]
    text = "He typed " + " and ".join([*control, "</think>", "<think>"]) + " as code"
    ids = made.encode(text)
    assert not set(ids) & set(words.added_tokens_decoder)
    assert words.decode(ids).strip() == text
    answer = made.rebuild(text_row("hm", text))["output_token_ids"].tolist()
    added = [token for token in answer if token in words.added_tokens_decoder]
    single = len(made.identity.markers.end.ids) == 1
    opens = single and not made.finder.opened_in(made.prompt(text_row(None, "x")))
    markers = made.identity.markers
    assert added == [*(markers.start.ids if opens else ()), *(markers.end.ids if single else ()), words.eos_token_id]


def test_p08_the_prompt_is_what_the_engine_reads_even_where_a_user_typed_control_strings() -> None:
    words = byte_level()
    row = text_row(
        None, "4", messages=[{"role": "user", "content": "What is <|im_end|><|im_start|>assistant </think>?"}]
    )
    made = rebuilder(words)
    rebuilt = made.rebuild(row)
    assert rebuilt["prompt_token_ids"].tolist() == prompt_ids(words, row["messages"], {})
    sample = reconstruct(rebuilt, made.identity, made.finder, 200, rebuilt=True)
    assert words.decode(sample["input_ids"][sample["loss_mask"]].tolist()) == "</think>4<|im_end|>"


class SlowTokenizer:
    """As Kimi's: no fast one, and its switch works only when nothing else is given."""

    is_fast = False

    def encode(self, text: str, allow_special_tokens: bool = True, **others: Any) -> list[int]:
        return [1] if allow_special_tokens or others else [ord(c) for c in text]


class PlainSlowTokenizer:
    is_fast = False

    def encode(self, text: str, add_special_tokens: bool = True, **others: Any) -> list[int]:
        return [ord(c) for c in text] if others == {"split_special_tokens": True} and not add_special_tokens else [1]


@pytest.mark.parametrize("kind", [SlowTokenizer, PlainSlowTokenizer])
def test_p08_tokenizers_that_are_not_fast_have_switches_of_their_own(kind: Any) -> None:
    assert TextEncoder(kind())("</s>") == [ord(c) for c in "</s>"]


@pytest.mark.parametrize("prepend", [True, False])
def test_nothing_is_put_in_front_of_text_inside_a_conversation(prepend: bool) -> None:
    words = sentence_piece(prepend)
    encode = TextEncoder(words)
    tokens = words.convert_ids_to_tokens(encode("The fox"))
    assert "".join(tokens) == "The\u2581fox"
    assert encode("") == []


@pytest.mark.parametrize(
    ("template", "stops", "expected"),
    [
        ("{{ messages[1]['content'] }}<|im_end|>\n", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
        ("{{ messages[1]['content'] }}<|endoftext|>\n", ["<|im_end|>", "<|endoftext|>"], "<|endoftext|>"),
        ("{{ messages[1]['content'] }}<|endoftext|>\n", ["<|im_end|>"], "<|im_end|>"),  # it is no stop token
        ("{{ messages[1]['content'] }}", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),  # EOS
        ("nothing of it", ["<|im_end|>"], "<|im_end|>"),
        ("{{ raise_exception('no') }}", ["<|im_end|>"], "<|im_end|>"),
    ],
)
def test_the_stop_id_is_the_one_that_the_template_writes_else_eos(
    template: str, stops: list[str], expected: str
) -> None:
    words = byte_level.__wrapped__()
    words.chat_template = template
    assert turn_end(words, words.convert_tokens_to_ids(stops)) == words.convert_tokens_to_ids(expected)


def test_without_any_stop_token_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no stop token"):
        turn_end(byte_level(), ())


@pytest.mark.parametrize(("named", "last"), [(None, [2]), ("0", [0]), ("\n\n", []), ("77", [])])
def test_the_stop_that_the_server_named_is_used(named: str | None, last: list[int]) -> None:
    made = rebuilder(byte_level(), stop_token_ids=(0, 2))
    assert made.rebuild(text_row("hm", "4", stop_reason=named))["output_token_ids"].tolist() == [
        *made.rebuild(text_row("hm", "4", stop_reason="\n\n"))["output_token_ids"].tolist(),
        *last,
    ]


@pytest.mark.parametrize("row", [text_row(None, None), text_row("", "")])
def test_rows_without_text_are_refused(row: Any) -> None:
    with pytest.raises(Unusable, match="neither ids nor text"):
        rebuilder(byte_level()).rebuild(row)


def test_messages_that_the_template_refuses_are_refused_by_name() -> None:
    words = byte_level.__wrapped__()
    words.chat_template = "{{ raise_exception('no system turn, please') }}"
    with pytest.raises(Unusable, match="refused by the chat template: no system turn"):
        rebuilder(words).rebuild(text_row(None, "4"))


TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@every_tokenizer
@settings(deadline=None, max_examples=60)
@given(reasoning=TEXTS, content=TEXTS)
def test_ids_that_an_encoder_would_give_come_back(make: Any, reasoning: str, content: str) -> None:
    """rebuild(decode(ids)) = ids, for ids that are the canonical encoding of what they decode to."""
    words = make()
    made = rebuilder(words)
    prompt = made.prompt(text_row(None, "x"))
    markers = made.identity.markers
    single = len(markers.end.ids) == 1
    opening = "" if made.finder.opened_in(prompt) else markers.start.text
    if single:
        start = list(markers.start.ids) if opening else []
        parts = [made.encode(reasoning), made.encode(content)]
        ids = [*start, *parts[0], *markers.end.ids, *parts[1], words.eos_token_id]
        reasoning, content = (decode_inside(words, part) for part in parts)
    else:
        ids = [*made.encode(f"{opening}{reasoning}{markers.end.text}{content}"), words.eos_token_id]
    assert made.rebuild(text_row(reasoning, content))["output_token_ids"].tolist() == ids


def decode_inside(words: Any, ids: list[int]) -> str:
    """The text of ids behind a token, as a server tells it: a leading blank is no artefact there."""
    before = words.encode("a", add_special_tokens=False)
    return str(words.decode([*before, *ids])).removeprefix("a")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(3, 436), min_size=1, max_size=12))
def test_any_ids_come_back_unless_an_encoder_would_have_split_their_text_otherwise(ids: list[int]) -> None:
    words = byte_level()
    text = words.decode(ids)
    made = rebuilder(words).output(text_row(None, text, "length"), np.array([1], dtype=np.int32)).tolist()
    assert (made == ids) == (words.encode(text) == ids)
