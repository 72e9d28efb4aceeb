"""STATE/metrics.jsonl: one line a round, for plots and dashboards. The ledger stays the record that counts."""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from spes_mega.hub.ledger import RoundRecord
from spes_mega.outer.merging import Similarity


class Metrics:
    """Appends to the file. A hub that was killed between a commit and its line makes up for it from the ledger."""

    def __init__(self, path: Path, rounds: Iterable[RoundRecord]) -> None:
        """Raises OSError if the file cannot be written."""
        self._path = path
        last = self._last_round()
        for record in rounds:
            if record.round > last:
                self.append(record, {})

    def _last_round(self) -> int:
        """Cuts off a line that a crash has left unfinished."""
        if not self._path.exists():
            return 0
        text = self._path.read_bytes()
        end = text.rfind(b"\n") + 1
        if end < len(text):
            with self._path.open("r+b") as file:
                file.truncate(end)
        lines = text[:end].splitlines()
        try:
            return int(json.loads(lines[-1])["round"]) if lines else 0
        except (ValueError, KeyError, TypeError):
            return 0  # somebody has written to it; what the ledger remembers comes again

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
