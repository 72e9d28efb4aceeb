"""Handlers of signals that leave alone what whoever started this process wants ignored."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def handle(signums: Iterable[int], handler: Handler) -> None:
    """Install the handler for those of the signals that are not ignored.

    `nohup` starts a process with SIGHUP ignored, and a shell's script its background jobs with SIGINT ignored: they
    are to go on.
    """
    for signum in signums:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


@contextmanager
def handling(signum: int, handler: Handler) -> Iterator[None]:
    """As `handle`, for the time of the block."""
    previous = signal.getsignal(signum)
    handle([signum], handler)
    try:
        yield
    finally:
        signal.signal(signum, previous)
