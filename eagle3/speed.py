"""What speculation is worth: speed of pairs, seconds of engine steps, and how many tokens to draft.

One engine step of B requests with k drafted tokens each takes t(k, B) seconds and gives each request L(k) tokens, so

    speed-up(k, B) = L(k) * t(0, B) / t(k, B)        t: medians of the engine's own steps; t(0, B) without a draft

L(k) for every k up to the most that was drafted follows from one record, because a draft's first k tokens do not depend
on how many follow. t(k, B) between measured numbers of tokens is interpolated, for each drafted token costs the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from eagle3.acceptance import Acceptance, Answer, Decoded


def pair_speeds(answers: Iterable[Answer]) -> dict[str, float]:
    """Speed-up of each pair (the same batch in both arms, one right behind the other): median and range."""
    seconds: dict[tuple[str, int], float] = {}
    tokens: dict[tuple[str, int], int] = defaultdict(int)
    for answer in answers:
        seconds[answer.arm, answer.batch] = answer.seconds
        tokens[answer.arm, answer.batch] += len(answer.output_ids)
    rates = {key: tokens[key] / max(seconds[key], 1e-9) for key in seconds}
    ratios = [
        rates["draft", batch] / rate
        for (arm, batch), rate in rates.items()
        if arm == "plain" and rate and ("draft", batch) in rates
    ]
    if not ratios:
        return {}
    return {"speedup_median": median(ratios), "speedup_min": min(ratios), "speedup_max": max(ratios)}


def step_seconds(decoded: Iterable[Decoded], batch_size: int, num_speculative_tokens: int) -> float | None:
    """Median seconds of the engine steps in which `batch_size` requests were decoding, none of them reading a prompt.

    num_speculative_tokens: tokens drafted for each of them; 0 = the plain arm.
    """
    wanted = batch_size, batch_size * (1 + num_speculative_tokens)
    found = [
        forward.seconds
        for batch in decoded
        for forward in batch.forwards
        if (forward.requests, forward.tokens) == wanted
    ]
    return median(found) if found else None


def worth_of_tokens(
    decoded: Sequence[Decoded], acceptance: Acceptance, batch_sizes: Iterable[int]
) -> dict[int, dict[int, float]]:
    """Speed-up by batch size and drafted tokens 1 .. K, from measured steps; batch sizes without any are left out.

    acceptance: of the setting that drafted most, K tokens.
    """
    measured = sorted({batch.setting.num_speculative_tokens for batch in decoded if batch.arm == "draft"})
    plain = [batch for batch in decoded if batch.arm == "plain"]
    lengths = 1 + np.cumsum(acceptance.accepted_at) / max(acceptance.num_drafts, 1)
    found = {}
    for size in batch_sizes:
        alone = step_seconds((batch for batch in plain if batch.setting.batch_size == size), size, 0)
        times = {
            tokens: step_seconds(
                (b for b in decoded if b.arm == "draft" and b.setting.batch_size == size), size, tokens
            )
            for tokens in measured
        }
        known = {tokens: seconds for tokens, seconds in times.items() if seconds is not None}
        if alone is None or not known:
            continue
        # with only larger numbers measured, the plain step stands for k = 0
        known = known if 1 in known else {0: alone, **known}
        steps = np.interp(np.arange(1, len(lengths) + 1), list(known), list(known.values()))
        found[size] = {place + 1: float(lengths[place] * alone / steps[place]) for place in range(len(lengths))}
    return found


def best_tokens(worth: dict[int, float]) -> int:
    """The number of drafted tokens with the largest speed-up; 0 where none is above 1."""
    best = max(worth, key=lambda tokens: worth[tokens])
    return best if worth[best] > 1 else 0
