"""Start the project's own commands as separate processes, show their output, and stop them together."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from spes_mega.errors import SpesError

TAIL_LINES = 25


class Command:
    """One `spes-mega …` process; its output goes to a log file and, with a label before each line, to `show`."""

    def __init__(self, label: str, arguments: Sequence[str], log: Path, show: Callable[[str], None], threads: int):
        self.label, self.log, self._show = label, log, show
        show(f"$ spes-mega {' '.join(arguments)}")
        # two processes on two cores are fastest when each keeps to its own
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "spes_mega.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=env,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w", encoding="utf-8") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                self.lines.append(line.rstrip())
                text = line.rstrip().removeprefix(f"{self.label}: ")
                self._show(f"{self.label:>9} | {text}")

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.poll()

    def wait_for_line(self, pattern: str, deadline_s: float) -> re.Match[str]:
        """The first line of output that matches; SpesError if the process ends or the time is up before."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if self.code is not None:
                raise self.failure()
            time.sleep(0.05)
        raise SpesError(f"{self.label}: no line like {pattern!r} within {deadline_s:g} s; see {self.log}")

    def failure(self) -> SpesError:
        """What to tell the user when this process went wrong."""
        self._reader.join(timeout=5)
        tail = "\n".join(self.lines[-TAIL_LINES:])
        return SpesError(f"{self.label} ended with exit code {self.code}; its last lines ({self.log}):\n{tail}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not end by itself."""
        if self.code is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(timeout=5)


class Together:
    """Processes that stand and fall together: on leaving, whatever still runs is stopped."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for command in reversed(self.commands):
            command.stop()

    def add(self, command: Command) -> Command:
        self.commands.append(command)
        return command

    def wait(self) -> None:
        """Until all have ended well; SpesError as soon as one has not."""
        while True:
            codes = [c.code for c in self.commands]
            for command, code in zip(self.commands, codes, strict=True):
                if code:
                    raise command.failure()
            if all(code == 0 for code in codes):
                return
            time.sleep(0.1)
