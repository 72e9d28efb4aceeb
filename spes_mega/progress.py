"""Progress of long work on stderr: a bar on a terminal, elsewhere one plain line for each tenth."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from spes_mega.signals import handling

Advance = Callable[[int], None]
QUIET_S = 3
"""What takes no longer than this needs no lines of progress."""


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Advance]:
    """Gives a function to call with the number of bytes that were just done."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        yield _plain_lines(what, total, "bytes")


@contextmanager
def count_progress(what: str, total: int, unit: str) -> Iterator[Advance]:
    """Give a function to call with how many (of `unit`, as in "layers") were just done."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count: bar.advance(task, count)
    else:
        yield _plain_lines(what, total, unit)


def _plain_lines(what: str, total: int, unit: str) -> Advance:
    done, tenths = 0, 0
    begin = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, tenths
        done += count
        if done * 10 // max(total, 1) > tenths:
            tenths = done * 10 // max(total, 1)
            if time.monotonic() - begin < QUIET_S:
                return
            print(f"{what}: {tenths * 10} % of {total:,} {unit}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does, so that the temporary directory is removed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handling(signal.SIGTERM, interrupt):
        yield
