"""Copies with noise: the setup of SPES's 9B model (arXiv 2602.11543)."""

from collections.abc import Iterator

import torch

from spes_mega.layout import ExpertKey, expert_name
from spes_mega.recipe import UpcycleSection
from upcycle.methods.method import Method, Shared
from upcycle.methods.noise_draws import add_noise, noisy_rows


class Noise(Method):
    """Each expert is the dense FFN plus N(0, noise_std) on a random fraction of its entries (arXiv 2602.11543).

    Not exact, unless there is no noise.
    """

    def changes_experts(self, settings: UpcycleSection) -> str | None:
        if settings.noise_std == 0 or settings.noise_fraction == 0:
            return None
        return f"noise of std {settings.noise_std:g} on {settings.noise_fraction:.0%} of the entries of each expert"

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        return add_noise(dense, expert_name(*key), settings)

    def make_rows(
        self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared
    ) -> Iterator[tuple[int, torch.Tensor]]:
        return noisy_rows(dense, expert_name(*key), settings)
