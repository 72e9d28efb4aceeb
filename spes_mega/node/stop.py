"""Ctrl-C and SIGTERM: a node finishes what it is in the middle of, says goodbye, and ends."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil  # type: ignore[import-untyped]

from spes_mega.signals import handle

LAUNCHER_VARIABLE = "SPES_MEGA_LAUNCHER"
"""The process id of `spes-mega launch`, for the ranks that it starts."""

STOP_GRACE_S = 29.0
"""How long a rank has to end after it was asked to; DeepSpeed's launcher kills it and its monitor after 30 s."""


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
        self._error: BaseException | None = None
        self._raise_at_once = False

    def install(self) -> None:
        """Take over SIGINT and SIGTERM of this process, unless they are ignored."""
        handle((signal.SIGINT, signal.SIGTERM), self._received)

    def check(self) -> None:
        """Raise Stopped if a signal has come; what `abort` was given, if it was called."""
        if self._error is not None:
            raise self._error
        if self.signum is not None:
            raise Stopped(self.signum)

    def abort(self, error: BaseException) -> None:
        """From another thread: raise `error` in the main thread where that is interruptible, or comes to be."""
        self._error = error
        os.kill(os.getpid(), signal.SIGTERM)

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
        if self._error is not None:
            if self._raise_at_once:
                raise self._error
        elif self.signum is None:
            self.signum = signum
            if self._raise_at_once:
                raise Stopped(signum)


def stop_without_launcher(poll_s: float = 1.0) -> None:
    """Send this process SIGTERM as soon as one of the processes that launched it has ended.

    Those are all between it and `spes-mega launch`, or DeepSpeed's launcher where that was used alone. Nobody would
    stop the ranks of a launcher that was killed, and a node that is started again would meet them.
    """
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    ancestors = psutil.Process().parents()
    if launcher is None:
        watched = [process for process in ancestors[:1] if _is_deepspeed(process)]
    else:
        above = [number for number, process in enumerate(ancestors) if str(process.pid) == launcher]
        if not above:  # it was killed while this process was being started
            os.kill(os.getpid(), signal.SIGTERM)
            return
        watched = ancestors[: above[0] + 1]
    if watched:
        threading.Thread(target=_watch, args=(watched, poll_s), name="launcher", daemon=True).start()


def _is_deepspeed(process: psutil.Process) -> bool:
    try:
        return "deepspeed.launcher.launch" in process.cmdline()
    except psutil.Error:
        return False


def _watch(processes: list[psutil.Process], poll_s: float) -> None:
    while all(runs(process) for process in processes):
        time.sleep(poll_s)
    os.kill(os.getpid(), signal.SIGTERM)


def runs(process: psutil.Process) -> bool:
    """Whether the process has not ended; one that nobody has waited for yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
