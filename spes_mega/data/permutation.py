"""A pseudo-random order of n things in constant memory: a Feistel network with cycle walking.

Any position can be asked for on its own, so that data order needs no state and no shuffled list.
"""

import hashlib

ROUNDS = 6
MASK = (1 << 64) - 1


class Permutation:
    """A bijection of 0..size-1, the same for the same `key`."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self.half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self.round_keys = [int.from_bytes(digest[8 * i : 8 * i + 8]) for i in range(ROUNDS)]

    def __getitem__(self, position: int) -> int:
        """Element at `position`. Raises IndexError outside 0..size-1."""
        if not 0 <= position < self.size:
            raise IndexError(position)
        # The network permutes a power of four that is at most 4 x size; walk on until inside.
        value = self._permute(position)
        while value >= self.size:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = value >> self.half_bits, value & mask
        for key in self.round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << self.half_bits | right


def _mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit changes every output bit with probability one half."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
