"""Files that weights wait in, one after the other: new pages of a file cost several times as much as used ones."""

import tempfile
from pathlib import Path
from typing import BinaryIO, cast


class Spools:
    """Unnamed files in one directory. What was given back is taken again, with its old content.

    Each use has a place of its own, so that a file keeps its length, and with it its pages, from one round to the next.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._free: dict[str, list[BinaryIO]] = {}
        self._closed = False

    def take(self, use: str) -> BinaryIO:
        """A file that is to be filled from its start, and cut to its new length."""
        if free := self._free.get(use):
            return free.pop()
        return cast(BinaryIO, tempfile.TemporaryFile(dir=self._directory, prefix="spes-mega-", buffering=0))

    def give_back(self, use: str, spool: BinaryIO) -> None:
        if self._closed:
            spool.close()
        elif not spool.closed:
            self._free.setdefault(use, []).append(spool)

    def close(self) -> None:
        """Free the files, those that are in use when they are given back."""
        self._closed = True
        for free in self._free.values():
            while free:
                free.pop().close()
