"""The draws of the noise method: a pure function of (dense matrix, canonical name, settings).

Drawing is most of the work of this method, so it is done in blocks that fit a core's cache, with few passes over them:
SFC64 gives 32 random bits for each entry, its last 8 bits say whether the entry is chosen, and Box and Muller's
transform, with the same 24 bits of precision that torch.randn has, makes normal numbers of the bits in pairs.
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch

from spes_mega.recipe import UpcycleSection

# Entries drawn at a time. Part of the result: another number gives other draws.
_BLOCK = 1 << 17
_LEVELS = 1 << 8


def noisy_rows(dense: torch.Tensor, name: str, settings: UpcycleSection) -> Iterator[tuple[int, torch.Tensor]]:
    """A copy plus N(0, noise_std) on each entry with probability noise_fraction, as (first row, some rows).

    Args:
        dense: the dense matrix, any float dtype.
        name: canonical name of the expert's matrix; keys the draw.

    Yields:
        fp32 rows, which are valid until the next ones are asked for.
    """
    step = max(1, _BLOCK // dense.shape[1])
    out = torch.empty(min(step, dense.shape[0]), dense.shape[1])
    draws = _Draws(out.numel(), name, settings)
    for start in range(0, dense.shape[0], step):
        source = dense[start : start + step]
        rows = out[: source.shape[0]].copy_(source)
        rows.view(-1).add_(draws.next()[: rows.numel()])
        yield start, rows


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
        self._level, self._rest = divmod(settings.noise_fraction * _LEVELS, 1)
        self._pairs = -(-count // 2)
        self._noise = torch.empty(2 * self._pairs)
        self._radius = torch.empty(self._pairs)

    def next(self) -> torch.Tensor:
        """The next block, which is valid until the one after it: fp32, 0 where an entry is not chosen."""
        words = self._rng.bit_generator.random_raw(self._pairs)
        bits = torch.from_numpy(words.view(np.int32))
        self._transform(bits)
        if self._level < _LEVELS:
            self._noise.view(torch.int32).bitwise_and_(self._chosen(bits))
        return self._noise

    def _transform(self, bits: torch.Tensor) -> None:
        """Box and Muller: radius * (cos angle, sin angle), from one half of `bits` each.

        fp32 rounds 32 bits to 24 or more, so the last 8, which decide about `_chosen`, only move the grid of values.
        """
        first, second = self._noise.copy_(bits).chunk(2)
        torch.add(_HALF, first, alpha=2**-32, out=self._radius)
        self._radius.log_().mul_(-2 * self._std**2).sqrt_()
        angle = second.mul_(2 * math.pi / 2**32)
        torch.cos(angle, out=first)
        angle.sin_()
        first.mul_(self._radius)
        second.mul_(self._radius)

    def _chosen(self, bits: torch.Tensor) -> torch.Tensor:
        """All ones for a chosen entry, else 0: int32, in place of `bits`.

        Where noise_fraction is no multiple of 1/256, entries on the edge are decided by a draw of their own.
        """
        last = bits.bitwise_and_(_LEVELS - 1)
        edge = (last == self._level).nonzero()[:, 0] if self._rest else None
        chosen = last.sub_(int(self._level)).bitwise_right_shift_(31)
        if edge is not None:
            chosen[edge] = -torch.from_numpy((self._rng.random(len(edge)) < self._rest).astype(np.int32))
        return chosen


_HALF = torch.tensor(0.5 + 2**-24)
"""Added to a number in [-0.5, 0.5) so that it lies in (0, 1]; its logarithm is finite."""
