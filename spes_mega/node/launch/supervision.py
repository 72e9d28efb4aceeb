"""The processes of a node: started under DeepSpeed's launcher, stopped together, and waited for to the last.

`spes-mega launch` starts DeepSpeed's runner, which starts DeepSpeed's launcher, which starts a monitor for each rank,
and that the rank. Any of them may be killed; the ranks then save and end by themselves (`stop_without_launcher`).
"""

import contextlib
import os
import signal
import subprocess
import time
from types import FrameType
from typing import Any

import psutil  # type: ignore[import-untyped]

from spes_mega.node.launch.reports import Inbox
from spes_mega.node.launch.verdict import NodeEnd, RankEnd
from spes_mega.node.stop import LAUNCHER_VARIABLE, runs

_POLL_S = 0.2


class NodeProcesses:
    """The running processes of a node. They are in a session of their own, so that Ctrl-C reaches them once."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._inbox = Inbox()
        self._ends: dict[int, RankEnd] = {}
        self._expected: int | None = None
        self._known: dict[int, psutil.Process] = {}
        self._stopped_by: int | None = None
        self._stopped_at = 0.0
        self._runner = subprocess.Popen(
            arguments,
            start_new_session=True,
            env=environment | self._inbox.environment | {LAUNCHER_VARIABLE: str(os.getpid())},
            preexec_fn=_leave_signals_to_the_parent,
        )

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Ask the ranks to stop; DeepSpeed's launcher and their monitors give them 30 s."""
        if self._stopped_by is not None:
            return
        self._stopped_by, self._stopped_at = signum, time.monotonic()
        # The runner would die and leave its child behind; the child passes the signal on to the ranks.
        for process in self._below_the_runner() or [*self._known.values()] or [self._runner]:
            _terminate(process)

    def _below_the_runner(self) -> list[psutil.Process]:
        try:
            children: list[psutil.Process] = psutil.Process(self._runner.pid).children()
        except psutil.NoSuchProcess:
            return []
        return children

    def wait(self) -> tuple[int, list[str]]:
        """Until the last process has ended; returns the node's exit code, and the lines that say why."""
        with self._inbox:
            while self._receive(_POLL_S) or self._any_runs():
                pass
        for end in self._ends.values():
            end.at = end.at or time.monotonic()
        node = NodeEnd(
            self._ends.values(),
            self._expected,
            self._runner.returncode,
            self._stopped_by,
            self._stopped_at,
        )
        return node.verdict()

    def _any_runs(self) -> bool:
        return self._runner.poll() is None or any(runs(process) for process in self._known.values())

    def _receive(self, timeout_s: float) -> bool:
        if (report := self._inbox.receive(timeout_s)) is None:
            return False
        self._expected = report.get("ranks", self._expected)
        for pid in report.get("processes", ()):
            self._know(pid)
        self._end(report["rank"]).note(report, time.monotonic())
        return True

    def _know(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._known.setdefault(pid, psutil.Process(pid))

    def _end(self, rank: int) -> RankEnd:
        return self._ends.setdefault(rank, RankEnd(rank))


def _terminate(process: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()


def _leave_signals_to_the_parent() -> None:
    """In the runner, before it begins: what asks the node to stop comes from `spes-mega launch` as SIGTERM."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
