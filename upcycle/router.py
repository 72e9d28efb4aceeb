"""The router of a new MoE layer: an [E, H] matrix."""

import math
from collections.abc import Callable

import torch

from spes_mega.layout import generator
from spes_mega.recipe import UpcycleSection

_NORMAL_STD = 0.02


def router(
    settings: UpcycleSection, name: str, shape: tuple[int, ...], down: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The router's first weights, fp32.

    With zeros all experts tie for every token, so top-k takes the same ones for all (which, depends on its
    implementation) until training moves the router; that changes nothing as long as experts are equal.

    Args:
        name: canonical name; keys the draw.
        shape: [E, H].
        down: reads the dense down projection of the layer.
    """
    if settings.router_init == "zeros":
        return torch.zeros(shape)
    std = _NORMAL_STD if settings.router_init == "normal" else standard_deviation(down())
    return torch.randn(shape, generator=generator(settings.seed, name)) * std


def standard_deviation(matrix: torch.Tensor) -> float:
    """Of all entries; the same to the last bit whatever the number of threads, since sums over rows are exact."""
    count, total, squares = matrix.numel(), [], []
    for row in matrix:
        row64 = row.double()
        total.append(float(row64.sum()))
        squares.append(float(row64.square().sum()))
    mean = math.fsum(total) / count
    return math.sqrt(max(math.fsum(squares) / count - mean * mean, 0.0))
