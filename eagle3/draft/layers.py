"""What every layer of a draft is built from: linear maps, norms, rotary positions.

Weights stay float32; matrix products run in the dtype that is asked for, norms and rotations in float32.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from eagle3.draft.attention import Document, LayerMemory


def product(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """inputs [N, in] @ weight [out, in].T: [N, out].

    On the CPU, reduced precision, N is filled up with zeros to a round number: oneDNN compiles a kernel for each shape
    that it meets and keeps the last 1,024 of them, so training on batches of ever new lengths takes more and more
    memory, hundreds of megabytes.
    """
    rows = len(inputs)
    filling = -rows % _granule(rows) if inputs.device.type == "cpu" and inputs.dtype.itemsize < 4 else 0
    if not filling:
        return functional.linear(inputs, weight)
    return functional.linear(functional.pad(inputs, (0, 0, 0, filling)), weight)[:rows]


def _granule(rows: int) -> int:
    """A power of two, at most a sixteenth of `rows` or 32: at most 16 round numbers between two powers of two."""
    return max(32, 1 << max(0, rows.bit_length() - 5))


class Linear(nn.Module):
    """A weight [out, in] without bias, cast to the dtype of the product at each use."""

    def __init__(self, width: int, height: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(height, width))

    def forward(self, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[N, in] to [N, out] in `dtype`."""
        return product(inputs.to(dtype), self.weight.to(dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32 or wider."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[.., width] to [.., width]."""
        return rms_norm(states, self.weight, self.eps)


class RotaryAttention(nn.Module):
    """Attention over a LayerMemory, of queries for some rows and keys and values for all.

    Letters: N rows, R query rows, H hidden size, h heads, g key-value heads, d width of queries and keys, e of values.
    """

    o_proj: Linear

    def forward(
        self,
        inputs: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        memory: LayerMemory,
        documents: Sequence[Document],
        rows: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """inputs [N, width] to [R, H]. rotation: cosine and sine [N, 1, width of the rotated part]."""
        inputs = inputs.to(dtype)
        cos, sin = rotation
        key, value = self.keys_and_values(inputs, cos, sin, dtype)
        if rows is not None:
            inputs, cos, sin = inputs[rows], cos[rows], sin[rows]
        query = self.queries(inputs, cos, sin, dtype)
        return widen(self.o_proj(memory.attend(query, key, value, documents).flatten(1), dtype))

    def queries(self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[R, width] to [R, h, d]."""
        raise NotImplementedError

    def keys_and_values(
        self, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, width] to [N, g, d] and [N, g, e]."""
        raise NotImplementedError


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * states / rms(states), computed in float32 or wider."""
    wide = widen(states)
    return functional.rms_norm(wide, wide.shape[-1:], weight.to(wide.dtype), eps)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves rotated (as Llama). heads [N, h, d], cos and sin [N, 1, d]; computed in float32."""
    wide = widen(heads)
    left, right = wide.chunk(2, dim=-1)
    rotated = wide * cos + torch.cat([-right, left], dim=-1) * sin
    return rotated.to(heads.dtype)


def rotate_pairs(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, neighbours rotated (as DeepSeek). heads [N, h, d], cos and sin [N, 1, d], each value twice."""
    wide = widen(heads)
    rotated = wide * cos + torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2) * sin
    return rotated.to(heads.dtype)


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
