"""The chunked loss against the eager one."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from eagle3.draft import loss
from eagle3.draft.loss import Kind, Objective, StepLosses, Targets, distill, verifier_choices

STEPS, ROWS, TARGETS, HIDDEN, VOCAB = 3, 9, 11, 6, 17


KL = Objective("forward_kl", 0.0, 0.0, "renormalise")
OBJECTIVES = [Objective(kind, share, 0.0, "renormalise") for kind in get_args(Kind) for share in (0.0, 0.3, 1.0)]
OBJECTIVES += [replace(KL, feature_weight=0.7), Objective("total_variation", 0.3, 2.0, "renormalise")]


def eager_value(objective: Objective, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The loss of one position, as its definition has it."""
    p, q = log_p.exp(), log_q.exp()
    rejected = (p - q).abs().sum() / 2
    value = {
        "forward_kl": (p * (log_p - log_q)).sum(),
        "hard_labels": -log_q[log_p.argmax()],
        "reverse_kl": (q * (log_q - log_p)).sum(),
        "total_variation": rejected,
    }[objective.kind]
    return (1 - objective.acceptance_share) * value + objective.acceptance_share * rejected


def eager_distill(
    normed: torch.Tensor, head: torch.Tensor, targets: Targets, weights: torch.Tensor, objective: Objective = KL
) -> StepLosses:
    """All logits at once, position by position."""
    log_target = (targets.states @ targets.head.T).log_softmax(-1)
    choices = log_target.argmax(-1) if targets.choices is None else targets.choices
    sums, agreed = [], torch.zeros_like(targets.counted)
    for step in range(len(normed)):
        total = normed.new_zeros(())
        for place in range(len(targets.states)):
            if targets.counted[step, place]:
                log_draft = (head @ normed[step, targets.source[step, place]]).log_softmax(-1)
                if targets.taught[step, place]:
                    total = total + eager_value(objective, log_target[place], log_draft)
                    ours, theirs = normed[step, targets.source[step, place]], targets.states[place]
                    total = total + objective.feature_weight * ((ours - theirs) ** 2).sum() / (theirs**2).sum()
                agreed[step, place] = log_draft.argmax() == choices[place]
        sums.append(total)
    stacked = torch.stack(sums)
    return StepLosses((stacked * weights).sum(), stacked, agreed)


def random_case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, Targets, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    counted = torch.rand((STEPS, TARGETS), generator=generator) < 0.7
    source = torch.stack([torch.randperm(TARGETS, generator=generator) % ROWS for _ in range(STEPS)])
    taught = counted & (torch.rand((STEPS, TARGETS), generator=generator) < 0.8)
    targets = Targets(normal(TARGETS, HIDDEN), normal(VOCAB, HIDDEN), source, counted, taught, None)
    weights = torch.tensor([0.5, 0.3, 0.1], dtype=dtype)
    return normal(STEPS, ROWS, HIDDEN).requires_grad_(), normal(VOCAB, HIDDEN).requires_grad_(), targets, weights


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_agreement_and_gradients_equal_the_eager_form(
    objective: Objective, chunk: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "CHUNK", chunk)
    normed, head, targets, weights = random_case(dtype)
    fast = distill(normed, head, targets, weights, dtype, objective)
    slow = eager_distill(normed, head, targets, weights, objective)
    assert torch.equal(fast.agreed, slow.agreed)
    torch.testing.assert_close(fast.sums, slow.sums, atol=tolerance, rtol=tolerance)
    found = torch.autograd.grad(2 * fast.loss, [normed, head])
    expected = torch.autograd.grad(2 * slow.loss, [normed, head])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_a_draft_equal_to_the_verifier_has_no_loss_but_for_hard_labels() -> None:
    """Those are least for a draft that is certain."""
    _, head, targets, weights = random_case(torch.float64)
    rows = torch.arange(TARGETS).expand(STEPS, -1)
    normed = targets.states.expand(STEPS, -1, -1).clone().requires_grad_()
    same = replace(targets, head=head.detach(), source=rows)
    for objective in OBJECTIVES:
        result = distill(normed, head.detach(), same, weights, torch.float64, objective)
        certain = objective.kind == "hard_labels" and objective.acceptance_share < 1
        assert (result.loss > 0.01) if certain else result.loss.item() == pytest.approx(0, abs=1e-9), objective
        assert torch.equal(result.agreed, targets.counted)
    for kind in ("forward_kl", "reverse_kl"):
        loss_value = distill(normed, head.detach(), same, weights, torch.float64, replace(KL, kind=kind)).loss
        assert torch.autograd.grad(loss_value, normed)[0].abs().max() < 1e-9


def test_without_gradients_the_numbers_are_the_same() -> None:
    normed, head, targets, weights = random_case(torch.float64)
    with torch.no_grad():
        plain = distill(normed, head, targets, weights, torch.float64, KL)
    assert torch.equal(plain.sums, distill(normed, head, targets, weights, torch.float64, KL).sums)
    assert not plain.loss.requires_grad


def test_m05_nothing_counted_is_a_loss_of_zero() -> None:
    normed, head, targets, weights = random_case(torch.float32)
    nothing = torch.zeros_like(targets.counted)
    empty = replace(targets, counted=nothing, taught=nothing)
    result = distill(normed, head, empty, weights, torch.float32, KL)
    result.loss.backward()
    assert result.loss.item() == 0 and not normed.grad.any() and not result.agreed.any()


def test_a_choice_outside_the_draft_vocabulary_is_a_miss() -> None:
    normed, head, targets, weights = random_case(torch.float64)
    best = torch.stack([(head @ row).argmax() for row in normed[0]])[targets.source[0]]
    hit = replace(targets, choices=best)
    assert torch.equal(distill(normed, head, hit, weights, torch.float64, KL).agreed[0], targets.counted[0])
    outside = replace(targets, choices=torch.full_like(best, -1))
    assert not distill(normed, head, outside, weights, torch.float64, KL).agreed.any()


def test_choices_are_over_the_full_vocabulary() -> None:
    lm_head = torch.eye(5)
    draft_ids = torch.tensor([-1, 0, -1, 1, -1])
    states = torch.eye(5)[[1, 3, 4, 0]]
    assert verifier_choices(states, lm_head, draft_ids).tolist() == [0, 1, -1, -1]
    assert verifier_choices(states[:0], lm_head, draft_ids).tolist() == []
