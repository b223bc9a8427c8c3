"""Loss and agreement of all steps: how far the draft is from the verifier over the draft vocabulary.

With p the verifier's distribution (its logits outside the draft vocabulary left out, so that p sums to 1 over it) and q
the draft's, in nats but for the last:

    forward_kl       sum p log(p / q)           soft cross-entropy, less what no draft can change
    hard_labels      -log q(first choice of p)
    reverse_kl       sum q log(q / p)
    total_variation  1 - sum min(p, q)          the chance that speculative sampling rejects the draft's token

Beside it, weighted with `feature_weight`, the distance of what the draft's head reads from what the verifier's head
read, |n - t|^2 / |t|^2 (EAGLE's feature regression, https://arxiv.org/abs/2401.15077). It teaches all H values of each
state, and on small data a draft learns faster with it.

Verifier targets are computed once and serve every step; logits exist for one chunk of rows at a time, and their
gradient is taken in the forward pass, so memory does not grow with rows times vocabulary. The tests have the eager
form.

Letters: K steps, R query rows, U target rows, H hidden size, D draft vocabulary, V verifier vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from eagle3.draft.layers import product

CHUNK = 256
Kind = Literal["forward_kl", "hard_labels", "reverse_kl", "total_variation"]
OutOfVocabulary = Literal["renormalise", "skip"]


@dataclass(frozen=True)
class Objective:
    """(1 - acceptance_share) * the loss named `kind` + acceptance_share * total_variation + feature_weight * distance.

    out_of_vocabulary: what teaches where the verifier's token is one that the draft cannot propose.

    renormalise: every counted position, with the verifier's distribution over the draft vocabulary.
    skip: not the positions whose token is outside, and not those later in the same row, which are never reached when
        serving: a draft is judged up to its first rejected token. They add nothing to the loss, but they stay counted:
        in its divisor, and as misses of the agreement.
    """

    kind: Kind
    acceptance_share: float
    feature_weight: float
    out_of_vocabulary: OutOfVocabulary


@dataclass(frozen=True)
class Targets:
    """What the steps are measured against.

    states [U, H]: verifier states after the final norm. head [D, H]: the verifier's rows of the draft vocabulary.
    source int64 [K, U]: the query row that predicts target u at step k. counted bool [K, U]: whether it counts.
    taught bool [K, U]: whether it adds to the loss; only where it counts.
    choices int64 [U]: draft id of the verifier's first choice, -1 outside the draft vocabulary; None = the first choice
    within the draft vocabulary.
    """

    states: torch.Tensor
    head: torch.Tensor
    source: torch.Tensor
    counted: torch.Tensor
    taught: torch.Tensor
    choices: torch.Tensor | None


@dataclass(frozen=True)
class StepLosses:
    """loss: sum over k of weights[k] * sums[k], to differentiate; sums [K]; agreed bool [K, U], where counted."""

    loss: torch.Tensor
    sums: torch.Tensor
    agreed: torch.Tensor


def distill(
    normed: torch.Tensor,
    head: torch.Tensor,
    targets: Targets,
    weights: torch.Tensor,
    dtype: torch.dtype,
    objective: Objective,
) -> StepLosses:
    """Loss of all steps. normed [K, R, H]: what the draft head [D, H] reads. weights [K]. dtype: of the products."""
    if torch.is_grad_enabled():
        return StepLosses(*_Distill.apply(normed, head, targets, weights, dtype, objective))  # type: ignore[no-untyped-call]
    return StepLosses(*_by_chunks(normed, head, targets, weights, dtype, objective, None, None))


def verifier_choices(states: torch.Tensor, lm_head: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Draft id (or -1) of the verifier's first choice over its full vocabulary.

    states [U, H] after the final norm; lm_head [V, H]; draft_ids int64 [V]. Returns int64 [U].
    """
    chosen = [
        product(states[at : at + CHUNK].to(lm_head.dtype), lm_head).argmax(-1) for at in range(0, len(states), CHUNK)
    ]
    return draft_ids[torch.cat(chosen)] if chosen else draft_ids.new_empty(0)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,
        head: torch.Tensor,
        targets: Targets,
        weights: torch.Tensor,
        dtype: torch.dtype,
        objective: Objective,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_normed = torch.zeros_like(normed)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        result = _by_chunks(normed, head, targets, weights, dtype, objective, grad_normed, grad_head)
        ctx.save_for_backward(grad_normed, *([] if grad_head is None else [grad_head]))
        ctx.mark_non_differentiable(result[1], result[2])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_normed, *rest = ctx.saved_tensors
        return grad_normed * grad, rest[0] * grad if rest else None, None, None, None, None


@dataclass(frozen=True)
class _Verifier:
    """p and log p [rows, D], the first choice [rows] and sum p log p [rows] of a chunk."""

    p: torch.Tensor
    log_p: torch.Tensor
    choice: torch.Tensor
    negative_entropy: torch.Tensor


class _Distances:
    """|n - t|^2 / |t|^2 of each row: n [rows, H] what the draft's head reads, t [rows, H] what the verifier's read."""

    def __init__(self, ours: torch.Tensor, theirs: torch.Tensor):
        self._difference = ours - theirs
        self._scale = 1 / _row_dot(theirs, theirs).clamp(min=torch.finfo(theirs.dtype).tiny)

    def values(self) -> torch.Tensor:
        """[rows]."""
        return _row_dot(self._difference, self._difference) * self._scale

    def gradient(self) -> torch.Tensor:
        """Of each value by its n: [rows, H]."""
        return 2 * self._scale[:, None] * self._difference


def _by_chunks(
    normed: torch.Tensor,
    head: torch.Tensor,
    targets: Targets,
    weights: torch.Tensor,
    dtype: torch.dtype,
    objective: Objective,
    grad_normed: torch.Tensor | None,
    grad_head: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, its sums and agreed; adds the gradients into grad_normed and grad_head where they are given."""
    wide = torch.promote_types(dtype, torch.float32)
    draft_head, verifier_head = head.detach().to(dtype), targets.head.to(dtype)
    sums = torch.zeros(len(normed), dtype=wide, device=normed.device)
    agreed = torch.zeros_like(targets.counted)
    target_states = targets.states.to(wide)
    for at in range(0, len(targets.states), CHUNK):
        part = slice(at, at + CHUNK)
        log_p = product(targets.states[part].to(dtype), verifier_head).to(wide).log_softmax(-1)
        p = log_p.exp()
        verifier = _Verifier(p, log_p, p.argmax(-1), _row_dot(p, log_p))
        choices = verifier.choice if targets.choices is None else targets.choices[part]
        for step, states in enumerate(normed):
            rows, counted, taught = (tensor[step, part] for tensor in (targets.source, targets.counted, targets.taught))
            inputs = states[rows]
            log_q = product(inputs.to(dtype), draft_head).to(wide).log_softmax(-1)
            agreed[step, part] = (log_q.argmax(-1) == choices) & counted
            values = _values(objective, verifier, log_q)
            distances = _Distances(inputs.to(wide), target_states[part]) if objective.feature_weight else None
            if distances is not None:
                values = values + objective.feature_weight * distances.values()
            sums[step] += (values * taught).sum()
            if grad_normed is not None:
                scale = (taught * weights[step])[:, None]
                grad = _gradient(objective, verifier, log_q).mul_(scale).to(dtype)
                grad_inputs = product(grad, draft_head.T).to(grad_normed.dtype)
                if distances is not None:
                    grad_inputs += (objective.feature_weight * scale * distances.gradient()).to(grad_inputs.dtype)
                grad_normed[step].index_add_(0, rows, grad_inputs)
                if grad_head is not None:
                    grad_head += grad.T @ inputs.to(dtype)
    return (sums * weights).sum(), sums, agreed


def _values(objective: Objective, verifier: _Verifier, log_q: torch.Tensor) -> torch.Tensor:
    """The loss of each row [rows]."""
    share = objective.acceptance_share
    if share == 1 or objective.kind == "total_variation":
        return 1 - torch.minimum(verifier.p, log_q.exp()).sum(-1)
    match objective.kind:
        case "forward_kl":
            value = verifier.negative_entropy - _row_dot(verifier.p, log_q)
        case "hard_labels":
            value = -log_q.gather(1, verifier.choice[:, None])[:, 0]
        case "reverse_kl":
            value = _row_dot(log_q.exp(), log_q - verifier.log_p)
    if not share:
        return value
    return value * (1 - share) + share * (1 - torch.minimum(verifier.p, log_q.exp()).sum(-1))


def _gradient(objective: Objective, verifier: _Verifier, log_q: torch.Tensor) -> torch.Tensor:
    """The gradient of each row's loss with respect to the draft's logits [rows, D]. Overwrites log_q."""
    share = objective.acceptance_share
    if share == 1 or objective.kind == "total_variation":
        return _acceptance_gradient(verifier, log_q.exp_())
    blend = _acceptance_gradient(verifier, log_q.exp()).mul_(share) if share else None
    match objective.kind:
        case "forward_kl":
            grad = log_q.exp_().sub_(verifier.p)
        case "hard_labels":
            grad = log_q.exp_()
            grad.scatter_add_(1, verifier.choice[:, None], -torch.ones_like(grad[:, :1]))
        case "reverse_kl":
            q, ratio = log_q.exp(), log_q.sub_(verifier.log_p)
            grad = ratio.sub_(_row_dot(q, ratio)[:, None]).mul_(q)
    return grad if blend is None else grad.mul_(1 - share).add_(blend)


def _acceptance_gradient(verifier: _Verifier, q: torch.Tensor) -> torch.Tensor:
    below = (q < verifier.p).to(q.dtype)  # where more of q would be accepted
    return (_row_dot(q, below)[:, None] - below) * q


def _row_dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Dot product of each pair of rows [.., D] to [..]."""
    dot: torch.Tensor = torch.linalg.vecdot(left, right)
    return dot
