"""Tensors by rows: in slices that bound memory, and without NaN or infinite values."""

import math
from collections.abc import Iterator

import torch

SLICE_BYTES = 1 << 20
"""So small that the few slices of a step of the work stay in a core's cache: several times as fast as from memory."""


def row_slices(
    shape: tuple[int, ...], row_bytes_factor: int = 1, budget: int = SLICE_BYTES
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of equal slices of about `budget` fp32 bytes (at most half more, or one row).

    `row_bytes_factor` says how many such tensors are taken at once, as of all experts. A tensor of one axis is one row.
    """
    count = round(math.prod(shape) * 4 * row_bytes_factor / budget) if len(shape) > 1 else 1
    rows = max(1, math.ceil(shape[0] / max(1, count)))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def is_finite(rows: torch.Tensor) -> bool:
    """Tell whether no value is NaN or infinite, without a copy as large as the tensor."""
    low, high = rows.aminmax()
    return bool(low.isfinite() and high.isfinite())
