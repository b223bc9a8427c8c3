"""Hidden states in half the bytes: fp8 (e4m3) values with a scale for each row and layer.

A scale is a power of two, so multiplying by it rounds nothing: a value keeps its 4 significant bits (its error is at
most 1/16 of it, for values above 1/14,000 of the largest in the row), decoding into bfloat16 is exact, and encoding
what was decoded gives the same bytes again.

Letters: T rows (tokens), L layers, H hidden size.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
CHUNK_ROWS = 1024  # rows that are in float32 at once


def encode(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [T, L, H] -> values e4m3 [T, L, H] and scales float32 [T, L], on the same device.

    A value that is not finite becomes a NaN, so that the gates still find it.
    """
    values = torch.empty(states.shape, dtype=FP8, device=states.device)
    scales = torch.empty(states.shape[:-1], dtype=torch.float32, device=states.device)
    for start in range(0, len(states), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        exact = states[rows].float()
        largest = exact.abs().amax(-1)
        fits = (largest > 0) & largest.isfinite()
        mantissa, exponent = torch.frexp(torch.where(fits, largest / LARGEST, 1.0))
        exponent -= (mantissa == 0.5).int()  # the least scale under which the largest value fits
        scales[rows] = torch.ldexp(torch.ones_like(largest), exponent.clamp_min(-126))
        values[rows] = torch.where(exact.isfinite(), exact / scales[rows].unsqueeze(-1), torch.nan).to(FP8)
    return values, scales


def decode(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values e4m3 [T, L, H] and scales float32 [T, L] -> states bfloat16 [T, L, H]."""
    return values.to(torch.bfloat16) * scales.to(torch.bfloat16).unsqueeze(-1)
