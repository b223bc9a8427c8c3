"""The gates that recorded hidden states must pass before anybody trains on them.

Rows: finite, not all zero, not constant, in every layer. Samples: the verifier's head, applied to the recorded last
states, must give the tokens that the verifier generated. That one number falls for a wrong layer, a state on the wrong
side of the final norm, shifted rows and swapped samples alike.

A text that the verifier did not write (a human answer, or one whose ids were rebuilt) proves nothing about its states:
how well the head explains it depends on the text as much as on the states. There the engine itself is asked for its
first choice at a few rows while it records, and the head must give the same.

Letters: T tokens, L layers (auxiliary ones and the last), H hidden size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.shards import Sample, Shard
from eagle3.verifier_head import HeadWeights

Score = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

CHUNK_ROWS = 4096
ROWS_PER_SAMPLE = 8  # generated positions that the head gate reads of a chosen sample
HEAD_ROWS = 512  # rows that go through the head at once
TOP = 20  # a sampled token should be among so many of the most likely ones
MIN_SAMPLE_ROWS = 8  # a sample is judged on its own only by so many rows
MIN_SAMPLE_AGREEMENT = 0.5
RIGHT = 0.95  # what a sample of right states is expected to have, at least
CHANCE = 0.001  # a share that falls short by bad luck is accepted, unless it would take luck as rare as this


@dataclass(frozen=True)
class Problem:
    """Why a sample is quarantined. detail: where, for a person."""

    reason: str
    detail: str


@dataclass(frozen=True)
class Agreement:
    """How far the head explains generated tokens, as a sum and what the sum would be if all were right."""

    hits: float = 0.0
    expected: float = 0.0
    rows: int = 0

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(self.hits + other.hits, self.expected + other.expected, self.rows + other.rows)

    @property
    def share(self) -> float:
        """hits / expected, at most 1; 1 where nothing was read."""
        return min(1.0, self.hits / self.expected) if self.expected else 1.0

    def falls_short(self, minimum: float) -> bool:
        """Whether the share is below `minimum` by more than chance, if each row agreed with that part of its chance.

        By Chernoff's bound: of 32 greedy rows at 0.95, 25 may be hits by chance and 24 not; of 5,000, 4,691 and 4,690.
        """
        if self.share >= minimum or minimum in (0, 1):
            return self.share < minimum
        likely, found = minimum * self.expected / self.rows, self.hits / self.rows
        distance = (1 - found) * math.log((1 - found) / (1 - likely))
        if found:
            distance += found * math.log(found / likely)
        return self.rows * distance > -math.log(CHANCE)


def row_faults(states: torch.Tensor) -> dict[str, torch.Tensor]:
    """Faults of rows [T, L, H] by reason: bool [T, L] each."""
    least, most = torch.aminmax(states, dim=-1)
    finite = torch.isfinite(least) & torch.isfinite(most)
    zero = (least == 0) & (most == 0)
    return {"not-finite": ~finite, "zero-row": zero, "constant-row": finite & (least == most) & ~zero}


def find_row_problems(shard: Shard, layer_ids: Sequence[int]) -> dict[int, Problem]:
    """The first fault of each sample that has one, by position. layer_ids: the auxiliary ones, for the text."""
    names = [f"layer {layer}" for layer in layer_ids] + ["the last layer"]
    offsets = torch.tensor(shard.offsets)
    problems: dict[int, Problem] = {}
    for start in range(0, len(shard.input_ids), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        aux, last = shard.states(rows)
        parts = [row_faults(aux.view(len(aux), len(layer_ids), -1)), row_faults(last.unsqueeze(1))]
        for reason in parts[0]:
            faults = torch.cat([part[reason] for part in parts], dim=1).nonzero()
            positions = torch.searchsorted(offsets, faults[:, 0] + start, right=True) - 1
            for position, (row, layer) in zip(positions.tolist(), faults.tolist(), strict=True):
                if position not in problems:
                    detail = f"token {start + row - shard.offsets[position]}, {names[layer]}"
                    problems[position] = Problem(reason, detail)
    return problems


def head_agreement(samples: Sequence[tuple[Sample, bool]], head: HeadWeights) -> list[Agreement]:
    """For each (sample, greedy): whether the head gives the generated tokens, at evenly chosen positions.

    Greedy samples count an argmax that is the token. Sampled ones count a token among the TOP most likely, and expect
    as many as the verifier's own distribution puts there. Row t speaks for token t + 1.
    """
    found: dict[int, Agreement] = {}
    for kind, score in ((True, _score_greedy), (False, _score_sampled)):
        numbers = [number for number, (_, greedy) in enumerate(samples) if greedy == kind]
        own = [samples[number][0] for number in numbers]
        written = [sample.input_ids[judged_rows(sample.loss_mask) + 1].long() for sample in own]
        found |= zip(numbers, _agreements(own, written, head, score), strict=True)
    return [found[number] for number in range(len(samples))]


def choice_agreement(samples: Sequence[tuple[Sample, Sequence[int]]], head: HeadWeights) -> list[Agreement]:
    """For each (sample, choices): whether the head gives what the engine said it would choose at the judged rows."""
    choices = [torch.tensor(chosen) for _, chosen in samples]
    return _agreements([sample for sample, _ in samples], choices, head, _score_greedy)


def judged_rows(loss_mask: torch.Tensor) -> torch.Tensor:
    """The rows of a sample that the head gate reads: evenly spread ones that speak for a generated token."""
    return evenly(loss_mask[1:].nonzero().flatten(), ROWS_PER_SAMPLE)


def _agreements(
    samples: Sequence[Sample], wanted: Sequence[torch.Tensor], head: HeadWeights, score: Score
) -> list[Agreement]:
    """wanted: the tokens that each sample's judged rows are scored against."""
    if not samples:
        return []
    chosen = [judged_rows(sample.loss_mask) for sample in samples]
    states = torch.cat([sample.last_hidden_states[rows] for sample, rows in zip(samples, chosen, strict=True)])
    scored = [
        score(head.logits(part), aims)
        for part, aims in zip(
            torch.split(states, HEAD_ROWS), torch.split(torch.cat(list(wanted)), HEAD_ROWS), strict=True
        )
    ]
    lengths = [len(rows) for rows in chosen]
    hits, expected = (torch.split(torch.cat(column), lengths) for column in zip(*scored, strict=True))
    return [Agreement(float(hits[i].sum()), float(expected[i].sum()), lengths[i]) for i in range(len(samples))]


def check_shard(
    shard: Shard,
    greedy: Sequence[bool],
    choices: Mapping[int, Sequence[int]],
    layer_ids: Sequence[int],
    head: HeadWeights,
    agreement_samples: int,
) -> tuple[dict[int, Problem], Agreement]:
    """Problems by position, and the agreement over the chosen samples (those with faulty rows left out).

    choices: for each sample that the verifier did not write, by position, the engine's own choices at its judged rows;
    empty where it was not asked.
    """
    problems = find_row_problems(shard, layer_ids)
    candidates = torch.tensor([i for i in range(len(shard)) if i not in problems and i not in choices])
    chosen = evenly(candidates, agreement_samples).tolist()
    told = [position for position, tokens in choices.items() if tokens and position not in problems]
    agreements = head_agreement([(shard.sample(position), greedy[position]) for position in chosen], head)
    agreements += choice_agreement([(shard.sample(position), choices[position]) for position in told], head)
    for position, agreement in zip(chosen + told, agreements, strict=True):
        few = agreement.share < MIN_SAMPLE_AGREEMENT and agreement.falls_short(RIGHT)
        if agreement.rows >= MIN_SAMPLE_ROWS and few:
            detail = f"the head gives {agreement.share:.0%} of {agreement.rows} tokens"
            problems[position] = Problem("head-disagreement", detail)
    return problems, sum(agreements, Agreement())


def _score_greedy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hit and expected hit of each row: the target is the argmax, and should be."""
    hits = (logits.argmax(1) == targets).float()
    return hits, torch.ones_like(hits)


def _score_sampled(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hit and expected hit of each row: the target is among the TOP, and is so with their common probability."""
    top = logits.topk(min(TOP, logits.shape[1]), dim=1)
    mass = (top.values - logits.logsumexp(1, keepdim=True)).exp().sum(1)
    return (top.indices == targets.unsqueeze(1)).any(1).float(), mass


def evenly(values: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` of the values, evenly spread."""
    if len(values) <= count:
        return values
    return values[torch.arange(count) * len(values) // count]
