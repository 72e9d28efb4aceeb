"""What the hub does when its disk is full: by spes.on_full_disk, it waits until there is room, or the run stops.

When its machine is short of something that passes, such as descriptors or memory, it always waits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from spes_mega.errors import NoSpaceError, SpesError, StoreFullError
from spes_mega.hub.console import Console
from spes_mega.layout.storage.tensor_bytes import NO_SPACE
from spes_mega.wire.errors import FullError, ScarceError, passing

RETRY_S = 3.0
SHORTAGES = StoreFullError, ScarceError
T = TypeVar("T")
Pause = Callable[[float, SpesError], None]
"""Waits for some seconds, for a reason."""


@contextmanager
def noticing_shortage(target: Path) -> Iterator[None]:
    """Raises StoreFullError where there is no room on the disk of `target`, ScarceError at what passes by itself."""
    try:
        yield
    except (OSError, SpesError) as e:
        if scarce := passing(e):
            raise scarce from e
        if isinstance(e, NoSpaceError):
            raise StoreFullError(f"the hub's disk is full: {e}") from e
        if isinstance(e, OSError) and e.errno in NO_SPACE:
            raise StoreFullError(f"the hub's disk is full: {target}: {e.strerror}") from e
        raise


class DiskFull:
    """Waits for room, or says that the run has to stop. Safe to use from several threads."""

    def __init__(self, policy: Literal["wait", "stop"], console: Console) -> None:
        self._policy = policy
        self._console = console
        self._lock = threading.Lock()
        self._again = ""
        self.trouble = ""
        """What there is no room for, for `status`; empty if there was some when it was last needed."""

    def needed(self, action: Callable[[], T], pause: Pause) -> T:
        """Do what the run cannot go on without, again and again with a pause if it raises one of SHORTAGES.

        Raises:
            StoreFullError: spes.on_full_disk is stop.
        """
        while True:
            try:
                result = action()
            except SHORTAGES as e:
                pause(RETRY_S, self.refusal(e))
            else:
                self.found()
                return result

    def refusal(self, error: StoreFullError | ScarceError) -> FullError | ScarceError:
        """What a node is told that can try again. Raises `error` if the disk is full, and spes.on_full_disk is stop."""
        full = isinstance(error, StoreFullError)
        if full and self._policy == "stop":
            raise error
        with self._lock:
            known, self.trouble = self.trouble, str(error)
            self._again = "there is room on the hub's disk again" if full else "what was short has come back"
        if not known:
            until = "until there is room (spes.on_full_disk: wait)" if full else "until that has passed"
            self._console.say("full" if full else "scarce", f"{error}; waiting {until}", reason=str(error))
        return FullError(str(error)) if full else ScarceError(str(error))

    def found(self) -> None:
        """There was room."""
        with self._lock:
            known, self.trouble = self.trouble, ""
        if known:
            self._console.say("room", self._again)
