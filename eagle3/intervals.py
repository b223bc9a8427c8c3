"""Confidence intervals by bootstrap over prompts.

Tokens of one answer resemble each other, so prompts are what is drawn, with replacement, and every number is a ratio of
sums over the drawn ones. Percentiles of the draws are too narrow for few prompts; they are widened as Hesterberg
describes ("What Teachers Should Know About the Bootstrap", 2015, expanded percentile interval): to the tails of
Student's t instead of the normal's, and by sqrt(n / (n - 1)).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.float64]

DRAWS = 2000
CONFIDENCE = 0.95
FEWEST = 3  # prompts; fewer tell nothing about others
SEED = 0
CELLS = 1 << 22  # of draws in memory at a time


@dataclass(frozen=True)
class Interval:
    """Both ends, at CONFIDENCE."""

    low: float
    high: float


def ratio_interval(numerators: Sums, denominators: Sums, others: tuple[Sums, Sums] | None = None) -> Interval | None:
    """Interval of sum(numerators) / sum(denominators), both [prompts]; None for fewer than FEWEST prompts.

    others: numerators and denominators of the same prompts on another side; the interval is then of the difference,
    ours - theirs, drawn in pairs.
    """
    counted = denominators > 0 if others is None else (denominators > 0) | (others[1] > 0)
    prompts = int(counted.sum())
    if prompts < FEWEST:
        return None
    parts = []
    for weights in _draws(prompts):
        part = _ratio(weights, numerators[counted], denominators[counted])
        if others is not None:
            part = part - _ratio(weights, others[0][counted], others[1][counted])
        parts.append(part[np.isfinite(part)])
    drawn = np.concatenate(parts)
    if not len(drawn):
        return None
    tail = _tail(prompts)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(float(low), float(high))


def _ratio(weights: Sums, numerators: Sums, denominators: Sums) -> Sums:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Sums = (weights @ numerators) / (weights @ denominators)
    return ratio


def _draws(prompts: int) -> Iterator[Sums]:
    """How often each prompt is in each draw: some draws at a time, [draws, prompts]."""
    generator = np.random.default_rng([SEED, prompts])
    shares = np.full(prompts, 1 / prompts)
    for start in range(0, DRAWS, step := max(1, CELLS // prompts)):
        yield generator.multinomial(prompts, shares, size=min(step, DRAWS - start)).astype(np.float64)


def _tail(prompts: int) -> float:
    """Share of the draws beyond each end."""
    reach = math.sqrt(prompts / (prompts - 1)) * student_t((1 + CONFIDENCE) / 2, prompts - 1)
    return 0.5 * math.erfc(reach / math.sqrt(2))


def student_t(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_below(middle, degrees) < probability else (low, middle)
    return low


def _student_below(value: float, degrees: int) -> float:
    """P(t < value), value >= 0; finite sums for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine, cosine) if degrees % 2 else (1.0, 1.0)
    for step in range(3 if degrees % 2 else 2, degrees - 1, 2):
        term *= cosine**2 * (step - 1) / step
        total += term
    if degrees % 2 == 0:
        return 0.5 * (1 + sine * total)
    return 0.5 + (angle + (sine * total if degrees > 1 else 0.0)) / math.pi
