"""Ctrl-C and SIGTERM: a node finishes what it is in the middle of, says goodbye, and ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """The node was asked to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__("stopped on request")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """As shells report it: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signum


class StopRequest:
    """Remembers the first stop signal. By default it waits to be asked; within `interruptible` it raises at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._raise_at_once = False

    def install(self) -> None:
        """Take over SIGINT and SIGTERM of this process."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._received)

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.signum is not None:
            raise Stopped(self.signum)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """For waiting on others: a signal raises Stopped wherever the code is."""
        with self._set(True):
            self.check()
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """For what ranks must do together, inside `interruptible`: a signal waits until the end of the block."""
        with self._set(False):
            yield
        if self._raise_at_once:
            self.check()

    @contextmanager
    def _set(self, raise_at_once: bool) -> Iterator[None]:
        before, self._raise_at_once = self._raise_at_once, raise_at_once
        try:
            yield
        finally:
            self._raise_at_once = before

    def _received(self, signum: int, frame: FrameType | None) -> None:
        # Launchers send a second signal after the first; only the first counts.
        if self.signum is None:
            self.signum = signum
            if self._raise_at_once:
                raise Stopped(signum)
