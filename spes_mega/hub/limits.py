"""How much a caller may have under way at a time, so that none takes the hub from the others."""

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from spes_mega.hub.faults import BusyError

# Of one node at a time: one, and broken ones that gRPC has not noticed yet.
MAX_PUSHES = 4
MAX_DOWNLOADS = 4
MAX_WAITS = 4
CALLS_PER_NODE = MAX_PUSHES + MAX_DOWNLOADS + MAX_WAITS


class Slots:
    """Counts what is under way for each key."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._taken: Counter[Hashable] = Counter()

    @contextmanager
    def take(self, key: Hashable, limit: int) -> Iterator[None]:
        """One slot of `key` while the block runs. Raises BusyError if `limit` are taken."""
        with self._lock:
            if self._taken[key] >= limit:
                raise BusyError(f"{key} has {limit} {self._what} under way")
            self._taken[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[key] -= 1
