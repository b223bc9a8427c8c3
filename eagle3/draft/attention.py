"""Training-time-test attention: causal attention over the keys of step 0, merged with each row's own later keys.

At step k the query of row i sees the step-0 keys j <= i of its document and its own keys of steps 1 .. k; with a
sliding window of w tokens it stands at position i + k, and of the step-0 keys sees those j > i + k - w. The first part
runs in a fused kernel; the second is one term per step; the two are merged through the log-sum-exp. The merge is exact
and so is its gradient: the kernel's backward is given the *total* output and the *total* log-sum-exp, as in ring
attention (Liu et al. 2023, arXiv:2310.01889).

Values may be narrower or wider than keys (latent attention). The fused kernels want one width; what they are given is
filled up with zeros, which adds nothing to a score, an output or a gradient.

Letters: N context rows (keys of step 0), R query rows, h query heads, g key-value heads, d width of queries and keys,
e width of values.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CUDA_FORWARD = torch.ops.aten._flash_attention_forward.default
_CUDA_BACKWARD = torch.ops.aten._flash_attention_backward.default
_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_CUDA_DTYPES = (torch.float16, torch.bfloat16)
_BLOCK = 256  # query rows at a time, where the CPU kernel needs a mask for a window


class Document(NamedTuple):
    """Context rows [start, end) are one document; its query rows are [first, end)."""

    start: int
    first: int
    end: int


class LayerMemory:
    """Keys and values of one layer during one unroll: those of step 0 [N, g, d] and [N, g, e], and of later steps each
    row's own [R, g, d] and [R, g, e].

    It is no dataclass: FSDP hands a module copies of those that hold gradients, and this one is to be remembered.
    """

    def __init__(self, scale: float, window: int | None):
        """scale: what scores are multiplied with. window: how many positions a query sees, its own included, and more
        than there are later steps; None = all."""
        self.scale, self.window = scale, window
        self.context: tuple[torch.Tensor, torch.Tensor] | None = None
        self.own: tuple[torch.Tensor, ...] = ()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Sequence[Document]
    ) -> torch.Tensor:
        """Remember this step's keys and values, then attend. query [R, h, d]; returns [R, h, e]."""
        if self.context is None:
            self.context = key, value
        else:
            self.own = (*self.own, key, value)
        reach = None if self.window is None else self.window - len(self.own) // 2
        return ttt_attention(query, *self.context, self.own, documents, self.scale, reach)


def ttt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: Sequence[torch.Tensor],
    documents: Sequence[Document],
    scale: float,
    reach: int | None,
) -> torch.Tensor:
    """Attention of one step. query [R, h, d]; key [N, g, d] and value [N, g, e] of step 0.

    own: key [R, g, d] and value [R, g, e] of step 1, then of step 2, and so on. documents: in order; their query rows
    together are the R rows. reach: row i sees the step-0 keys i - reach < j <= i; None = all before it too. Returns
    [R, h, e].
    """
    assert reach is None or reach > 0
    assert query.shape[0] == sum(end - first for _, first, end in documents)
    output: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        tuple(documents), scale, reach, query, key, value, *own
    )
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        documents: tuple[Document, ...],
        scale: float,
        reach: int | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        backend = choose_backend(query, value) if documents else CpuFlashBackend()  # which asks no kernel for nothing
        outputs, sums = backend.forward(query, key, value, documents, scale, reach)
        scores = [_own_scores(query, own_key, scale) for own_key in own[::2]]
        total = torch.logsumexp(torch.stack([*sums, *scores]), dim=0)
        output = query.new_zeros((*query.shape[:2], value.shape[-1]), dtype=total.dtype)
        for part, part_sum in zip(outputs, sums, strict=True):
            output.addcmul_(part.to(total.dtype), (part_sum - total).exp()[..., None])
        for score, own_value in zip(scores, own[1::2], strict=True):
            _grouped(output, own_value).addcmul_(
                own_value.to(total.dtype)[:, :, None], _grouped((score - total).exp()[..., None], own_value)
            )
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total, *own)
        ctx.documents, ctx.scale, ctx.reach, ctx.backend = documents, scale, reach, backend
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total, *own = ctx.saved_tensors
        grad, scale = grad.contiguous(), ctx.scale
        grad_query, grad_key, grad_value = ctx.backend.backward(
            grad, query, key, value, output, total, ctx.documents, scale, ctx.reach
        )
        if not own:
            return None, None, None, grad_query, grad_key, grad_value
        wide_query, wide_grad = query.to(total.dtype), grad.to(total.dtype)
        grad_query = grad_query.to(total.dtype)
        overlap = (wide_grad * output).sum(-1)
        grads_own: list[torch.Tensor] = []
        for own_key, own_value in zip(own[::2], own[1::2], strict=True):
            share = (_own_scores(query, own_key, scale) - total).exp()
            through_value = (_grouped(wide_grad, own_value) * own_value.to(total.dtype)[:, :, None]).sum(-1).flatten(1)
            grad_score = (share * (through_value - overlap) * scale)[..., None]
            _grouped(grad_query, own_key).addcmul_(own_key.to(total.dtype)[:, :, None], _grouped(grad_score, own_key))
            grads_own.append(_grouped(grad_score * wide_query, own_key).sum(2).to(own_key.dtype))
            grads_own.append(_grouped(share[..., None] * wide_grad, own_value).sum(2).to(own_value.dtype))
        return None, None, None, grad_query.to(query.dtype), grad_key, grad_value, *grads_own


def _grouped(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[R, h, x] seen as [R, g, h / g, x], where `like` is [R, g, d]."""
    return tensor.view(tensor.shape[0], like.shape[1], tensor.shape[1] // like.shape[1], tensor.shape[2])


def _own_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """Score of each row's query with its own key: [R, h], at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    product = _grouped(query.to(wide), key) * key.to(wide)[:, :, None]
    return product.sum(-1).flatten(1) * scale


class Backend:
    """Causal attention within each document, in one or more parts whose key sets are disjoint."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Sequence[Document],
        scale: float,
        reach: int | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs [R, h, e] and log-sum-exps [R, h] of the parts."""
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
        scale: float,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key and value, given the total output [R, h, e] and the total log-sum-exp [R, h]."""
        raise NotImplementedError


class PlainBackend(Backend):
    """Explicit score matrices, one document at a time: any device, dtype and widths."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Sequence[Document],
        scale: float,
        reach: int | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, sums = [], []
        for rows, document in _with_rows(documents):
            scores, wide_value = self._scores(query[rows], key, value, document, scale, reach)
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
        scale: float,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        grad_query, grad_key, grad_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        for rows, document in _with_rows(documents):
            scores, wide_value = self._scores(query[rows], key, value, document, scale, reach)
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
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document: Document,
        scale: float,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Masked scores [h, rows, keys] and values [h, keys, e] of one document."""
        start, first, end = document
        wide = torch.promote_types(query.dtype, torch.float32)
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = (_heads_first(tensor[start:end], groups, wide) for tensor in (key, value))
        scores = query.transpose(0, 1).to(wide) @ wide_key.transpose(1, 2) * scale
        return scores + _mask(range(first, end), range(start, end), reach, scores), wide_value


class CpuFlashBackend(Backend):
    """PyTorch's fused CPU kernel, piece by piece."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Sequence[Document],
        scale: float,
        reach: int | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        wide = torch.promote_types(query.dtype, torch.float32)
        pieces = _pieces(documents, reach, query)
        parts = 1 + max((piece.part for piece in pieces), default=0)
        width = max(query.shape[-1], value.shape[-1])
        outputs = [query.new_zeros((*query.shape[:2], value.shape[-1])) for _ in range(parts)]
        sums = [query.new_full(query.shape[:2], -torch.inf, dtype=wide) for _ in range(parts)]
        for rows, keys, part, causal, mask in pieces:
            output, total = _CPU_FORWARD(
                _as_batch(query[rows], width),
                _as_batch(key[keys], width),
                _as_batch(value[keys], width),
                0.0,
                causal,
                attn_mask=mask,
                scale=scale,
            )
            outputs[part][rows] = output[0].transpose(0, 1)[..., : value.shape[-1]]
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
        scale: float,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_query = torch.zeros_like(query)
        sum_dtype = key.dtype if reach is None else wide  # with a window, several pieces share a key
        grad_key, grad_value = torch.zeros_like(key, dtype=sum_dtype), torch.zeros_like(value, dtype=sum_dtype)
        width = max(query.shape[-1], value.shape[-1])
        for rows, keys, _, causal, mask in _pieces(documents, reach, query):
            found = _CPU_BACKWARD(
                _as_batch(grad[rows], width),
                _as_batch(query[rows], width),
                _as_batch(key[keys], width),
                _as_batch(value[keys], width),
                _as_batch(output[rows], width),
                total[rows].T[None],
                0.0,
                causal,
                attn_mask=mask,
                scale=scale,
            )
            grad_query[rows] += found[0][0].transpose(0, 1)[..., : query.shape[-1]]
            grad_key[keys] += found[1][0].transpose(0, 1)[..., : key.shape[-1]]
            grad_value[keys] += found[2][0].transpose(0, 1)[..., : value.shape[-1]]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


class CudaFlashBackend(Backend):
    """PyTorch's FlashAttention-2 kernels over all documents at once; their causal mask is aligned with the last key."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: Sequence[Document],
        scale: float,
        reach: int | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        width = max(query.shape[-1], value.shape[-1])
        filled = (_fill(tensor, width) for tensor in (query, key, value))
        bounds, before = _bounds(documents, query.device), None if reach is None else reach - 1
        output, total, *_ = _CUDA_FORWARD(*filled, *bounds, 0.0, True, False, scale=scale, window_size_left=before)
        return [output[..., : value.shape[-1]]], [total.T]

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        total: torch.Tensor,
        documents: Sequence[Document],
        scale: float,
        reach: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bounds, before = _bounds(documents, query.device), None if reach is None else reach - 1
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        width = max(query.shape[-1], value.shape[-1])
        filled = (_fill(tensor, width) for tensor in (grad, query, key, value, output))
        grad_query, grad_key, grad_value = _CUDA_BACKWARD(
            *filled,
            total.T.contiguous(),
            *bounds,
            0.0,
            True,
            unused,
            unused[:0],
            scale=scale,
            window_size_left=before,
        )
        return (
            grad_query[..., : query.shape[-1]],
            grad_key[..., : key.shape[-1]],
            grad_value[..., : value.shape[-1]],
        )


def choose_backend(query: torch.Tensor, value: torch.Tensor) -> Backend:
    """The fused kernel where it exists for this device, dtype and width; the plain form elsewhere."""
    size = max(query.shape[-1], value.shape[-1])
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


class _Piece(NamedTuple):
    """Query rows and keys of one call of the CPU kernel; which part of the outputs it belongs to; how it masks."""

    rows: slice
    keys: slice
    part: int
    causal: bool
    mask: torch.Tensor | None


def _pieces(documents: Sequence[Document], reach: int | None, like: torch.Tensor) -> list[_Piece]:
    """What the CPU kernel is called with; masks of the dtype of `like`.

    Its causal mask is aligned with the first key, so keys before the first query are a part of their own, unmasked. A
    window that is shorter than the document has a mask, for some query rows at a time.
    """
    found = []
    for rows, (start, first, end) in _with_rows(documents):
        if reach is None or end - start <= reach:
            found.append(_Piece(rows, slice(first, end), 0, True, None))
            if first > start:
                found.append(_Piece(rows, slice(start, first), 1, False, None))
            continue
        for at in range(first, end, _BLOCK):
            block = range(at, min(at + _BLOCK, end))
            keys = range(max(start, at - reach + 1), block.stop)
            place = rows.start + at - first
            mask = _mask(block, keys, reach, like)
            found.append(_Piece(slice(place, place + len(block)), slice(keys.start, keys.stop), 0, False, mask))
    return found


def _mask(rows: range, columns: range, reach: int | None, like: torch.Tensor) -> torch.Tensor:
    """[rows, columns] with 0 where a row sees a column, minus infinity elsewhere; dtype and device of `like`."""
    row, column = (torch.arange(part.start, part.stop, device=like.device) for part in (rows, columns))
    hidden = column > row[:, None]
    if reach is not None:
        hidden |= column <= row[:, None] - reach
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _as_batch(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, heads, x] as [1, heads, rows, width]."""
    return _fill(tensor, width).transpose(0, 1)[None]


def _fill(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """[.., x] with zeros behind, up to [.., width]; the tensor itself where it has that width."""
    missing = width - tensor.shape[-1]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _heads_first(tensor: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, g, x] as [h, rows, x], each key-value head repeated for its query heads."""
    return tensor.transpose(0, 1).to(dtype).repeat_interleave(groups, dim=0)


def _bounds(documents: Sequence[Document], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative query and key rows (int32) and the longest of each."""
    queries = [end - first for _, first, end in documents]
    keys = [end - start for start, _, end in documents]
    ends = [torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lengths in (queries, keys)]
    return ends[0].to(device), ends[1].to(device), max(queries), max(keys)
