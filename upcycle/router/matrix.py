"""The router of a new MoE layer: a matrix with one row for each expert, [E, H]."""

from collections.abc import Callable

import torch

from spes_mega.layout import generator
from spes_mega.recipe import UpcycleSection
from upcycle.methods.statistics import mean_and_std

_NORMAL_STD = 0.02


def router(
    settings: UpcycleSection,
    name: str,
    shape: tuple[int, ...],
    repeats: int,
    down: Callable[[], torch.Tensor],
    centers: torch.Tensor | None,
) -> torch.Tensor:
    """The router's first weights, fp32.

    With zeros all experts tie for every token. torch.topk does not break ties by index: which experts it takes depends
    on its implementation and on the number of experts, but for one shape it takes the same ones for all tokens, until
    training moves the router. That changes nothing as long as experts are equal.

    Args:
        name: canonical name; keys the draw.
        shape: [E, H].
        repeats: this many consecutive rows are equal (the experts of a virtual group).
        down: reads the dense down projection of the layer.
        centers: the layer's rows for router_init kmeans (see `calibration`), [E / repeats, H].
    """
    if settings.router_init == "zeros":
        return torch.zeros(shape)
    if settings.router_init == "kmeans":
        assert centers is not None, "a kmeans router comes with its calibration"
        return centers.repeat_interleave(repeats, dim=0)
    std = _NORMAL_STD if settings.router_init == "normal" else mean_and_std(down())[1]
    rows = torch.randn((shape[0] // repeats, *shape[1:]), generator=generator(settings.seed, name)) * std
    return rows.repeat_interleave(repeats, dim=0)
