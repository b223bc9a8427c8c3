"""Matrix products of ever new heights: the same values, few kernels."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from eagle3.draft.layers import product

HEIGHTS = range(1, 600, 7)
TRAINING = f"""
import torch
from eagle3.draft.layers import product
weight = torch.randn(32, 48, requires_grad=True)
for rows in {list(HEIGHTS)}:
    inputs = torch.randn(rows, 48, dtype=torch.bfloat16, requires_grad=True)
    product(inputs, weight.to(torch.bfloat16)).sum().backward()
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 500, 513])
def test_values_and_gradients_are_those_of_a_linear_map(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    inputs, weight, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, 48), (32, 48), (rows, 32))
    )
    found = []
    for function in (product, functional.linear):
        leaves = [inputs.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = function(*leaves)
        output.backward(grad)
        found.append([output.detach(), *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def test_the_kernels_that_are_compiled_are_few() -> None:
    """oneDNN says so itself: without filling up, every height costs three."""
    environment = os.environ | {"ONEDNN_VERBOSE": "profile_create"}
    done = subprocess.run([sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=True)
    made = [line for line in done.stdout.splitlines() if "create:cache_miss" in line and ",matmul," in line]
    if not made:
        pytest.skip("this machine multiplies bfloat16 without oneDNN")
    assert len(made) < len(HEIGHTS)
