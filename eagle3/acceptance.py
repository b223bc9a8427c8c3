"""What was decoded, and its numbers. Pure: sums and counts in, ratios out only at the end."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from eagle3.intervals import Sums, ratio_interval

Row = dict[str, Any]
ARMS = ("plain", "draft")


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt, ready for the engine."""

    prompt_id: str
    category: str
    source: str
    ids: list[int]


@dataclass(frozen=True, order=True)
class Setting:
    """How a pair of arms was decoded: the draft's tokens per forward, and prompts at a time in both arms."""

    num_speculative_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Turn:
    """One batch and the arms that decode it, one right after the other."""

    setting: Setting
    arms: list[str]
    number: int
    prompts: list[Prompt]

    @property
    def answers(self) -> int:
        """How many it gives."""
        return len(self.arms) * len(self.prompts)


@dataclass(frozen=True)
class Step:
    """One verifier forward that judged a draft; see schemas.STEPS."""

    position: int
    drafted: list[int]
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Forward:
    """One step of the engine: the requests and tokens that it computed."""

    seconds: float
    requests: int
    tokens: int


@dataclass(frozen=True)
class Answer:
    """What one arm made of one prompt; `seconds` belong to the whole batch."""

    prompt: Prompt
    setting: Setting
    arm: str
    batch: int
    output_ids: list[int]
    finish_reason: str
    seconds: float
    steps: list[Step]

    @property
    def emitted(self) -> int:
        """Tokens that came out of steps that judged a draft."""
        return sum(step.emitted for step in self.steps)


@dataclass(frozen=True)
class Decoded:
    """A batch that one arm decoded. counters: by how much vLLM's own rose meanwhile, by name."""

    setting: Setting
    arm: str
    answers: list[Answer]
    forwards: list[Forward]
    counters: dict[str, int]


@dataclass
class Acceptance:
    """Sums over verifier forwards that judged a draft.

    num_speculative_tokens: K, tokens drafted per forward.
    """

    num_speculative_tokens: int
    num_drafts: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.num_speculative_tokens

    def add(self, accepted: int, emitted: int, drafted: int = 0) -> None:
        """Count one forward: drafts accepted (0 .. K), tokens that came out (1 .. K + 1), tokens drafted."""
        self.num_drafts += 1
        self.emitted += emitted
        self.drafted += drafted
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

    def counters(self) -> dict[str, int]:
        """The same sums under the names of vLLM's own counters."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.drafted,
            "accepted_tokens": sum(self.accepted_at),
            **{f"accepted_tokens_per_pos_{k + 1}": count for k, count in enumerate(self.accepted_at)},
        }


def count_steps(answers: Iterable[Answer], num_speculative_tokens: int) -> Acceptance:
    """Acceptance over every step of these answers."""
    acceptance = Acceptance(num_speculative_tokens)
    for answer in answers:
        for step in answer.steps:
            acceptance.add(step.accepted, step.emitted, len(step.drafted))
    return acceptance


def require_counters(decoded: Iterable[Decoded]) -> dict[str, int]:
    """vLLM's own counters over everything that was decoded with a draft. Raises ValueError where the recorded steps
    do not add up to them exactly: then this vLLM steps otherwise than the recorder of its steps expects."""
    total: dict[str, int] = defaultdict(int)
    for batch in decoded:
        if batch.arm == "plain":
            continue
        ours = count_steps(batch.answers, batch.setting.num_speculative_tokens).counters()
        if ours != {name: batch.counters.get(name, 0) for name in ours}:
            raise ValueError(f"the recorded steps sum up to {ours}, vLLM's own counters to {batch.counters}")
        for name, count in ours.items():
            total[name] += count
    return {name: count for name, count in total.items() if "per_pos" not in name}


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


def summarise(answers: Sequence[Answer]) -> dict[str, Any]:
    """Acceptance and speed of one setting over all prompts, and the same for each category under `by_category`."""
    categories = sorted({answer.prompt.category for answer in answers})
    return {
        **_summary(answers),
        "by_category": {
            category: _summary([a for a in answers if a.prompt.category == category]) for category in categories
        },
    }


def _summary(answers: Sequence[Answer]) -> dict[str, float]:
    return {**totals(answers), **length_interval(answers)}


def totals(answers: Sequence[Answer]) -> dict[str, float]:
    """Acceptance and speed of one setting over these prompts, without an interval."""
    acceptance = count_steps(answers, answers[0].setting.num_speculative_tokens)
    # a batch's seconds are shared by its answers, so that categories of one batch add up
    together: dict[tuple[str, int], int] = defaultdict(int)
    for answer in answers:
        together[answer.arm, answer.batch] += 1
    tokens, seconds = dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0.0)
    for answer in answers:
        tokens[answer.arm] += len(answer.output_ids)
        seconds[answer.arm] += answer.seconds / together[answer.arm, answer.batch]
    rates = {arm: tokens[arm] / max(seconds[arm], 1e-9) for arm in ARMS}
    return {
        **acceptance.metrics(),
        **{f"tokens_per_second_{arm}": rates[arm] for arm in ARMS},
        "speedup": rates["draft"] / rates["plain"] if rates["plain"] else 0.0,
        "num_prompts": len({answer.prompt.prompt_id for answer in answers}),
    }


def emitted_and_steps(answers: Sequence[Answer]) -> tuple[Sums, Sums]:
    """Of each answer the tokens that came out of its steps, and the number of these: [answers] both."""
    return np.array([answer.emitted for answer in answers], float), np.array([len(a.steps) for a in answers], float)


def length_interval(answers: Iterable[Answer]) -> dict[str, float]:
    """Both ends of the acceptance length's confidence interval; nothing where there are too few prompts."""
    interval = ratio_interval(*emitted_and_steps([answer for answer in answers if answer.steps]))
    return {} if interval is None else {"acceptance_length_low": interval.low, "acceptance_length_high": interval.high}


def pairs(answers: Iterable[Answer]) -> list[tuple[Answer, Answer]]:
    """(plain, draft) answers of each prompt and setting."""
    found = {(answer.arm, answer.setting, answer.prompt.prompt_id): answer for answer in answers}
    return [
        (answer, found["draft", setting, name])
        for (arm, setting, name), answer in found.items()
        if arm == "plain" and ("draft", setting, name) in found
    ]


def identical(answers: Iterable[Answer]) -> dict[str, float]:
    """Share of prompts whose two answers are token for token equal, the mean share of an answer before the first
    difference, and the earliest one's place. A share below 1 is expected in bfloat16: near-ties of the verifier fall
    differently when it judges several tokens at once."""
    both = pairs(answers)
    places = [first_difference(plain.output_ids, draft.output_ids) for plain, draft in both]
    kept = [
        1.0 if place is None else place / max(len(plain.output_ids), 1)
        for place, (plain, _) in zip(places, both, strict=True)
    ]
    differing = [place for place in places if place is not None]
    return {
        "share": mean(place is None for place in places) if places else 0.0,
        "shared_prefix": mean(kept) if kept else 0.0,
        "compared": len(places),
        **({"first_difference": min(differing)} if differing else {}),
    }


def finishes(answers: Iterable[Answer]) -> dict[str, float]:
    """Lengths and ends of both arms' answers, which a draft must not change (but for near-ties)."""
    found: dict[str, float] = {}
    listed = list(answers)
    for arm in ARMS:
        own = [answer for answer in listed if answer.arm == arm]
        if own:
            found[f"mean_tokens_{arm}"] = mean(len(answer.output_ids) for answer in own)
            found[f"stopped_{arm}"] = mean(answer.finish_reason == "stop" for answer in own)
    return found
