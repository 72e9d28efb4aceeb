"""How a node has ended, from what its ranks said and what became of their processes."""

import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from spes_mega.crash_report import fault_text
from spes_mega.node.stop import STOP_GRACE_S

SAME_MOMENT_S = 10.0
"""A rank that dies takes the others with it, and it is chance whose error is noticed first."""

_REQUESTED = (signal.SIGINT, signal.SIGTERM)
_OUT_OF_MEMORY = ": the kernel does that when memory runs out (see dmesg, or the memory limit of the job)"


@dataclass
class RankEnd:
    """How one rank ended. Times are those of the reports' arrival."""

    rank: int
    at: float = 0.0
    """When it was first known to end; 0: it is not."""
    code: int | None = None
    """Its exit code in its own words; None: it said nothing."""
    message: str = ""
    trace: str = ""
    """The traceback of a fault that nobody foresaw."""
    shown: bool = False
    """The rank has printed its message itself."""
    status: int | None = None
    """How its process ended, as `subprocess` tells it; None: nobody knows."""

    def note(self, report: dict[str, Any], now: float) -> None:
        """Take in what the rank or its monitor reports about its end."""
        for name in ("code", "message", "trace", "shown", "status"):
            if name in report:
                setattr(self, name, report[name])
                self.at = self.at or now

    @property
    def silent(self) -> bool:
        """It ended without a word, and not because it was asked to."""
        return self.code is None and self.status not in (-signal.SIGINT, -signal.SIGTERM)

    @property
    def stopped(self) -> bool:
        """It ended because it was asked to."""
        return not self.silent and (self.code is None or self.code in (128 + signum for signum in _REQUESTED))

    def describe(self) -> str:
        """One line on an end without a word, or the rank's own."""
        if self.message:
            return self.message
        if self.status is None:
            return f"rank {self.rank} is gone, and so is the process that watched it"
        if self.status >= 0:
            return f"rank {self.rank} ended with exit code {self.status} and did not say why"
        name = signal.Signals(-self.status).name
        hint = _OUT_OF_MEMORY if -self.status == signal.SIGKILL else ""
        return f"rank {self.rank} was killed by signal {-self.status} ({name}){hint}"

    @property
    def exit_code(self) -> int:
        """For the node, if this end is what ended it; never 0."""
        if self.code is not None:
            return self.code or 1
        if self.status is None:
            return 128 + signal.SIGKILL
        return 128 - self.status if self.status < 0 else self.status or 1


@dataclass
class NodeEnd:
    """All that is known of how a node ended."""

    ranks: Collection[RankEnd]
    expected: int | None
    """Number of ranks on this machine, if any of them was started."""
    launcher_status: int
    """How DeepSpeed's launcher ended, as `subprocess` tells it. It says nothing about success."""
    stopped_by: int | None = None
    """The signal that asked the node to stop."""
    stopped_at: float = 0.0

    def verdict(self) -> tuple[int, list[str]]:
        """The exit code of the node, and the lines that say why; none if that has been said."""
        if self.expected == len(self.ranks) and all(one.code == 0 for one in self.ranks):
            return 0, []
        if (cause := self._cause()) is not None:
            return cause.exit_code, list(self._lines(cause))
        if self.stopped_by is not None:
            late = sorted(one.rank for one in self.ranks if one.silent)[:1]
            text = "error: rank {} did not end within {:g} s and was killed; its last checkpoint counts"
            return 128 + self.stopped_by, [text.format(rank, STOP_GRACE_S) for rank in late]
        return self._launcher_end()

    def _cause(self) -> RankEnd | None:
        """The rank that ended the node, if one did."""
        ends = sorted((one for one in self.ranks if one.code != 0), key=lambda one: one.at)
        if not ends:
            return None
        limit = ends[0].at + SAME_MOMENT_S
        if self.stopped_by is not None:
            limit = self.stopped_at + STOP_GRACE_S - SAME_MOMENT_S
        silent = [one for one in ends if one.silent and one.at <= limit]
        errors = [one for one in ends if one.code is not None and not one.stopped]
        said = [one for one in errors if not one.trace]
        return next(iter([*silent, *said, *errors]), None)

    def _lines(self, cause: RankEnd) -> Iterator[str]:
        said = any(one.shown and one.message == cause.message for one in self.ranks)
        if not (said and cause.message):
            text = cause.describe()
            yield f"error: {fault_text(text, cause.trace) if cause.trace else text}"

    def _launcher_end(self) -> tuple[int, list[str]]:
        """Nobody asked the node to stop, and no rank failed."""
        stopped = [one for one in self.ranks if one.stopped]
        status = self.launcher_status
        saved = ", and its ranks have stopped" if stopped else " before it had started the ranks"
        if status < 0:
            name = signal.Signals(-status).name
            return 128 - status, [f"error: DeepSpeed's runner was killed by signal {-status} ({name}){saved}"]
        if lost := [one.rank for one in stopped if one.status is None]:
            return 128 + signal.SIGKILL, [f"error: the monitor of rank {lost[0]} was killed{saved}"]
        if status > 0 and stopped:  # somebody else has asked the ranks
            return stopped[0].code or 128 + signal.SIGTERM, []
        if status > 0:
            return status, [f"error: DeepSpeed's launcher ended with exit code {status}{saved}"]
        return 128 + signal.SIGKILL, [f"error: DeepSpeed's launcher was killed{saved}"]
