"""Which number of drafted tokens is worth most follows from acceptance and the engine's own steps."""

import pytest

from eagle3.acceptance import Acceptance, Decoded, Forward, Setting
from eagle3.speed import best_tokens, step_seconds, worth_of_tokens


def decoded(tokens: int, size: int, arm: str, seconds: float) -> Decoded:
    drafted = tokens if arm == "draft" else 0
    own = [Forward(seconds * share, size, size * (1 + drafted)) for share in (0.9, 1.0, 5.0)]
    reading = [Forward(9.0, size, 777), Forward(0.001, size - 1, (size - 1) * (1 + drafted))]
    return Decoded(Setting(tokens, size), arm, [], [*reading, *own], {})


def acceptance(rates: list[float]) -> Acceptance:
    return Acceptance(len(rates), 1000, 0, 0, [round(1000 * rate) for rate in rates])


def test_steps_that_read_a_prompt_or_lack_a_request_are_not_timed() -> None:
    assert step_seconds([decoded(3, 4, "draft", 0.02)], 4, 3) == 0.02
    assert step_seconds([decoded(3, 4, "draft", 0.02)], 4, 2) is None


def test_speed_up_is_length_times_the_ratio_of_steps() -> None:
    runs = [decoded(1, 2, "plain", 0.010), decoded(1, 2, "draft", 0.012), decoded(3, 2, "draft", 0.018)]
    worth = worth_of_tokens(runs, acceptance([0.6, 0.3, 0.1]), [2, 16])
    assert set(worth) == {2}  # nothing was decoded sixteen at a time
    lengths, steps = (1.6, 1.9, 2.0), (0.012, 0.015, 0.018)
    assert worth[2] == pytest.approx({k + 1: lengths[k] * 0.010 / steps[k] for k in range(3)})
    assert best_tokens(worth[2]) == 1


def test_where_nothing_pays_the_best_is_none() -> None:
    assert best_tokens({1: 0.9, 2: 0.95, 3: 0.7}) == 0
    assert best_tokens({1: 1.1, 2: 1.3, 3: 1.2}) == 2
