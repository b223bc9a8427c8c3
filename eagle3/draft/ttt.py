"""The unroll of training-time test: K draft steps on one batch, then their loss and agreement.

The embedding of step k is that of the true token (teacher forcing), the state is the draft's own. Positions are those
of serving: vLLM runs row i's first draft step at position i and each later one a position further
(vllm/v1/spec_decode/llm_base_proposer.py: set_inputs_first_pass, _update_positions_dependent_metadata).

Letters: K steps, N context rows, R query rows, U target rows, H hidden size, V verifier vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import nn

from eagle3.draft.data import Batch
from eagle3.draft.layers import rms_norm
from eagle3.draft.loss import Objective, Targets, distill, verifier_choices
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocabulary
from eagle3.verifier_head import HeadWeights


@dataclass(frozen=True)
class Teacher:
    """The frozen weights of the verifier that training reads, on the training device.

    embed_tokens [V, H], norm [H], lm_head [V, H] as the verifier stores them; draft_head [D, H]: the rows of lm_head in
    the draft vocabulary; draft_ids int64 [V].
    """

    embed_tokens: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    draft_head: torch.Tensor
    draft_ids: torch.Tensor
    rms_norm_eps: float


@dataclass
class Score:
    """Sums and counts over rows; one entry per step.

    losses [K] over counted [K]; agreed [K] over counted [K]; prefix_agreed [K] over prefix_counted [K].
    """

    losses: list[float]
    counted: list[int]
    agreed: list[int]
    prefix_agreed: list[int]
    prefix_counted: list[int]

    def add(self, other: "Score") -> None:
        """Add another batch's sums and counts."""
        self.losses = [a + b for a, b in zip(self.losses, other.losses, strict=True)]
        for mine, theirs in (
            (self.counted, other.counted),
            (self.agreed, other.agreed),
            (self.prefix_agreed, other.prefix_agreed),
            (self.prefix_counted, other.prefix_counted),
        ):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]

    def loss(self, decay: float) -> float:
        """The weighted loss over everything that was added."""
        return sum(
            decay**step * total / max(count, 1)
            for step, (total, count) in enumerate(zip(self.losses, self.counted, strict=True))
        )

    def agreement(self) -> list[float]:
        """agreement_k."""
        return [hits / max(count, 1) for hits, count in zip(self.agreed, self.counted, strict=True)]

    def prefix_agreement(self) -> list[float]:
        """prefix_agreement_k."""
        return [hits / max(count, 1) for hits, count in zip(self.prefix_agreed, self.prefix_counted, strict=True)]

    def expected_acceptance_length(self) -> float:
        """1 + the sum of prefix_agreement_k."""
        return 1 + sum(self.prefix_agreement())


def empty_score(steps: int) -> Score:
    """Nothing added yet."""
    return Score([0.0] * steps, [0] * steps, [0] * steps, [0] * steps, [0] * steps)


def make_teacher(head: HeadWeights, vocabulary: DraftVocabulary, device: torch.device) -> Teacher:
    """Put the verifier's weights on the device; a tied embedding and head stay one tensor."""
    lm_head = head.lm_head.to(device)
    return Teacher(
        embed_tokens=lm_head if head.embed_tokens is head.lm_head else head.embed_tokens.to(device),
        norm=head.norm.to(device),
        lm_head=lm_head,
        draft_head=lm_head[vocabulary.token_ids.to(device)],
        draft_ids=vocabulary.draft_ids.to(device),
        rms_norm_eps=head.rms_norm_eps,
    )


def unroll(draft: DraftModel, batch: Batch, embed_tokens: torch.Tensor) -> torch.Tensor:
    """What the draft head reads at every step: [K, R, H]."""
    memories = draft.memories()
    state = draft.combine(batch.aux_hidden_states)
    embeds = embed_tokens[batch.context_ids].float()
    normed, state = draft(embeds, state, batch.context_positions, memories, batch.documents, batch.rows)
    outputs = [normed]
    positions = batch.context_positions[batch.rows]
    for step in range(1, len(batch.step_ids)):
        embeds = embed_tokens[batch.step_ids[step]].float()
        normed, state = draft(embeds, state, positions + step, memories, batch.documents, None)
        outputs.append(normed)
    return torch.stack(outputs)


def score_batch(
    draft: DraftModel,
    batch: Batch,
    teacher: Teacher,
    weights: torch.Tensor,
    choices: torch.Tensor | None,
    objective: Objective,
) -> tuple[torch.Tensor, Score]:
    """Loss of one batch (to differentiate) and its sums and counts.

    weights [K]: what each step's sum is multiplied with in the loss. choices int64 [U]: draft ids of the verifier's
    first choices over its full vocabulary; None = within the draft vocabulary, with targets outside it missed.
    """
    normed = unroll(draft, batch, teacher.embed_tokens)
    states = rms_norm(batch.target_states, teacher.norm, teacher.rms_norm_eps)
    taught = reachable(batch, teacher.draft_ids) if objective.out_of_vocabulary == "skip" else batch.counted
    targets = Targets(states, teacher.draft_head, batch.source, batch.counted, taught, choices)
    losses = distill(normed, draft.lm_head.weight, targets, weights, draft.compute_dtype, objective)
    return losses.loss, _summarise(batch, losses.sums, losses.agreed)


class Scoring(nn.Module):
    """`score_batch` of one draft, teacher and objective as a module: what is to be sharded has to be one."""

    def __init__(self, draft: DraftModel, teacher: Teacher, objective: Objective):
        super().__init__()
        self.draft, self.teacher, self.objective = draft, teacher, objective

    def forward(self, batch: Batch, weights: torch.Tensor, choices: torch.Tensor | None) -> tuple[torch.Tensor, Score]:
        """As `score_batch`."""
        return score_batch(self.draft, batch, self.teacher, weights, choices, self.objective)


def full_choices(batch: Batch, teacher: Teacher) -> torch.Tensor:
    """Draft ids (or -1) of the verifier's first choices over its full vocabulary, int64 [U]."""
    states = rms_norm(batch.target_states, teacher.norm, teacher.rms_norm_eps)
    return verifier_choices(states, teacher.lm_head, teacher.draft_ids)


def reachable(batch: Batch, draft_ids: torch.Tensor) -> torch.Tensor:
    """bool [K, U]: the counted positions whose token, and all those before it in the same row, the draft can propose.

    draft_ids int64 [V], -1 for a token outside the draft vocabulary.
    """
    inside = draft_ids[batch.target_ids] >= 0
    reached = torch.ones(len(batch.rows), dtype=torch.bool, device=inside.device)
    found = []
    for counted, source in zip(batch.counted, batch.source, strict=True):
        found.append(counted & inside & reached[source])
        reached = reached.index_fill(0, source[counted & ~inside], False)
    return torch.stack(found)


def _summarise(batch: Batch, sums: torch.Tensor, agreed: torch.Tensor) -> Score:
    rows = len(batch.rows)
    hit = torch.ones(rows, dtype=torch.bool, device=agreed.device)
    counts = torch.ones(rows, dtype=torch.bool, device=agreed.device)
    prefix = []
    for step in range(len(agreed)):
        used = batch.counted[step]
        source = batch.source[step, used]
        hit = hit & torch.zeros_like(hit).index_fill_(0, source[agreed[step, used]], True)
        counts = counts & torch.zeros_like(counts).index_fill_(0, source, True)
        prefix.append(torch.stack([(hit & counts).sum(), counts.sum()]))
    prefix_sums = torch.stack(prefix).tolist()
    return Score(
        losses=sums.tolist(),
        counted=batch.counted.sum(1).tolist(),
        agreed=agreed.sum(1).tolist(),
        prefix_agreed=[hits for hits, _ in prefix_sums],
        prefix_counted=[count for _, count in prefix_sums],
    )
