"""The fused attention against the obvious one."""

import pytest
import torch

from eagle3.draft import attention
from eagle3.draft.attention import CpuFlashBackend, Document, LayerMemory, PlainBackend, ttt_attention

DOCUMENTS = [Document(0, 3, 10), Document(10, 10, 15), Document(15, 15, 16), Document(16, 21, 34)]
ROWS = sum(document.end - document.first for document in DOCUMENTS)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own: list[torch.Tensor],
    documents: list[Document],
    scale: float,
    reach: int | None,
) -> torch.Tensor:
    """Row by row: softmax over the step-0 keys i - reach < j <= i of the document and the row's own later keys."""
    outputs: list[torch.Tensor] = []
    groups = query.shape[1] // key.shape[1]
    for start, first, end in documents:
        for row in range(first, end):
            number = len(outputs)
            near = start if reach is None else max(start, row + 1 - reach)
            keys = torch.cat([key[near : row + 1], *(part[number : number + 1] for part in own[::2])])
            values = torch.cat([value[near : row + 1], *(part[number : number + 1] for part in own[1::2])])
            keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, values))
            scores = torch.einsum("hd,nhd->hn", query[number], keys) * scale
            outputs.append(torch.einsum("hn,nhe->he", scores.softmax(-1), values))
    return torch.stack(outputs)


def random_inputs(
    heads: int, kv_heads: int, widths: tuple[int, int], steps: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """widths: of queries and keys, and of values."""
    generator = torch.Generator().manual_seed(sum(widths))
    shapes = [(ROWS, heads, widths[0])] + [(34, kv_heads, width) for width in widths]
    shapes += [(ROWS, kv_heads, width) for width in widths] * steps
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("backend", [CpuFlashBackend, PlainBackend])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths"),
    [(6, 2, (16, 16)), (4, 1, (64, 64)), (2, 2, (24, 16)), (3, 3, (8, 20))],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 5e-2)]
)
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("reach", [None, 1, 7])
def test_output_and_gradients_equal_the_dense_form(
    backend: type[attention.Backend],
    heads: int,
    kv_heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    tolerance: float,
    steps: int,
    reach: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "choose_backend", lambda *_: backend())
    monkeypatch.setattr(attention, "_BLOCK", 5)
    inputs, scale = random_inputs(heads, kv_heads, widths, steps, dtype), 1.3 * widths[0] ** -0.5
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    fast = ttt_attention(*inputs[:3], inputs[3:], DOCUMENTS, scale, reach)
    slow = dense_attention(*exact[:3], exact[3:], DOCUMENTS, scale, reach)
    weights = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(fast.double(), slow, atol=tolerance, rtol=tolerance)
    found = torch.autograd.grad((fast * weights.to(dtype)).sum(), inputs)
    expected = torch.autograd.grad((slow * weights).sum(), exact)
    for gradient, reference in zip(found, expected, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference, atol=tolerance, rtol=tolerance)


def test_memory_holds_the_first_keys_and_each_rows_own() -> None:
    query, key, value, *own = random_inputs(4, 2, (16, 12), 2, torch.float64)
    memory = LayerMemory(0.25, None)
    memory.attend(query, key, value, DOCUMENTS)
    memory.attend(query, own[0], own[1], DOCUMENTS)
    output = memory.attend(query, own[2], own[3], DOCUMENTS)
    torch.testing.assert_close(output, dense_attention(query, key, value, own, DOCUMENTS, 0.25, None))


def test_a_window_ends_a_token_later_at_each_step() -> None:
    """At step k a row stands k positions further, so of its window k fewer tokens are of step 0."""
    query, key, value, *own = random_inputs(4, 2, (16, 12), 2, torch.float64)
    memory = LayerMemory(0.25, 5)
    for step, (new_key, new_value) in enumerate(zip([key, *own[::2]], [value, *own[1::2]], strict=True)):
        output = memory.attend(query, new_key, new_value, DOCUMENTS)
        expected = dense_attention(query, key, value, own[: 2 * step], DOCUMENTS, 0.25, 5 - step)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float32, CpuFlashBackend), (torch.bfloat16, CpuFlashBackend), (torch.half, PlainBackend)],
)
def test_backend_follows_the_dtype(dtype: torch.dtype, backend: type[attention.Backend]) -> None:
    rows = torch.zeros(1, 1, 8, dtype=dtype)
    assert isinstance(attention.choose_backend(rows, rows), backend)
