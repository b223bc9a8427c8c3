"""Acceptance numbers are ratios of sums."""

import pytest

from eagle3.acceptance import (
    Acceptance,
    Answer,
    Decoded,
    Prompt,
    Setting,
    Step,
    finishes,
    first_difference,
    identical,
    require_counters,
    spread,
    summarise,
)
from eagle3.speed import pair_speeds

ONE = Setting(1, 1)


def answer(
    name: str, arm: str, ids: list[int], seconds: float, steps: list[Step], category: str = "c", batch: int = 0
) -> Answer:
    return Answer(Prompt(name, category, "s", [1, 2]), ONE, arm, batch, ids, "stop", seconds, steps)


def test_ratio_of_sums_not_mean_of_ratios() -> None:
    counts = Acceptance(2)
    for accepted in (2, 2, 2, 0):
        counts.add(accepted, accepted + 1)
    found = counts.metrics()
    assert found["acceptance_length"] == 10 / 4
    assert (found["acceptance_rate_1"], found["acceptance_rate_2"]) == (3 / 4, 3 / 4)


def test_an_answer_that_ends_inside_an_accepted_draft_emits_less() -> None:
    counts = Acceptance(3)
    counts.add(accepted=3, emitted=2)
    assert counts.metrics()["acceptance_length"] == 2
    assert counts.metrics()["acceptance_length_counted"] == 4


def test_no_drafts_give_finite_numbers() -> None:
    assert Acceptance(3).metrics()["acceptance_length"] == 0


def test_two_prompts_of_very_different_acceptance() -> None:
    steps = [Step(0, [1], 1, 2)] * 9
    answers = [
        answer("a", "plain", [1] * 20, 4, []),
        answer("a", "draft", [1] * 20, 2, steps),
        answer("b", "plain", [1] * 10, 2, [], "d", 1),
        answer("b", "draft", [1] * 10, 4, [Step(0, [1], 0, 1)], "d", 1),
    ]
    found = summarise(answers)
    assert found["acceptance_length"] == 19 / 10
    assert found["by_category"]["c"]["acceptance_length"] == 2
    assert found["by_category"]["d"]["acceptance_length"] == 1
    assert found["speedup"] == pytest.approx((30 / 6) / (30 / 6))
    assert found["by_category"]["c"]["speedup"] == pytest.approx(2)
    assert found["num_prompts"] == 2


def test_a_batch_counts_its_seconds_once() -> None:
    answers = [answer(name, arm, [1] * 10, 5.0, []) for arm in ("plain", "draft") for name in ("a", "b")]
    assert summarise(answers)["tokens_per_second_plain"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_first_difference(a: list[int], b: list[int], place: int | None) -> None:
    assert first_difference(a, b) == place


def test_identical_answers_are_counted_by_prompt() -> None:
    answers = [
        answer("a", "plain", [1, 2, 3, 4], 1, []),
        answer("a", "draft", [1, 2, 9, 4], 1, []),
        answer("b", "plain", [5], 1, []),
        answer("b", "draft", [5], 1, []),
    ]
    assert identical(answers) == {"share": 0.5, "shared_prefix": 0.75, "compared": 2, "first_difference": 2}


def test_spread_takes_categories_in_turn() -> None:
    rows = [{"category": c, "n": n} for c, n in [("b", 1), ("b", 2), ("b", 3), ("a", 1), ("c", 1)]]
    assert [(r["category"], r["n"]) for r in spread(rows, 4)] == [("a", 1), ("b", 1), ("c", 1), ("b", 2)]
    assert len(spread(rows, 99)) == 5


def test_v01_no_draft_accepted_is_1_and_all_accepted_is_k_plus_1() -> None:
    none, every = Acceptance(3), Acceptance(3)
    for _ in range(100):
        none.add(accepted=0, emitted=1)
        every.add(accepted=3, emitted=4)
    assert none.metrics()["acceptance_length"] == none.metrics()["acceptance_length_counted"] == 1.0
    assert every.metrics()["acceptance_length"] == every.metrics()["acceptance_length_counted"] == 4.0


def decoded(steps: list[Step], counters: dict[str, int]) -> Decoded:
    return Decoded(Setting(2, 1), "draft", [answer("a", "draft", [1] * 9, 1, steps)], [], counters)


COUNTERS = {"drafts": 2, "draft_tokens": 4, "accepted_tokens": 3}
PLACES = {"accepted_tokens_per_pos_1": 2, "accepted_tokens_per_pos_2": 1}
STEPS = [Step(1, [5, 6], 2, 3), Step(4, [5, 6], 1, 2)]


def test_recorded_steps_equal_the_engine_s_counters() -> None:
    assert require_counters([decoded(STEPS, COUNTERS | PLACES)] * 2) == {k: 2 * v for k, v in COUNTERS.items()}
    with pytest.raises(ValueError, match=r"'drafts': 1.*own counters to .*'drafts': 2"):
        require_counters([decoded(STEPS[:1], COUNTERS | PLACES)])


def test_the_speed_of_each_pair_counts_once_in_the_median() -> None:
    answers = [answer("a", arm, [1] * 10, seconds, [], batch=number) for arm, number, seconds in (
        ("plain", 0, 2.0), ("draft", 0, 1.0), ("plain", 1, 2.0), ("draft", 1, 4.0), ("plain", 2, 2.0), ("draft", 2, 1.6)
    )]  # fmt: skip
    found = pair_speeds(answers)
    assert found == pytest.approx({"speedup_median": 1.25, "speedup_min": 0.5, "speedup_max": 2.0})


def test_ends_and_lengths_of_both_arms_are_compared() -> None:
    answers = [answer("a", "plain", [1] * 4, 1, []), answer("a", "draft", [1] * 6, 1, [])]
    assert finishes(answers) == {
        "mean_tokens_plain": 4,
        "mean_tokens_draft": 6,
        "stopped_plain": 1.0,
        "stopped_draft": 1.0,
    }
