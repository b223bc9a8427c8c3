"""Every step and every judged token is counted once in each dimension, under the right group."""

from collections import Counter
from collections.abc import Set as AbstractSet

import pytest

from eagle3.acceptance import Answer, Prompt, Setting, Step
from eagle3.breakdown import Breakdown, Words, bucket, nested
from eagle3.reasoning import Marker, Markers, ThinkingFinder

TEXTS = [b"<think>", b"</think>", b" one", b"2", b",", b"word", b"```", b"\n", b"x", b" = ", b"<end>", b" Two", b"\xe4"]
PIECES = dict(enumerate(TEXTS))
THINK, CLOSE, ONE, DIGIT, COMMA, WORD, FENCE, LINE, X, EQUALS, END, TWO, BYTE = range(len(TEXTS))
WORDS = Words(PIECES, frozenset({THINK, CLOSE, END}))
FINDER = ThinkingFinder(Markers(Marker("<think>", (THINK,)), Marker("</think>", (CLOSE,)), ()), PIECES)


def answered(name: str, ids: list[int], steps: list[Step], category: str = "c", prompt: int = 3) -> Answer:
    asked = Prompt(name, category, "s", [ONE] * (prompt - 1) + [THINK])
    return Answer(asked, Setting(2, 1), "draft", 0, ids, "stop", 1.0, steps)


def rows_of(
    *answers: Answer, known: AbstractSet[int] = frozenset(range(12))
) -> dict[tuple[str, str], tuple[float, int]]:
    found = Breakdown(FINDER, WORDS, [token in known for token in range(len(TEXTS))])
    for answer in answers:
        found.add(answer)
    return {(row["dimension"], row["group"]): (row["value"], row["counted"]) for row in found.rows()}


def test_steps_count_under_where_they_begin() -> None:
    ids = [ONE, TWO, CLOSE, WORD, ONE, END]
    steps = [Step(1, [TWO, CLOSE], 1, 2), Step(3, [WORD, ONE], 2, 3)]
    found = rows_of(answered("a", ids, steps))
    assert found["category", "c"] == found["source", "s"] == (2.5, 2)
    assert found["segment", "thinking"] == (2.0, 1)
    assert found["segment", "answer"] == (3.0, 1)
    assert found["output position", "0-31"] == (2.5, 2)
    assert found["prompt tokens", "0-31"] == (2.5, 2)


def test_tokens_count_under_what_the_verifier_wrote_as_far_as_it_judged() -> None:
    ids = [ONE, TWO, CLOSE, DIGIT, END]
    steps = [Step(1, [TWO, WORD], 1, 2), Step(3, [COMMA, WORD], 0, 1)]
    found = rows_of(answered("a", ids, steps), known={TWO, DIGIT})
    assert found["token class", "word start"] == (1.0, 1)  # Two, accepted
    assert found["token class", "special"] == (0.0, 1)  # the closing marker, where `word` was proposed
    assert found["token class", "number"] == (0.0, 1)
    assert ("token class", "word part") not in found  # what stands behind a refused token was not judged
    assert found["draft vocabulary", "in the draft vocabulary"] == (0.5, 2)
    assert found["draft vocabulary", "outside it"] == (0.0, 1)
    assert found["draft position", "1"] == (0.5, 2)
    assert found["draft position", "2"] == (0.0, 1)


def test_a_draft_beyond_the_end_is_not_judged_there() -> None:
    found = rows_of(answered("a", [ONE, END], [Step(1, [END, ONE], 2, 1)]))
    assert found["token class", "special"] == (1.0, 1)
    assert ("draft position", "2") not in found


def test_v07_lengths_and_sets_are_told_apart_with_counts() -> None:
    short = answered("a", [ONE] * 9, [Step(p, [ONE, ONE], 2, 3) for p in (1, 4)], "easy")
    long = answered("b", [ONE] * 300, [Step(p, [ONE, ONE], 0, 1) for p in range(1, 290)], "hard", 600)
    found = rows_of(short, long)
    assert found["category", "easy"] == (3.0, 2)
    assert found["category", "hard"] == (1.0, 289)
    assert found["prompt tokens", "512-2047"] == (1.0, 289)
    assert found["output position", "128-511"] == (1.0, 162)


def test_classes_follow_the_text() -> None:
    ids = [ONE, DIGIT, COMMA, WORD, LINE, EQUALS, END, TWO, BYTE]
    classes = ["word start", "number", "punctuation", "word part", "space", "punctuation", "special", "word start"]
    assert WORDS.classes(ids) == [*classes, "other"]


def test_code_is_what_stands_between_fences() -> None:
    ids = [ONE, LINE, FENCE, LINE, X, EQUALS, DIGIT, LINE, FENCE, LINE, ONE]
    found = WORDS.classes(ids)
    assert found[3:9] == ["code"] * 6
    assert (found[2], found[-1]) == ("punctuation", "word start")


@pytest.mark.parametrize(
    ("value", "name"), [(0, "0-31"), (31, "0-31"), (32, "32-127"), (8192, "8192-32767"), (99999, "32768+")]
)
def test_buckets(value: int, name: str) -> None:
    assert bucket(value) == name


def test_every_group_of_a_dimension_adds_up_to_the_same_count() -> None:
    steps = [Step(p, [DIGIT, CLOSE], p % 3, p % 3 + 1) for p in range(1, 30)]
    answers = [answered(f"p{n}", [ONE, DIGIT, CLOSE, WORD] * 9, steps) for n in range(4)]
    found = Breakdown(FINDER, WORDS, [True] * len(TEXTS))
    for answer in answers:
        found.add(answer)
    rows = list(found.rows())
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["dimension"]] += row["counted"]
    number, tokens = 4 * len(steps), counts["draft position"]
    wanted = dict.fromkeys(["category", "source", "segment", "output position", "prompt tokens"], number)
    assert counts == wanted | dict.fromkeys(["token class", "draft vocabulary", "draft position"], tokens)
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows if row["low"] is not None)


def test_metrics_hold_finite_numbers_alone() -> None:
    found = Breakdown(FINDER, WORDS, [True] * len(TEXTS))
    found.add(answered("a", [ONE, CLOSE, END], [Step(1, [CLOSE, END], 2, 2)]))
    numbers = nested(found.rows())
    assert numbers["by_segment"]["thinking"] == {"acceptance_length": 2.0, "num_drafts": 1, "num_prompts": 1}
    assert numbers["by_token_class"]["special"] == {"acceptance_rate": 1.0, "num_judged": 2, "num_prompts": 1}
