"""fp8 states: how exact they are, and what never happens to them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.fp8 import LARGEST, decode, encode

ROWS, LAYERS, HIDDEN = 5, 3, 64


def states(seed: int, spread: float, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows as a residual stream has them: most values of one size, a few far larger. [T, L, H]."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, LAYERS, HIDDEN, generator=generator)
    return (values.sign() * values.abs().pow(spread) * scale).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.sampled_from([1.0, 3.0, 6.0]),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e20]),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_the_error_is_that_of_four_bits_and_of_the_row(
    seed: int, spread: float, scale: float, dtype: torch.dtype
) -> None:
    given = states(seed, spread, scale, dtype)
    values, scales = encode(given)
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))  # powers of two
    decoded = decode(values, scales)
    exact = given.double()
    largest = exact.abs().amax(-1, keepdim=True)
    assert ((decoded.double() - exact).abs() <= torch.maximum(exact.abs() / 16, largest / LARGEST * 2**-9)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1.0, 6.0]))
def test_encoding_again_changes_nothing(seed: int, spread: float) -> None:
    once = decode(*encode(states(seed, spread, 1.0, torch.bfloat16)))
    assert torch.equal(decode(*encode(once)), once)


def test_the_largest_value_fits_whatever_its_size() -> None:
    for value in (LARGEST, 447.9, 448.1, 224.0, 2.0**-126, 3e38, 65504.0):
        given = torch.full((1, 1, HIDDEN), value)
        assert torch.allclose(decode(*encode(given)).float(), given, rtol=1 / 16), value


def test_what_is_not_finite_stays_so_and_spoils_no_other_value_of_the_rows_beside() -> None:
    given = states(0, 1.0, 1.0, torch.float32)
    given[1, 0, 3], given[2, 2, 4], given[3, 1] = torch.nan, torch.inf, 0.0
    decoded = decode(*encode(given))
    assert decoded[1, 0, 3].isnan() and not decoded[2, 2, 4].isfinite()
    assert (decoded[3, 1] == 0).all()
    untouched = torch.ones(ROWS, LAYERS, dtype=torch.bool)
    untouched[1, 0] = untouched[2, 2] = False
    assert decoded[untouched].isfinite().all()


def test_more_rows_than_a_chunk() -> None:
    given = torch.randn(2500, 1, 8, generator=torch.Generator().manual_seed(0))
    whole, parts = decode(*encode(given)), [decode(*encode(part)) for part in given.split(700)]
    assert torch.equal(whole, torch.cat(parts))
