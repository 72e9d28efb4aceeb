"""The draws of the noise method: a pure function of (dense matrix, canonical name, settings).

Drawing is most of the work of this method, so an entry gets no more than 16 random bits, from SFC64, and one look-up:
they say whether the entry is chosen, and if so in which of up to 65 536 equally probable slices of the normal
distribution its noise lies. The middle slices have one value each, their mean (about 0.0001 std from the next where
half of the entries are chosen, much less than bf16 resolves); in the tails the noise is drawn exactly.
"""

import hashlib
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from spes_mega.recipe import UpcycleSection

# Entries drawn at a time, so that all fits a core's cache. Part of the result: another number gives other draws.
_BLOCK = 1 << 17
_CODES = 1 << 16
# So many codes of both tails together, and all codes where those of chosen entries are few, get exact draws.
_TAIL_CODES = 16
_FEW_CODES = 1 << 10


def noisy_rows(dense: torch.Tensor, name: str, settings: UpcycleSection) -> Iterator[tuple[int, torch.Tensor]]:
    """A copy plus N(0, noise_std) on each entry with probability noise_fraction, as (first row, some rows).

    The probability is rounded to a multiple of 1 / 65 536.

    Args:
        dense: the dense matrix, any float dtype.
        name: canonical name of the expert's matrix; keys the draw.

    Yields:
        fp32 rows, which are valid until the next ones are asked for.
    """
    height, width = dense.shape
    step = min(height, max(1, _BLOCK // width))
    draws = _Draws(step * width, name, settings)
    for start in range(0, height, step):
        rows = dense[start : start + step]
        yield start, draws.next()[: rows.numel()].view(rows.shape).add_(rows)


def add_noise(dense: torch.Tensor, name: str, settings: UpcycleSection) -> torch.Tensor:
    """All of `noisy_rows`: an fp32 matrix."""
    return torch.cat([rows.clone() for _, rows in noisy_rows(dense, name, settings)])


class _Draws:
    """A stream of blocks of noise, with its buffers."""

    def __init__(self, count: int, name: str, settings: UpcycleSection) -> None:
        """Blocks of `count` entries, keyed by (settings.seed, name)."""
        key = hashlib.sha256(f"{settings.seed}/{name}".encode()).digest()
        self._rng = np.random.Generator(np.random.SFC64(int.from_bytes(key[:16], "little")))
        self._std = settings.noise_std
        self._chosen = round(settings.noise_fraction * _CODES)
        self._exact = self._chosen if self._chosen < _FEW_CODES else _TAIL_CODES
        self._table = _slices(self._chosen, self._exact) * self._std
        self._words = -(-count // 4)
        self._index = np.empty(4 * self._words, np.int32)
        self._noise = torch.empty(4 * self._words)

    def next(self) -> torch.Tensor:
        """The next block, which is valid until the one after it: fp32, 0 where an entry is not chosen."""
        codes = self._rng.bit_generator.random_raw(self._words).view(np.uint16)
        self._index[:] = codes
        torch.index_select(self._table, 0, torch.from_numpy(self._index), out=self._noise)
        exact = np.flatnonzero(codes < self._exact)
        self._noise.numpy()[exact] = self._tails(codes[exact])
        return self._noise

    def _tails(self, codes: np.ndarray) -> np.ndarray:
        """Draws from the two ends of the normal distribution that `_slices` leaves out; odd codes are positive."""
        beyond = (1 - self._rng.random(len(codes))) * (self._exact / max(self._chosen, 1) / 2)
        size = torch.special.ndtri(torch.from_numpy(beyond)).numpy() * self._std
        return np.where(codes % 2, -size, size)


@lru_cache(maxsize=4)
def _slices(chosen: int, exact: int) -> torch.Tensor:
    """For each code the mean of its slice of N(0, 1), fp32 [65536].

    Codes below `exact` stand for the tails, half of their probability at either end, and have no value here; codes
    from there up to `chosen` for slices of equal probability between the tails; the rest for 0.
    """
    table = torch.zeros(_CODES, dtype=torch.float64)
    if exact < chosen:
        edges = torch.special.ndtri((torch.arange(chosen - exact + 1, dtype=torch.float64) + exact / 2) / chosen)
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        table[exact:chosen] = -density.diff() * chosen
    return table.float()
