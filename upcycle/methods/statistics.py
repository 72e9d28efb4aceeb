"""Statistics of a matrix that are the same to the last bit whatever the number of threads."""

import math

import torch

_ROWS = 256


def mean_and_std(matrix: torch.Tensor) -> tuple[float, float]:
    """Of all entries. Each row is summed in fp64 by one thread, and the sums of rows are added exactly."""
    totals: list[float] = []
    squares: list[float] = []
    for rows in matrix.split(_ROWS):
        rows64 = rows.double()
        totals += rows64.sum(dim=1).tolist()
        squares += rows64.square().sum(dim=1).tolist()
    count = matrix.numel()
    mean = math.fsum(totals) / count
    return mean, math.sqrt(max(math.fsum(squares) / count - mean * mean, 0.0))
