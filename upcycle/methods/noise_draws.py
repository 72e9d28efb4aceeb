"""The draws of the noise method: a pure function of (dense matrix, canonical name, settings).

Drawing is most of the work of this method, so nearly all entries get no more than 16 random bits, from SFC64, and one
look-up. The bits say whether the entry is chosen, and if so in which of up to 65 536 equally probable slices of the
normal distribution, between its tails, the noise lies. A slice has one value, its mean, which is about 0.0001 std from
the next where half of the entries are chosen. Noise in the tails, or all noise where few entries are chosen, is
drawn without slices.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from spes_mega.recipe import UpcycleSection

# Entries drawn at a time: few enough to bound memory, and so many that threads seldom wait for each other between the
# steps (Python runs one at a time). Part of the result: another number gives other draws.
_BLOCK = 1 << 21
_CODES = 1 << 16
_TAILS = 2**-12
_FEW = 2**-6


def noisy_rows(dense: torch.Tensor, name: str, settings: UpcycleSection) -> Iterator[tuple[int, torch.Tensor]]:
    """A copy plus N(0, noise_std) on each entry with probability noise_fraction, as (first row, some rows).

    The probability is kept to 1 / 65 536.

    Args:
        dense: the dense matrix, any float dtype.
        name: canonical name of the expert's matrix; keys the draw.

    Yields:
        rows of the dtype of `dense`, in which the noise was drawn, too; valid until the next ones are asked for.
    """
    height, width = dense.shape
    step = min(height, max(1, _BLOCK // width))
    draws = _Draws(step * width, dense.dtype, name, settings)
    for start in range(0, height, step):
        rows = dense[start : start + step]
        yield start, draws.next()[: rows.numel()].view(rows.shape).add_(rows)


def add_noise(dense: torch.Tensor, name: str, settings: UpcycleSection) -> torch.Tensor:
    """All of `noisy_rows`."""
    return torch.cat([rows.clone() for _, rows in noisy_rows(dense, name, settings)])


class _Draws:
    """A stream of blocks of noise, with its buffers."""

    def __init__(self, count: int, dtype: torch.dtype, name: str, settings: UpcycleSection) -> None:
        """Blocks of `count` entries, keyed by (settings.seed, name)."""
        key = hashlib.sha256(f"{settings.seed}/{name}".encode()).digest()
        self._rng = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))
        self._count = count
        self._fraction = settings.noise_fraction
        self._std = settings.noise_std
        self._unsliced = _TAILS if self._fraction > _FEW else self._fraction
        self._share_of_ends = self._unsliced / self._fraction if self._fraction else 0.0
        self._table = (_slices(self._fraction, self._unsliced) * self._std).to(dtype)
        self._index = np.empty(-(-count // 4) * 4, np.int32)
        self._noise = torch.zeros(len(self._index), dtype=dtype)

    def next(self) -> torch.Tensor:
        """The next block, which is valid until the one after it; 0 where an entry is not chosen."""
        if self._unsliced < self._fraction:
            self._index[:] = self._rng.bit_generator.random_raw(len(self._index) // 4).view(np.uint16)
            torch.index_select(self._table, 0, torch.from_numpy(self._index), out=self._noise)
        else:
            self._noise.zero_()
        entries = self._rng.choice(self._count, self._rng.binomial(self._count, self._unsliced), replace=False)
        self._noise[torch.from_numpy(entries)] = self._ends(len(entries)).to(self._noise.dtype)
        return self._noise

    def _ends(self, count: int) -> torch.Tensor:
        """Draws from both ends of the normal distribution, as much of it as is not sliced: fp64."""
        beyond = (1 - self._rng.random(count)) * self._share_of_ends / 2
        values = torch.special.ndtri(torch.from_numpy(beyond))
        return values * torch.from_numpy(self._rng.choice((-self._std, self._std), count))


@lru_cache(maxsize=4)
def _slices(fraction: float, unsliced: float) -> torch.Tensor:
    """For each code the mean of its slice of N(0, 1), 0 for codes that are not chosen: fp32 [65536].

    Of all entries the share `fraction` is chosen, of which `unsliced` lie at the ends of the distribution, beyond the
    slices.
    """
    table = torch.zeros(_CODES, dtype=torch.float64)
    if unsliced < fraction:
        count = round(_CODES * (fraction - unsliced) / (1 - unsliced))
        end = unsliced / fraction / 2
        edges = torch.special.ndtri(torch.linspace(end, 1 - end, count + 1, dtype=torch.float64))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        table[:count] = -density.diff() * count / (1 - 2 * end)
    return table.float()
