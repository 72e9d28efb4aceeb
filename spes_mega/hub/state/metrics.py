"""STATE/metrics.jsonl: one line a round, for plots and dashboards. The ledger stays the record that counts."""

import errno
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from spes_mega.hub.state.ledger import RoundRecord
from spes_mega.outer.merging import Similarity


class Metrics:
    """Appends to the file. A hub that was killed between a commit and its line makes up for it from the ledger, and one
    that was set back drops the lines of rounds that are closed anew."""

    def __init__(self, path: Path, rounds: Collection[RoundRecord]) -> None:
        """`rounds` are the last ones that are committed. Raises OSError if the file cannot be written."""
        self._path = path
        last = self._drop_after(max((record.round for record in rounds), default=0))
        for record in rounds:
            if record.round > last:
                self.append(record, {})

    def _drop_after(self, newest: int) -> int:
        """Leave out the lines of later rounds than `newest`, and one that a crash has left unfinished.

        Returns the last round that stays, 0 if none does.
        """
        if not self._path.exists():
            return 0
        text = self._path.read_bytes()
        lines = [line for line in text.splitlines(keepends=True) if line.endswith(b"\n") and _round(line) <= newest]
        if (kept := b"".join(lines)) != text:
            partial = self._path.with_name(f".{self._path.name}.partial")
            with partial.open("wb") as file:
                file.write(kept)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(self._path)
        return max(map(_round, lines), default=0)

    def append(self, record: RoundRecord, similarity: Mapping[int, Similarity]) -> None:
        """The round's figures; with a merge, how alike the experts of each layer were before it."""
        layers = {str(layer): values._asdict() for layer, values in similarity.items()}
        line = asdict(record) | ({"layers": layers} if layers else {})
        data = json.dumps(line).encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            if file.write(data) < len(data):  # what is half there would spoil the next line
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _round(line: bytes) -> int:
    """The round of a line; 0 if somebody else has written it."""
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0
