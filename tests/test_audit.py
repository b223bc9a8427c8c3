"""The audit: each way in which the text route can go wrong has its kind; the naive route loses the thinking."""

from typing import Any

import numpy as np
import pytest

from eagle3.audit import KINDS, audit, audit_metrics, audit_text
from eagle3.digests import canonical_json
from eagle3.tables import Row
from tests.text_tokenizers import byte_level, deepseek, rebuilder, text_row

QUIET = canonical_json({"quiet": True})


def answered(
    words: Any, written: str, reasoning: str | None, content: str | None, finish: str = "stop", **more: Any
) -> Row:
    """A row that the engine wrote as `written` (the stop token included) and the server parsed into the two texts."""
    row = text_row(reasoning, content, finish, **more)
    prompt = rebuilder(words).prompt(row)
    output = np.array(words.encode(written, add_special_tokens=False), dtype=np.int32)
    return row | {"prompt_token_ids": prompt, "output_token_ids": output}


def audited(row: Row, words: Any) -> Row:
    (found,) = audit([row], rebuilder(words))
    return found


def test_a_kimi_template_loses_the_thinking_and_ours_does_not() -> None:
    """The template blanks the reasoning of the last assistant turn; both routes start from the same parsed fields."""
    words = byte_level()
    rows = [
        answered(words, f"thought {i}</think>answer {i}<|im_end|>", f"thought {i}", f"answer {i}") for i in range(9)
    ]
    rows.append(answered(words, "</think>4<|im_end|>", None, "4"))
    found = list(audit(rows, rebuilder(words)))
    metrics = audit_metrics(found)
    assert (metrics["rows"], metrics["identical"], metrics["identical_share"]) == (10, 10, 1.0)
    assert (metrics["with_thinking"], metrics["naive_thinking_lost"], metrics["naive_thinking_lost_share"]) == (9, 9, 1)
    assert metrics["naive_identical"] == 1  # the one without any thinking
    assert metrics["kinds"] == dict.fromkeys(KINDS, 0)
    text = audit_text(found)
    assert "compared: 10, identical: 10 (100.0%)" in text
    assert "thinking lost in 9 of 9 that think" in text


def test_r10_reasoning_under_the_old_name_is_lost_without_an_error_by_the_naive_route() -> None:
    words = byte_level.__wrapped__()
    words.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['reasoning'] %}<think>{{ m['reasoning'] }}</think>"
        "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    row = answered(words, "<think>hm</think>4<|im_end|>", "hm", "4")
    found = audited(row, words)
    assert (found["kind"], found["naive_identical"], found["naive_thinking_lost"]) == (None, False, True)
    words.chat_template = words.chat_template.replace("m['reasoning']", "m['reasoning_content']")
    found = audited(row, words)
    assert (found["naive_identical"], found["naive_thinking_lost"]) == (True, False)  # a line break behind is no matter


@pytest.mark.parametrize(
    ("written", "reasoning", "content", "finish", "kind"),
    [
        ("hm</think>4<|im_end|>", "hm", "4", "stop", None),
        ("hm\n</think>\n\n4<|im_end|>", "hm", "4", "stop", "whitespace"),
        ("hm</think>4<|im_end|>", None, "4", "stop", "reasoning_missing"),
        ("hm</think>4</think><|im_end|>", "hm", "4", "stop", "thinking_marker"),
        ("hm</think>4<|im_start|><|im_end|>", "hm", "4<|im_start|>", "stop", "control_token"),
        ("hm</think>4", "hm", "4", "stop", "stop_token"),
        ("hm</think>4<|endoftext|>", "hm", "4", "stop", "stop_token"),
        ("hm", None, "hm", "length", None),  # misplaced, and put right because the prompt had opened the thinking
        ("hm</think>4<|im_end|>", "hm", "five", "stop", "other"),
        ("hm</think>4<|im_end|>", None, None, "stop", "not_rebuilt"),
    ],
)
def test_every_difference_has_its_kind(
    written: str, reasoning: str | None, content: str | None, finish: str, kind: str | None
) -> None:
    words = byte_level()
    (found,) = audit([answered(words, written, reasoning, content, finish)], rebuilder(words, stop_token_ids=(0, 2)))
    assert found["kind"] == kind
    assert (found["place"] is None) == (kind in (None, "not_rebuilt"))


def test_g02_reasoning_that_was_cut_and_lost_its_marker() -> None:
    words = byte_level()
    row = answered(words, "<think>a long thought", None, "a long thought", "length", chat_template_kwargs=QUIET)
    assert audited(row, words)["kind"] == "truncated_reasoning"


def test_another_prompt_is_told_first() -> None:
    words = byte_level()
    row = answered(words, "hm</think>4<|im_end|>", "hm", "4") | {"chat_template_kwargs": QUIET}
    found = audited(row, words)
    assert found["kind"] == "prompt"
    assert found["place"] == len(row["prompt_token_ids"]) - 1  # the marker; all ids together would be the same


def test_r01_a_word_split_as_no_encoder_would_is_retokenised_and_its_place_is_told() -> None:
    words = byte_level()
    row = answered(words, "hm</think>The fox<|im_end|>", "hm", "The fox")
    split = [token for piece in ("hm", "</think>", "T", "he", " fox", "<|im_end|>") for token in words.encode(piece)]
    assert split != row["output_token_ids"].tolist()
    found = audited(row | {"output_token_ids": np.array(split, dtype=np.int32)}, words)
    assert found["kind"] == "retokenised"
    assert found["place"] == len(row["prompt_token_ids"]) + len(words.encode("hm")) + 1
    assert found["written"].startswith("The fox")


def test_r02_the_raw_answer_with_the_closing_marker_alone_is_identical() -> None:
    words = deepseek()
    row = answered(words, "r</think>a<\uff5cend\u2581of\u2581sentence\uff5c>", None, "r</think>a")
    found = audited(row, words)
    assert (found["kind"], found["naive_thinking_lost"]) == (None, True)  # DeepSeek's template cuts it off


def test_the_text_for_a_person_is_escaped_and_explains() -> None:
    words = byte_level()
    rows = [answered(words, "hm</think>\x1b[31m 4<|im_end|>", "hm", "5") | {"category": "\x1b[2J"}]
    text = audit_text(list(audit(rows, rebuilder(words))))
    assert "\x1b" not in text
    assert "\\x1b[31m" in text
    assert KINDS["other"] in text
    assert "at token" in text


def test_nothing_to_compare() -> None:
    metrics = audit_metrics([])
    assert (metrics["rows"], metrics["identical_share"], metrics["naive_thinking_lost_share"]) == (0, 0, 0)
    assert "compared: 0" in audit_text([])


def test_a_template_that_refuses_is_no_crash() -> None:
    words = byte_level.__wrapped__()
    row = answered(words, "hm</think>4<|im_end|>", "hm", "4")
    words.chat_template = "{{ raise_exception('no') }}"
    found = audited(row, words)
    assert (found["kind"], found["naive_identical"]) == ("not_rebuilt", False)
