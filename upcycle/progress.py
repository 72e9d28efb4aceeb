"""Progress of long work on stderr: a bar on a terminal, elsewhere one plain line for each tenth."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

Advance = Callable[[int], None]


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
        yield _plain_lines(what, total)


def _plain_lines(what: str, total: int) -> Advance:
    done, tenths = 0, 0

    def advance(count: int) -> None:
        nonlocal done, tenths
        done += count
        if done * 10 // max(total, 1) > tenths:
            tenths = done * 10 // max(total, 1)
            print(f"{what}: {tenths * 10} % of {total:,} bytes", file=sys.stderr, flush=True)

    return advance
