"""Training-time-test attention: causal attention over the keys of step 0, merged with each row's own later keys.

At step k the query of row i sees the step-0 keys j <= i of its document and its own keys of steps 1 .. k. The first
part runs in a fused kernel; the second is one term per step; the two are merged through the log-sum-exp. The merge is
exact and so is its gradient: the kernel's backward is given the *total* output and the *total* log-sum-exp, as in ring
attention (Liu et al. 2023, arXiv:2310.01889).

Letters: N context rows (keys of step 0), R query rows, h query heads, g key-value heads, d head size.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDA_FORWARD = torch.ops.aten._flash_attention_forward.default
_CUDA_BACKWARD = torch.ops.aten._flash_attention_backward.default
_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_CUDA_DTYPES = (torch.float16, torch.bfloat16)


class Document(NamedTuple):
    """Context rows [start, end) are one document; its query rows are [first, end)."""

    start: int
    first: int
    end: int


class LayerMemory:
    """Keys and values of one layer during one unroll: those of step 0 [N, g, d], and of later steps each row's own
    [R, g, d].

    It is no dataclass: FSDP hands a module copies of those that hold gradients, and this one is to be remembered.
    """

    def __init__(self) -> None:
        self.context: tuple[torch.Tensor, torch.Tensor] | None = None
        self.own: tuple[torch.Tensor, ...] = ()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Sequence[Document]
    ) -> torch.Tensor:
        """Remember this step's keys and values, then attend. query [R, h, d]; returns [R, h, d]."""
        if self.context is None:
            self.context = key, value
        else:
            self.own = (*self.own, key, value)
        return ttt_attention(query, *self.context, self.own, documents)


def ttt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Sequence[torch.Tensor],
    documents: Sequence[Document],
) -> torch.Tensor:
    """Attention of one step. query [R, h, d]; key, value [N, g, d] of step 0.

    own: key, value [R, g, d] of step 1, then of step 2, and so on. documents: in order; their query rows together are
    the R rows. Returns [R, h, d].
    """
    assert query.shape[0] == sum(end - first for _, first, end in documents)
    output: torch.Tensor = _Attention.apply(tuple(documents), query, key, value, *own)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        documents: tuple[Document, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        backend = choose_backend(query) if documents else CpuFlashBackend()  # which asks no kernel for nothing
        outputs, sums = backend.forward(query, key, value, documents)
        scores = [_own_scores(query, own_key) for own_key in own[::2]]
        total = torch.logsumexp(torch.stack([*sums, *scores]), dim=0)
        output = query.new_zeros(query.shape, dtype=total.dtype)
        for part, part_sum in zip(outputs, sums, strict=True):
            output.addcmul_(part.to(total.dtype), (part_sum - total).exp()[..., None])
        for score, own_value in zip(scores, own[1::2], strict=True):
            _grouped(output, own_value).addcmul_(
                own_value.to(total.dtype)[:, :, None], _grouped((score - total).exp()[..., None], own_value)
            )
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total, *own)
        ctx.documents, ctx.backend = documents, backend
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total, *own = ctx.saved_tensors
        grad = grad.contiguous()
        grad_query, grad_key, grad_value = ctx.backend.backward(grad, query, key, value, output, total, ctx.documents)
        if not own:
            return None, grad_query, grad_key, grad_value
        wide_query, wide_grad = query.to(total.dtype), grad.to(total.dtype)
        grad_query = grad_query.to(total.dtype)
        overlap = (wide_grad * output).sum(-1)
        scale = query.shape[-1] ** -0.5
        grads_own: list[torch.Tensor] = []
        for own_key, own_value in zip(own[::2], own[1::2], strict=True):
            share = (_own_scores(query, own_key) - total).exp()
            through_value = (_grouped(wide_grad, own_value) * own_value.to(total.dtype)[:, :, None]).sum(-1).flatten(1)
            grad_score = (share * (through_value - overlap) * scale)[..., None]
            _grouped(grad_query, own_key).addcmul_(own_key.to(total.dtype)[:, :, None], _grouped(grad_score, own_key))
            grads_own.append(_grouped(grad_score * wide_query, own_key).sum(2).to(own_key.dtype))
            grads_own.append(_grouped(share[..., None] * wide_grad, own_value).sum(2).to(own_value.dtype))
        return None, grad_query.to(query.dtype), grad_key, grad_value, *grads_own


def _grouped(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[R, h, x] seen as [R, g, h / g, x], where `like` is [R, g, d]."""
    return tensor.view(tensor.shape[0], like.shape[1], tensor.shape[1] // like.shape[1], tensor.shape[2])


def _own_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Score of each row's query with its own key: [R, h], at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    product = _grouped(query.to(wide), key) * key.to(wide)[:, :, None]
    scale: float = query.shape[-1] ** -0.5
    return product.sum(-1).flatten(1) * scale


class Backend:
    """Causal attention within each document, in one or more parts whose key sets are disjoint."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Sequence[Document]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs [R, h, d] and log-sum-exps [R, h] of the parts."""
        raise NotImplementedError

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        total: torch.Tensor,
        documents: Sequence[Document],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value, given the total output [R, h, d] and the total log-sum-exp [R, h]."""
        raise NotImplementedError


class PlainBackend(Backend):
    """Explicit score matrices, one document at a time: any device, dtype and head size."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Sequence[Document]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, sums = [], []
        for rows, document in _with_rows(documents):
            scores, wide_value = self._scores(query[rows], key, value, document)
            total = scores.logsumexp(-1)
            outputs.append(((scores - total[..., None]).exp() @ wide_value).transpose(0, 1))
            sums.append(total.T)
        return [torch.cat(outputs)], [torch.cat(sums)]

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        total: torch.Tensor,
        documents: Sequence[Document],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
        for rows, document in _with_rows(documents):
            scores, wide_value = self._scores(query[rows], key, value, document)
            wide_key = _heads_first(key[document.start : document.end], groups, scores.dtype)
            wide_grad = grad[rows].transpose(0, 1).to(scores.dtype)
            weights = (scores - total[rows].T[..., None]).exp()
            overlap = (grad[rows].to(scores.dtype) * output[rows]).sum(-1).T[..., None]
            grad_scores = weights * (wide_grad @ wide_value.transpose(1, 2) - overlap) * scale
            grad_query[rows] = (grad_scores @ wide_key).transpose(0, 1).to(query.dtype)
            wide_query = query[rows].transpose(0, 1).to(scores.dtype)
            for target, part in (
                (grad_key, grad_scores.transpose(1, 2) @ wide_query),
                (grad_value, weights.transpose(1, 2) @ wide_grad),
            ):
                summed = part.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
                target[document.start : document.end] = summed.to(target.dtype)
        return grad_query, grad_key, grad_value

    @staticmethod
    def _scores(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, document: Document
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masked scores [h, rows, keys] and values [h, keys, d] of one document."""
        start, first, end = document
        wide = torch.promote_types(query.dtype, torch.float32)
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = (_heads_first(tensor[start:end], groups, wide) for tensor in (key, value))
        scores = query.transpose(0, 1).to(wide) @ wide_key.transpose(1, 2) * query.shape[-1] ** -0.5
        rows, columns = (torch.arange(first, end, device=query.device), torch.arange(start, end, device=query.device))
        return scores.masked_fill(columns > rows[:, None], -torch.inf), wide_value


class CpuFlashBackend(Backend):
    """PyTorch's fused CPU kernel, document by document.

    Its causal mask is aligned with the first key, so keys before the first query are a part of their own, unmasked.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Sequence[Document]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        wide = torch.promote_types(query.dtype, torch.float32)
        parts = 1 + any(document.first > document.start for document in documents)
        outputs = [torch.zeros_like(query) for _ in range(parts)]
        sums = [query.new_full(query.shape[:2], -torch.inf, dtype=wide) for _ in range(parts)]
        for rows, document in _with_rows(documents):
            for part, keys in enumerate(_key_parts(document)):
                output, total = _CPU_FORWARD(
                    _as_batch(query[rows]), _as_batch(key[keys]), _as_batch(value[keys]), 0.0, part == 0
                )
                outputs[part][rows] = output[0].transpose(0, 1)
                sums[part][rows] = total[0].T
        return outputs, sums

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        total: torch.Tensor,
        documents: Sequence[Document],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        for rows, document in _with_rows(documents):
            for part, keys in enumerate(_key_parts(document)):
                found = _CPU_BACKWARD(
                    _as_batch(grad[rows]),
                    _as_batch(query[rows]),
                    _as_batch(key[keys]),
                    _as_batch(value[keys]),
                    _as_batch(output[rows]),
                    total[rows].T[None],
                    0.0,
                    part == 0,
                )
                grad_query[rows] += found[0][0].transpose(0, 1)
                grad_key[keys] = found[1][0].transpose(0, 1)
                grad_value[keys] = found[2][0].transpose(0, 1)
        return grad_query, grad_key, grad_value


class CudaFlashBackend(Backend):
    """PyTorch's FlashAttention-2 kernels over all documents at once; their causal mask is aligned with the last key."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Sequence[Document]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        bounds = _bounds(documents, query.device)
        output, total, *_ = _CUDA_FORWARD(query, key, value, *bounds, 0.0, True, False)
        return [output], [total.T]

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        total: torch.Tensor,
        documents: Sequence[Document],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bounds = _bounds(documents, query.device)
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        found = _CUDA_BACKWARD(
            grad, query, key, value, output, total.T.contiguous(), *bounds, 0.0, True, unused, unused[:0]
        )
        grad_query, grad_key, grad_value = found
        return grad_query, grad_key, grad_value


def choose_backend(query: torch.Tensor) -> Backend:
    """The fused kernel where it exists for this device, dtype and head size; the plain form elsewhere."""
    size = query.shape[-1]
    if query.device.type == "cpu" and query.dtype in _CPU_DTYPES:
        return CpuFlashBackend()
    if query.device.type == "cuda" and query.dtype in _CUDA_DTYPES and size % 8 == 0 and size <= 256:
        return CudaFlashBackend()
    return PlainBackend()


def _with_rows(documents: Sequence[Document]) -> list[tuple[slice, Document]]:
    """Each document with the slice of its query rows."""
    found, place = [], 0
    for document in documents:
        rows = document.end - document.first
        found.append((slice(place, place + rows), document))
        place += rows
    return found


def _key_parts(document: Document) -> list[slice]:
    """Keys from the first query on (causal), then the keys before it (all visible)."""
    start, first, end = document
    return [slice(first, end), slice(start, first)] if first > start else [slice(first, end)]


def _as_batch(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, heads, d] as [1, heads, rows, d]."""
    return tensor.transpose(0, 1)[None]


def _heads_first(tensor: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, g, d] as [h, rows, d], each key-value head repeated for its query heads."""
    return tensor.transpose(0, 1).to(dtype).repeat_interleave(groups, dim=0)


def _bounds(documents: Sequence[Document], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative query and key rows (int32) and the longest of each."""
    queries = [end - first for _, first, end in documents]
    keys = [end - start for start, _, end in documents]
    ends = [torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lengths in (queries, keys)]
    return ends[0].to(device), ends[1].to(device), max(queries), max(keys)
