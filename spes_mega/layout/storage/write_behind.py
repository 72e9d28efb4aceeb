"""Keep the disk busy from the first written byte on, and the page cache small."""

import os
import threading
from collections import deque
from typing import NamedTuple

_SMALL_BYTES = 1 << 20
_KEPT_BYTES = 512 << 20


class _Range(NamedTuple):
    fd: int
    offset: int
    length: int


class WriteBehind:
    """Is told what was written to files that will be synced in the end. Threads may share one.

    Left alone, Linux starts to write when a tenth of the memory is full of unwritten pages, and much is left to the
    final fsync. It also takes ever new memory for pages; on virtual machines, where memory is slow when it is used
    for the first time, copying into pages that were dropped before is several times as fast.
    """

    def __init__(self, *, drop: bool) -> None:
        """`drop`: all but the last 512 MiB are dropped from the page cache once they are on the disk."""
        self._drop = drop
        self._ranges: deque[_Range] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def wrote(self, fd: int, offset: int, count: int) -> None:
        """Starts to write these bytes to the disk, without waiting for it; small ones may wait."""
        if count < _SMALL_BYTES or not hasattr(os, "posix_fadvise"):
            return
        _advise(_Range(fd, offset, count))
        for old in self._outdated(_Range(fd, offset, count)) if self._drop else []:
            _advise(old)

    def _outdated(self, new: _Range) -> list[_Range]:
        old = []
        with self._lock:
            self._ranges.append(new)
            self._bytes += new.length
            while self._bytes > _KEPT_BYTES:
                old.append(self._ranges.popleft())
                self._bytes -= old[-1].length
        return old


def _advise(part: _Range) -> None:
    """Drops pages that are on the disk, and starts to write those that are not."""
    os.posix_fadvise(part.fd, part.offset, part.length, os.POSIX_FADV_DONTNEED)
