"""The draws of the noise method: a pure function of (dense matrix, canonical name, settings)."""

import torch

from spes_mega.layout import generator
from spes_mega.recipe import UpcycleSection

# Entries drawn at a time: bounds memory. Part of the result: another number gives other draws.
_CHUNK = 1 << 22
_LEVELS = 1 << 16


def add_noise(dense: torch.Tensor, name: str, settings: UpcycleSection) -> torch.Tensor:
    """A copy plus N(0, noise_std) on each entry with probability noise_fraction.

    Args:
        dense: the dense matrix, any float dtype.
        name: canonical name of the expert's matrix; keys the draw.

    Returns:
        An fp32 matrix of the same shape.
    """
    out = dense.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    rng = generator(settings.seed, name)
    for part in out.view(-1).split(_CHUNK):
        drawn = torch.randn(part.numel(), generator=rng).mul_(settings.noise_std)
        part.add_(drawn.mul_(_chosen(part.numel(), settings.noise_fraction, rng)))
    return out


def _chosen(count: int, fraction: float, rng: torch.Generator) -> torch.Tensor:
    """A random boolean mask; 16 random bits for an entry, four entries from one 64-bit draw."""
    level = round(fraction * _LEVELS)
    if level == _LEVELS:
        return torch.ones(count, dtype=torch.bool)
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=rng)
    return words.view(torch.int16)[:count] < level - _LEVELS // 2
