"""Acceptance numbers from step counts. Pure: sums and counts in, ratios out only at the end."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

Row = dict[str, Any]
ARMS = ("plain", "draft")


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt, ready for the engine."""

    prompt_id: str
    category: str
    ids: list[int]


@dataclass(frozen=True)
class Step:
    """One verifier forward that judged a draft; see schemas.STEPS."""

    position: int
    drafted: list[int]
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Answer:
    """What one arm made of one prompt; `seconds` belong to the whole batch."""

    prompt: Prompt
    arm: str
    batch: int
    output_ids: list[int]
    seconds: float
    steps: list[Step]


@dataclass
class Acceptance:
    """Sums over verifier forwards that judged a draft.

    num_speculative_tokens: K, tokens drafted per forward.
    """

    num_speculative_tokens: int
    num_drafts: int = 0
    emitted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.num_speculative_tokens

    def add(self, accepted: int, emitted: int) -> None:
        """Count one forward: drafts accepted (0 .. K) and tokens that came out (1 .. K + 1)."""
        self.num_drafts += 1
        self.emitted += emitted
        for position in range(accepted):
            self.accepted_at[position] += 1

    def metrics(self) -> dict[str, float]:
        """acceptance_length = tokens emitted per forward, bonus token included; acceptance_rate_k = accepted at
        position k / number of drafts; acceptance_length_counted is 1 + accepted / drafts, as vLLM's own counter has
        it: larger where answers end inside an accepted draft."""
        drafts = max(self.num_drafts, 1)
        return {
            "acceptance_length": self.emitted / drafts,
            "acceptance_length_counted": 1 + sum(self.accepted_at) / drafts,
            **{f"acceptance_rate_{k + 1}": count / drafts for k, count in enumerate(self.accepted_at)},
            "num_drafts": self.num_drafts,
        }


@dataclass
class Speed:
    """Tokens and seconds of both arms over the same prompts."""

    tokens_plain: int = 0
    seconds_plain: float = 0.0
    tokens_draft: int = 0
    seconds_draft: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Tokens per second of each arm and their ratio."""
        plain = self.tokens_plain / max(self.seconds_plain, 1e-9)
        draft = self.tokens_draft / max(self.seconds_draft, 1e-9)
        return {
            "tokens_per_second_plain": plain,
            "tokens_per_second_draft": draft,
            "speedup": draft / plain if plain else 0.0,
        }


def first_difference(one: Iterable[int], other: Iterable[int]) -> int | None:
    """Place of the first differing token of two answers, None when they are equal."""
    a, b = list(one), list(other)
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if a == b else place


def spread(rows: Iterable[Row], count: int) -> list[Row]:
    """Up to `count` rows, one category after the other in turn, each category in its own order."""
    waiting: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if len(waiting[row["category"]]) < count:
            waiting[row["category"]].append(row)
    order = [waiting[category] for category in sorted(waiting)]
    turns = (queue[turn] for turn in range(count) for queue in order if turn < len(queue))
    return [row for row, _ in zip(turns, range(count), strict=False)]


def summarise(answers: list[Answer], num_speculative_tokens: int) -> dict[str, Any]:
    """Acceptance and speed over all prompts, and the same for each category under `by_category`."""
    categories = sorted({answer.prompt.category for answer in answers})
    return {
        **_summary(answers, num_speculative_tokens),
        "by_category": {
            category: _summary([a for a in answers if a.prompt.category == category], num_speculative_tokens)
            for category in categories
        },
    }


def _summary(answers: list[Answer], num_speculative_tokens: int) -> dict[str, float]:
    acceptance, speed = Acceptance(num_speculative_tokens), Speed()
    batches: dict[tuple[str, int], int] = defaultdict(int)
    for answer in answers:
        batches[answer.arm, answer.batch] += 1
        for step in answer.steps:
            acceptance.add(step.accepted, step.emitted)
    for answer in answers:
        # a batch's seconds are shared by its answers, so that categories of one batch add up
        share = answer.seconds / max(batches[answer.arm, answer.batch], 1)
        if answer.arm == "plain":
            speed.tokens_plain += len(answer.output_ids)
            speed.seconds_plain += share
        else:
            speed.tokens_draft += len(answer.output_ids)
            speed.seconds_draft += share
    prompts = {answer.prompt.prompt_id for answer in answers}
    return {**acceptance.metrics(), **speed.metrics(), "num_prompts": len(prompts)}


def pairs(answers: list[Answer]) -> list[tuple[Answer, Answer]]:
    """(plain, draft) answers of each prompt."""
    found = {(answer.arm, answer.prompt.prompt_id): answer for answer in answers}
    return [
        (found["plain", name], found["draft", name])
        for arm, name in found
        if arm == "plain" and ("draft", name) in found
    ]


def identical(answers: list[Answer]) -> dict[str, float]:
    """Share of prompts whose two answers are token for token equal, and the mean share of an answer before the first
    difference. Below 1 is expected in bfloat16: near-ties of the verifier fall differently when it judges several
    tokens at once."""
    both = pairs(answers)
    places = [first_difference(plain.output_ids, draft.output_ids) for plain, draft in both]
    kept = [
        1.0 if place is None else place / max(len(plain.output_ids), 1)
        for place, (plain, _) in zip(places, both, strict=True)
    ]
    return {
        "share": mean(place is None for place in places) if places else 0.0,
        "shared_prefix": mean(kept) if kept else 0.0,
        "compared": len(places),
    }
