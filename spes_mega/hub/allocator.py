"""Keeps the process's memory at what is in use.

glibc raises its threshold for giving memory back as large blocks are freed, and keeps them in one arena a thread
instead; with a thread for each transfer, resident memory then grows with the number of nodes.
"""

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 256 << 10


def return_large_blocks() -> None:
    """From now on, blocks of 256 KiB and more go back to the system when they are freed (glibc only)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
