"""Intervals cover what they promise, and drawn pairs see differences that single ones hide."""

import numpy as np
import pytest

from eagle3.intervals import FEWEST, Sums, ratio_interval, student_t

RUNS = 800


def simulated(generator: np.random.Generator, prompts: int) -> tuple[Sums, Sums]:
    """Tokens emitted and steps of each prompt: prompts differ in length and in difficulty. The true ratio is 2."""
    steps = generator.integers(10, 60, prompts)
    rate = generator.beta(4, 4, prompts)  # mean 1/2, of two drafted tokens each
    return steps + generator.binomial(2 * steps, rate), steps.astype(float)


@pytest.mark.parametrize("prompts", [12, 16, 60])
def test_95_percent_intervals_cover_95_percent(prompts: int) -> None:
    generator = np.random.default_rng(prompts)
    covered = 0
    for _ in range(RUNS):
        interval = ratio_interval(*simulated(generator, prompts))
        assert interval is not None
        covered += interval.low <= 2 <= interval.high
    assert 0.93 <= covered / RUNS <= 0.97


@pytest.mark.parametrize("prompts", [16, 40])
def test_differences_cover_too_and_pairs_are_narrower(prompts: int) -> None:
    generator = np.random.default_rng(prompts)
    covered, paired_width, single_width = 0, 0.0, 0.0
    for _ in range(RUNS):
        ours, steps = simulated(generator, prompts)
        theirs = ours - 0.1 * steps + generator.normal(0, 0.02, prompts) * steps  # the same prompts, 0.1 less
        paired, single = ratio_interval(ours, steps, (theirs, steps)), ratio_interval(ours, steps)
        assert paired is not None
        assert single is not None
        covered += paired.low <= 0.1 <= paired.high
        paired_width += paired.high - paired.low
        single_width += single.high - single.low
    assert 0.93 <= covered / RUNS <= 0.97
    assert paired_width < 0.5 * single_width


def test_too_few_prompts_give_no_interval() -> None:
    numbers = np.ones(FEWEST - 1)
    assert ratio_interval(numbers, numbers) is None
    silent = np.append(numbers, 0.0)  # a prompt without a step tells nothing
    assert ratio_interval(silent, silent) is None


def test_the_same_numbers_give_the_same_interval() -> None:
    numbers = simulated(np.random.default_rng(1), 30)
    assert ratio_interval(*numbers) == ratio_interval(*numbers)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (30, 2.0423), (199, 1.9720)]
)
def test_student_t_is_that_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(0.975, degrees) == pytest.approx(quantile, abs=1e-4)
