"""What turns gradients into new weights: AdamW, or Muon for the hidden matrices and AdamW for everything else.

Muon (https://kellerjordan.github.io/posts/muon/) orthogonalises the mean gradient of a matrix. Its step is scaled with
0.2 * sqrt(max(rows, columns)), which gives it the size of one of AdamW (https://arxiv.org/abs/2502.16982), so learning
rate and weight decay mean the same for both; its momentum is beta1.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from eagle3.params import TrainParams

HEAD = "lm_head.weight"
MOMENTUM = "momentum_buffer"
MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.Muon: (MOMENTUM,)}


class Optimiser:
    """AdamW, and Muon for each of its matrices, over trained parameters by name. Weight decay is on matrices only."""

    def __init__(self, trained: Mapping[str, nn.Parameter], params: TrainParams):
        hidden = {name for name, value in trained.items() if value.dim() == 2 and name != HEAD}
        by_muon = hidden if params.optimiser == "muon" else set()
        others = {name: value for name, value in trained.items() if name not in by_muon}
        groups = [
            {"params": [v for v in others.values() if v.dim() > 1], "weight_decay": params.weight_decay},
            {"params": [v for v in others.values() if v.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (params.beta1, params.beta2)
        adamw = torch.optim.AdamW(groups, lr=params.learning_rate, betas=betas, fused=True)
        self._parts: list[tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]] = [(adamw, others)]
        for name in sorted(by_muon):
            muon = torch.optim.Muon(
                [trained[name]],
                lr=params.learning_rate,
                weight_decay=params.weight_decay,
                momentum=params.beta1,
                adjust_lr_fn="match_rms_adamw",
            )
            self._parts.append((muon, {name: trained[name]}))

    def step(self, learning_rate: float) -> None:
        """Take the step and forget the gradients. Parameters without a gradient stay as they are."""
        for optimiser, parameters in self._parts:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate
            if isinstance(optimiser, torch.optim.Muon):
                (matrix,) = parameters.values()
                _step_whole(optimiser, matrix)
            else:
                optimiser.step()
            optimiser.zero_grad()

    def like(self) -> dict[str, nn.Parameter]:
        """The names of all moments, once a step was taken; each with a parameter of the same form."""
        return {
            f"{kind}.{name}": value
            for optimiser, parameters in self._parts
            for name, value in parameters.items()
            for kind in MOMENTS[type(optimiser)]
        }

    def moments(self) -> dict[str, torch.Tensor]:
        """What is remembered, by those names; empty before the first step."""
        return {
            f"{kind}.{name}": optimiser.state[value][kind]
            for optimiser, parameters in self._parts
            for name, value in parameters.items()
            if value in optimiser.state
            for kind in MOMENTS[type(optimiser)]
        }

    def restore(self, moments: Mapping[str, torch.Tensor], updates: int) -> None:
        """Take up moments in the form of their parameters; updates: the steps that they come from."""
        for optimiser, parameters in self._parts:
            for name, value in parameters.items():
                kept = {kind: moments[f"{kind}.{name}"] for kind in MOMENTS[type(optimiser)]}
                count = {"step": torch.tensor(float(updates), device=value.device)}
                optimiser.state[value] = kept | (count if isinstance(optimiser, torch.optim.AdamW) else {})


def _step_whole(muon: torch.optim.Muon, matrix: nn.Parameter) -> None:
    """Where processes hold shards, each of them orthogonalises the whole matrix: on shards torch would sum products in
    bfloat16. Gradient and momentum are whole in the meantime, those of one matrix at a time."""
    if not isinstance(matrix, DTensor) or matrix.grad is None:
        muon.step()
        return
    grad, state = matrix.grad, muon.state[matrix]
    assert isinstance(grad, DTensor)
    matrix.grad = grad.redistribute(placements=[Replicate()])
    if state:
        state[MOMENTUM] = state[MOMENTUM].redistribute(placements=[Replicate()])
    muon.step()
    state[MOMENTUM] = state[MOMENTUM].redistribute(placements=matrix.placements)
