"""Why an acceptance length is not what training promised.

The estimate that training reports asks the draft at every position. Serving asks it only where its last proposal ended,
and those are not average places. Replaying the draft (draft/replay.py) where serving did ask separates that from what
may not differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eagle3.acceptance import Step

#: Accepted drafts [T - 1] after 1 .. T - 1 tokens of an answer of T, and how many of the K could be judged there.
Replayed = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


@dataclass
class Reconciliation:
    """Sums over answers; K steps. everywhere: hits and counts by draft position; the rest over served steps."""

    steps: int
    hits: npt.NDArray[np.int64] = field(init=False)
    counts: npt.NDArray[np.int64] = field(init=False)
    served: int = 0
    replayed: int = 0
    measured: int = 0
    equal: int = 0

    def __post_init__(self) -> None:
        self.hits, self.counts = np.zeros(self.steps, np.int64), np.zeros(self.steps, np.int64)

    def add(self, replayed: Replayed, taken: Iterable[Step]) -> None:
        """One answer: what the replay says for every place, and the steps that were served."""
        accepted, judged = replayed
        for place in range(self.steps):
            self.hits[place] += int((accepted > place).sum())
            self.counts[place] += int((judged > place).sum())
        for step in taken:
            if not 1 <= step.position <= len(accepted):
                continue  # nothing follows that could be compared
            most = min(len(step.drafted), int(judged[step.position - 1]))
            ours, theirs = min(int(accepted[step.position - 1]), most), min(step.accepted, most)
            self.served += 1
            self.replayed += ours
            self.measured += theirs
            self.equal += ours == theirs

    def metrics(self) -> dict[str, float]:
        """everywhere: the expected acceptance length, as training computes it; at_steps: the same where serving asked;
        measured: what serving got there; equal_steps: share of steps in which replay and serving accept alike."""
        served = max(self.served, 1)
        return {
            "everywhere": 1 + float((self.hits / np.maximum(self.counts, 1)).sum()),
            "at_steps": 1 + self.replayed / served,
            "measured": 1 + self.measured / served,
            "equal_steps": self.equal / served,
            "steps": self.served,
        }


#: What replay and serving may differ by, as a share of the measured length: rounding flips near-ties, no more.
TOLERANCE = 0.05


def explain(found: dict[str, float]) -> str:
    """The difference between estimate and measurement in one line."""
    return (
        f"expected acceptance length {found['everywhere']:.2f} over all positions, {found['at_steps']:.2f} where "
        f"serving asked the draft (after a rejection), measured there {found['measured']:.2f}; "
        f"{found['equal_steps']:.1%} of {found['steps']:,.0f} steps accept alike"
    )


def is_large(found: dict[str, float]) -> bool:
    """Whether replay and serving differ by more than rounding explains: the served draft is not the one that was
    trained, or it was trained on other states than serving has."""
    return abs(found["at_steps"] - found["measured"]) > TOLERANCE * found["measured"]
