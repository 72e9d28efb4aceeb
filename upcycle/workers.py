"""Threads that read, make and write tensors side by side."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

# Jobs that are handed over at a time, for each thread: bounds what they hold.
_JOBS_PER_THREAD = 2


class Workers:
    """A context manager: as many threads as torch uses, each of which runs whole jobs.

    torch itself works with one thread inside a job. Reading, writing, hashing and torch's arithmetic let other
    threads run, so jobs do overlap.
    """

    def __init__(self, done: Callable[[int], None]) -> None:
        """`done` is called from the caller's thread with what a job returned."""
        self._threads = torch.get_num_threads()
        self._done = done
        self._pending: deque[Future[int]] = deque()

    def submit(self, job: Callable[[], int]) -> None:
        """Run `job` soon; waits while too many are not done. Raises what an earlier job raised."""
        while len(self._pending) >= _JOBS_PER_THREAD * self._threads:
            self._finish_one()
        self._pending.append(self._pool.submit(job))

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self._threads, "upcycle", torch.set_num_threads, (1,))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Finish all jobs; after an exception, only those that run. Raises what a job raised."""
        try:
            while kind is None and self._pending:
                self._finish_one()
        finally:
            self._pool.shutdown(cancel_futures=True)
            torch.set_num_threads(self._threads)

    def _finish_one(self) -> None:
        self._done(self._pending.popleft().result())
