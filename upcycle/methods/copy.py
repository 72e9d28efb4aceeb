"""Sparse upcycling (Komatsuzaki et al., 2022, arXiv 2212.05055)."""

import torch

from spes_mega.layout import ExpertKey
from spes_mega.recipe import UpcycleSection
from upcycle.methods.method import Method, Shared


class Copy(Method):
    """Each expert is the dense FFN (Komatsuzaki et al., arXiv 2212.05055).

    Exact: whichever experts the router takes, their weights sum to 1 and they all compute the same.
    """

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        return dense
