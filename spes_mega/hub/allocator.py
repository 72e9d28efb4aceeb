"""Keeps the hub's memory small and warm.

glibc takes blocks of some MiB, such as a chunk of weights, fresh from the system and gives them back at once, and new
pages cost several times as much as copying into them; or it keeps them, in one arena a thread, and then resident memory
grows with the number of transfers. One arena that keeps what it once had does neither.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_KEPT_BYTES = 32 << 20  # the most that glibc allows
_KEPT_BYTES = 256 << 20


def reuse_blocks() -> None:
    """From now on, blocks of up to 32 MiB come from one arena and stay there when they are freed (glibc only)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
