"""How often the text route would have gone wrong: rows with ids, rebuilt from their text and compared.

Beside it, the naive route that other pipelines take: the chat template applied to the finished conversation. Some
templates (Kimi's) blank the reasoning of the last assistant turn, and all thinking is gone without a word.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from eagle3.console import visible
from eagle3.reasoning import Ids, Thinking
from eagle3.rebuild import REFUSALS, Rebuilder
from eagle3.schemas import sample_name
from eagle3.tokens import Row, Unusable
from eagle3.verifier import flat_ids

KINDS = {
    "prompt": "the chat template here makes another prompt than the engine read (template, kwargs, BOS)",
    "retokenised": "the text is the same, but the verifier had split it into other tokens than an encoder would",
    "control_token": "the verifier wrote a control token inside its answer; from text it becomes ordinary tokens",
    "whitespace": "only white space differs: a parser stripped it around a marker or at an edge",
    "thinking_marker": "a think marker is missing or one too many",
    "truncated_reasoning": "cut while thinking, and the parser took the thinking for the answer",
    "reasoning_missing": "the ids hold thinking that is in no text field",
    "stop_token": "only the stop token differs",
    "not_rebuilt": "there is no text, or the chat template refused the messages",
    "other": "none of these",
}
SHOWN_ROWS, SHOWN_TOKENS = 20, 8


def audit(rows: Iterable[Row], rebuilder: Rebuilder) -> Iterator[Row]:
    """Rows of schemas.RESPONSES that have ids (as arrays) and text -> rows of schemas.AUDIT."""
    for row in rows:
        yield _audited(row, rebuilder)


def audit_metrics(audited: list[Row]) -> Row:
    """Counts and shares over rows of schemas.AUDIT; a share of nothing is 0."""
    rows, thinking = len(audited), sum(row["has_thinking"] for row in audited)
    kinds = Counter(row["kind"] for row in audited)
    naive, lost = (sum(row[key] for row in audited) for key in ("naive_identical", "naive_thinking_lost"))
    return {
        "rows": rows,
        "identical": kinds[None],
        "identical_share": kinds[None] / max(rows, 1),
        "kinds": {kind: kinds[kind] for kind in KINDS},
        "with_thinking": thinking,
        "naive_identical": naive,
        "naive_identical_share": naive / max(rows, 1),
        "naive_thinking_lost": lost,
        "naive_thinking_lost_share": lost / max(thinking, 1),
    }


def audit_text(audited: list[Row]) -> str:
    """The audit for a person to read: the counts, what each kind means, and some rows that differ."""
    found = audit_metrics(audited)
    lines = [
        "Samples whose ids are known, rebuilt from their text as if they were not. The ids are the truth.",
        f"compared: {found['rows']}, identical: {found['identical']} ({found['identical_share']:.1%})",
        *(f"  {count:6} {kind:20} {KINDS[kind]}" for kind, count in found["kinds"].items() if count),
        "",
        "The naive route: the chat template applied to the finished conversation.",
        f"identical: {found['naive_identical']} ({found['naive_identical_share']:.1%}); thinking lost in "
        f"{found['naive_thinking_lost']} of {found['with_thinking']} that think",
        "",
    ]
    for row in [row for row in audited if row["kind"] not in (None, "not_rebuilt")][:SHOWN_ROWS]:
        where = f"{row['kind']} at token {row['place']} of {row['length']}"
        lines += [
            f"{row['sample_id'][:16]} {visible(row['category'])}: {where}",
            f"  ids:  {visible(row['written'])}",
            f"  text: {visible(row['rebuilt'])}",
        ]
    return "\n".join(lines) + "\n"


def _audited(row: Row, rebuilder: Rebuilder) -> Row:
    prompt, output = np.asarray(row["prompt_token_ids"]), np.asarray(row["output_token_ids"])
    ids = np.concatenate([prompt, output])
    thinking = rebuilder.finder.find(prompt, output, row["finish_reason"] == "length")
    thought = _without_markers(_decoded(ids[thinking.start : thinking.end], rebuilder), rebuilder)
    naive_identical, naive_lost = _naive(row, ids, thought, rebuilder)
    found = {
        "sample_id": sample_name(row["prompt_id"], row["sample"]),
        "category": row["category"],
        "kind": "not_rebuilt",
        "place": None,
        "length": len(ids),
        "rebuilt_length": None,
        "written": None,
        "rebuilt": None,
        "has_thinking": bool(thought),
        "naive_identical": naive_identical,
        "naive_thinking_lost": naive_lost,
        **dict.fromkeys(("place", "rebuilt_length", "written", "rebuilt")),
    }
    try:
        rebuilt = rebuilder.rebuild(row)
    except Unusable:
        return found
    made_prompt, made_output = rebuilt["prompt_token_ids"], rebuilt["output_token_ids"]
    made = np.concatenate([made_prompt, made_output])
    in_prompt, in_output = _first_difference(prompt, made_prompt), _first_difference(output, made_output)
    if in_prompt is not None:
        kind, place = "prompt", in_prompt
    elif in_output is not None:
        kind, place = _kind(row, output, made_output, thinking, thought, rebuilder), len(prompt) + in_output
    else:
        return found | {"kind": None, "rebuilt_length": len(made)}
    span = slice(place, place + SHOWN_TOKENS)
    shown = {"written": _decoded(ids[span], rebuilder), "rebuilt": _decoded(made[span], rebuilder)}
    return found | {"kind": kind, "place": place, "rebuilt_length": len(made), **shown}


def _kind(row: Row, output: Ids, made: Ids, thinking: Thinking, thought: str, rebuilder: Rebuilder) -> str:
    """Which rule would have broken, for outputs that differ behind the same prompt."""
    stops = rebuilder.identity.stop_token_ids
    output, made = (ids[:-1] if len(ids) and ids[-1] in stops else ids for ids in (output, made))
    place = _first_difference(output, made)
    if place is None:
        return "stop_token"
    written, rebuilt = _decoded(output, rebuilder), _decoded(made, rebuilder)
    if written == rebuilt:
        control = place < len(output) and int(output[place]) in rebuilder.tokenizer.added_tokens_decoder
        return "control_token" if control else "retokenised"
    applies = {
        "truncated_reasoning": thinking.ended_by == "budget" and not row["reasoning"],
        "whitespace": _squeezed(written) == _squeezed(rebuilt),
        "thinking_marker": _without_markers(written, rebuilder) == _without_markers(rebuilt, rebuilder),
        "reasoning_missing": thought not in _squeezed(rebuilt),
    }
    return next((kind for kind, holds in applies.items() if holds), "other")


def _naive(row: Row, ids: Ids, thought: str, rebuilder: Rebuilder) -> tuple[bool, bool]:
    """Whether re-templating the finished conversation gives the same ids (blanks behind them aside), and whether it
    loses the thinking."""
    tokenizer, kwargs = rebuilder.tokenizer, json.loads(row["chat_template_kwargs"])
    answer = {"role": "assistant", "content": row["content"] or "", "reasoning_content": row["reasoning"] or ""}
    try:
        text = tokenizer.apply_chat_template([*row["messages"], answer], tokenize=False, **kwargs)
        before = tokenizer.apply_chat_template(row["messages"], tokenize=False, **kwargs)
    except REFUSALS:
        return False, False
    made = np.array(flat_ids(tokenizer.encode(text, add_special_tokens=False)), dtype=np.int32)
    same = np.array_equal(made[: len(ids)], ids) and not _decoded(made[len(ids) :], rebuilder).strip()
    kept = _squeezed(text).count(thought) > _squeezed(before).count(thought)
    return same, bool(thought) and not kept


def _first_difference(one: Ids, two: Ids) -> int | None:
    """The first place where two rows of ids differ, or where the shorter one ends; None where they are the same."""
    common = min(len(one), len(two))
    differing = np.flatnonzero(one[:common] != two[:common])
    if len(differing):
        return int(differing[0])
    return None if len(one) == len(two) else common


def _decoded(ids: Ids, rebuilder: Rebuilder) -> str:
    return str(rebuilder.tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _without_markers(text: str, rebuilder: Rebuilder) -> str:
    """The text without think markers and white space."""
    markers: tuple[Any, ...] = (rebuilder.identity.markers.start, rebuilder.identity.markers.end)
    for marker in markers:
        text = text.replace(marker.text, "") if marker is not None else text
    return _squeezed(text)
