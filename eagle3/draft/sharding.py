"""The draft in shards (FSDP2): a process keeps its part of every trained weight, of its gradient and of its moments.

The weights of a block are gathered when the block is computed, in the forward and again in the backward pass; its
gradients are summed over the processes and dealt out right after. So whole weights and gradients exist for one block at
a time, and for the norms and a trained head. They are gathered and summed in float32, as one process computes them.

What torch gathers and sums on the way has to be asked for by all processes in the same order, so each of them takes as
many batches through the draft as the others; one that has none left takes an empty one.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3.draft.model import DraftModel
from eagle3.draft.processes import Processes


def shard(root: nn.Module, draft: DraftModel, processes: Processes) -> None:
    """Replace the trained parameters of `draft` by this process's parts of them; frozen ones stay whole.

    root: holds the draft, and its forward is what runs the draft.
    """
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    frozen = {value for value in draft.parameters() if not value.requires_grad}
    modules: list[nn.Module] = [draft.fc]
    for layer in draft.layers:
        modules += [layer.self_attn, layer.mlp]  # type: ignore[list-item]
    for module in (*modules, root):
        fully_shard(module, mesh=mesh, ignored_params=frozen)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be in shards. All processes ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread(source: torch.Tensor | None, like: torch.Tensor, processes: Processes) -> torch.Tensor:
    """What the first process passes as `source`, in the form of `like`: in shards, or whole everywhere.

    source: whole; None in all processes but the first.
    """
    full = torch.empty(like.shape, device=processes.device) if source is None else source.to(processes.device)
    if isinstance(like, DTensor):
        return distribute_tensor(full, like.device_mesh, like.placements)
    processes.copy_from_first([full])
    return full
