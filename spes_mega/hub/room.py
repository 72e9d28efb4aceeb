"""What the hub does when its disk is full: by spes.on_full_disk, it waits until there is room, or the run stops."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from spes_mega.errors import NoSpaceError, StoreError, StoreFullError
from spes_mega.hub.console import Console
from spes_mega.hub.faults import FullError
from spes_mega.layout.tensor_bytes import NO_SPACE

RETRY_S = 3.0
T = TypeVar("T")
Pause = Callable[[float, StoreError], None]
"""Waits for some seconds, for a reason."""


@contextmanager
def noticing_full(target: Path) -> Iterator[None]:
    """Raises StoreFullError where there is no room on the disk of `target`."""
    try:
        yield
    except NoSpaceError as e:
        raise StoreFullError(f"the hub's disk is full: {e}") from e
    except OSError as e:
        if e.errno not in NO_SPACE:
            raise
        raise StoreFullError(f"the hub's disk is full: {target}: {e.strerror}") from e


class Room:
    """Waits for room, or says that the run has to stop. Safe to use from several threads."""

    def __init__(self, policy: Literal["wait", "stop"], console: Console) -> None:
        self._policy = policy
        self._console = console
        self._lock = threading.Lock()
        self.trouble = ""
        """What there is no room for, for `status`; empty if there was some when it was last needed."""

    def needed(self, action: Callable[[], T], pause: Pause) -> T:
        """Do what the run cannot go on without, again and again with a pause if it raises StoreFullError.

        Raises:
            StoreFullError: spes.on_full_disk is stop.
        """
        while True:
            try:
                result = action()
            except StoreFullError as e:
                pause(RETRY_S, self.refusal(e))
            else:
                self.found()
                return result

    def refusal(self, error: StoreFullError) -> FullError:
        """What a node is told that can try again. Raises `error` if spes.on_full_disk is stop."""
        if self._policy == "stop":
            raise error
        with self._lock:
            known, self.trouble = self.trouble, str(error)
        if not known:
            text = f"{error}; waiting until there is room (spes.on_full_disk: wait)"
            self._console.say("full", text, reason=str(error))
        return FullError(str(error))

    def found(self) -> None:
        """There was room."""
        with self._lock:
            known, self.trouble = self.trouble, ""
        if known:
            self._console.say("room", "there is room on the hub's disk again")
