"""Loss and agreement of all steps: KL divergence from the verifier to the draft over the draft vocabulary.

Verifier targets are computed once and serve every step; logits exist for one chunk of rows at a time, and their
gradient is taken in the forward pass, so memory does not grow with rows times vocabulary. The tests have the eager
form.

Letters: K steps, R query rows, U target rows, H hidden size, D draft vocabulary, V verifier vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK = 256


@dataclass(frozen=True)
class Targets:
    """What the steps are measured against.

    states [U, H]: verifier states after the final norm. head [D, H]: the verifier's rows of the draft vocabulary.
    source int64 [K, U]: the query row that predicts target u at step k. counted bool [K, U]: whether it counts.
    choices int64 [U]: draft id of the verifier's first choice, -1 outside the draft vocabulary; None = the first choice
    within the draft vocabulary.
    """

    states: torch.Tensor
    head: torch.Tensor
    source: torch.Tensor
    counted: torch.Tensor
    choices: torch.Tensor | None


@dataclass(frozen=True)
class StepLosses:
    """loss: sum over k of weights[k] * kl_sums[k], to differentiate; kl_sums [K]; agreed bool [K, U], where counted."""

    loss: torch.Tensor
    kl_sums: torch.Tensor
    agreed: torch.Tensor


def distill(
    normed: torch.Tensor, head: torch.Tensor, targets: Targets, weights: torch.Tensor, dtype: torch.dtype
) -> StepLosses:
    """KL loss of all steps. normed [K, R, H]: what the draft head [D, H] reads. weights [K]. dtype: of the products."""
    if torch.is_grad_enabled():
        return StepLosses(*_Distill.apply(normed, head, targets, weights, dtype))  # type: ignore[no-untyped-call]
    return StepLosses(*_by_chunks(normed, head, targets, weights, dtype, None, None))


def verifier_choices(states: torch.Tensor, lm_head: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Draft id (or -1) of the verifier's first choice over its full vocabulary.

    states [U, H] after the final norm; lm_head [V, H]; draft_ids int64 [V]. Returns int64 [U].
    """
    chosen = [
        functional.linear(states[at : at + CHUNK].to(lm_head.dtype), lm_head).argmax(-1)
        for at in range(0, len(states), CHUNK)
    ]
    return draft_ids[torch.cat(chosen)] if chosen else draft_ids.new_empty(0)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: torch.Tensor, head: torch.Tensor, targets: Targets, weights: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_normed = torch.zeros_like(normed)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        result = _by_chunks(normed, head, targets, weights, dtype, grad_normed, grad_head)
        ctx.save_for_backward(grad_normed, *([] if grad_head is None else [grad_head]))
        ctx.mark_non_differentiable(result[1], result[2])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_normed, *rest = ctx.saved_tensors
        return grad_normed * grad, rest[0] * grad if rest else None, None, None, None


def _by_chunks(
    normed: torch.Tensor,
    head: torch.Tensor,
    targets: Targets,
    weights: torch.Tensor,
    dtype: torch.dtype,
    grad_normed: torch.Tensor | None,
    grad_head: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, kl_sums and agreed; adds the gradients into grad_normed and grad_head where they are given."""
    wide = torch.promote_types(dtype, torch.float32)
    draft_head, verifier_head = head.detach().to(dtype), targets.head.to(dtype)
    kl_sums = torch.zeros(len(normed), dtype=wide, device=normed.device)
    agreed = torch.zeros_like(targets.counted)
    for at in range(0, len(targets.states), CHUNK):
        part = slice(at, at + CHUNK)
        log_target = functional.linear(targets.states[part].to(dtype), verifier_head).to(wide).log_softmax(-1)
        target = log_target.exp()
        entropy = _row_dot(target, log_target)
        choices = target.argmax(-1) if targets.choices is None else targets.choices[part]
        for step, states in enumerate(normed):
            counted, rows = targets.counted[step, part], targets.source[step, part]
            inputs = states[rows].to(dtype)
            log_draft = functional.linear(inputs, draft_head).to(wide).log_softmax(-1)
            kl_sums[step] += ((entropy - _row_dot(target, log_draft)) * counted).sum()
            agreed[step, part] = (log_draft.argmax(-1) == choices) & counted
            if grad_normed is not None:
                grad = log_draft.exp_().sub_(target).mul_((counted * weights[step])[:, None]).to(dtype)
                grad_normed[step].index_add_(0, rows, (grad @ draft_head).to(grad_normed.dtype))
                if grad_head is not None:
                    grad_head += grad.T @ inputs
    return (kl_sums * weights).sum(), kl_sums, agreed


def _row_dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Dot product of each pair of rows [.., D] to [..]."""
    dot: torch.Tensor = torch.linalg.vecdot(left, right)
    return dot
