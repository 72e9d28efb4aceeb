"""Drop-upcycling (Nakamura et al., 2025, arXiv 2502.19261)."""

import torch

from spes_mega.layout import EXPERT_MATRICES, ExpertKey, dense_name, expert_name, generator
from spes_mega.recipe import UpcycleSection
from upcycle.methods.method import Method, Read, Shared
from upcycle.methods.statistics import mean_and_std


class Drop(Method):
    """Each expert is the dense FFN of which a random drop_ratio of the units was forgotten (arXiv 2502.19261).

    A forgotten unit's row of gate_proj, row of up_proj and column of down_proj are drawn anew from a normal
    distribution with the mean and standard deviation of the whole matrix. Units are chosen for each expert of each
    layer on its own. Not exact, unless nothing is dropped.
    """

    def changes_experts(self, settings: UpcycleSection) -> str | None:
        if settings.drop_ratio == 0:
            return None
        return f"{settings.drop_ratio:.0%} of the units of each expert were drawn anew"

    def prepare(self, layer: int, read: Read, settings: UpcycleSection) -> Shared:
        """Mean and std of the layer's three matrices: fp64 [2] each."""
        return {m: torch.tensor(mean_and_std(read(dense_name(layer, m))), dtype=torch.float64) for m in EXPERT_MATRICES}

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        axis = 1 if key.matrix == "down_proj" else 0
        units = dropped_units(key, dense.shape[axis], settings)
        mean, std = shared[key.matrix].tolist()
        shape = [dense.shape[0], len(units)] if axis else [len(units), dense.shape[1]]
        drawn = torch.randn(shape, generator=generator(settings.seed, expert_name(*key))).mul_(std).add_(mean)
        return dense.float().index_copy(axis, units, drawn)


def dropped_units(key: ExpertKey, width: int, settings: UpcycleSection) -> torch.Tensor:
    """The units that an expert forgets, int64 in rising order: the same for its three matrices."""
    rng = generator(settings.seed, f"drop/{key.layer}/{key.expert}")
    return torch.randperm(width, generator=rng)[: round(settings.drop_ratio * width)].sort().values
