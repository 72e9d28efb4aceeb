"""The ranks of a node on machines that this one cannot see into: what they say comes in the output of pdsh or srun."""

import json
import secrets
import subprocess
import time
from types import FrameType

import click
import psutil  # type: ignore[import-untyped]

from spes_mega.node.launch.verdict import NodeEnd, RankEnd


class RemoteProcesses:
    """DeepSpeed's runner with pdsh or srun below it. Each rank says in a marked line how it ended."""

    def __init__(self, ranks: int, launcher: str) -> None:
        self.mark = f"spes-mega-{secrets.token_hex(16)}"
        """What begins such a line; ranks get it with --mark."""
        self._expected, self._launcher = ranks, launcher
        self._ends: dict[int, RankEnd] = {}
        self._stopped_by: int | None = None
        self._stopped_at = 0.0

    def start(self, arguments: list[str], environment: dict[str, str]) -> None:
        """Start the runner, in a session of its own, so that Ctrl-C reaches it once."""
        self._runner = subprocess.Popen(arguments, env=environment, start_new_session=True, stdout=subprocess.PIPE)

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Ask the ranks to stop: srun passes the signal on; DeepSpeed's runner has a way of its own with pdsh."""
        if self._stopped_by is not None:
            return
        self._stopped_by, self._stopped_at = signum, time.monotonic()
        runner = psutil.Process(self._runner.pid)
        for process in runner.children() if self._launcher == "slurm" else [runner]:
            process.terminate()

    def wait(self) -> tuple[int, list[str]]:
        """Pass output on until its end; returns the node's exit code, and the lines that say why."""
        assert self._runner.stdout is not None
        for line in self._runner.stdout:
            _, marked, report = line.partition(self.mark.encode() + b"{")  # DeepSpeed prints command lines, too
            if marked:
                self._note(b"{" + report)
            else:
                click.echo(line.decode(errors="replace"), nl=False)
        status = self._runner.wait()
        end = NodeEnd(self._ends.values(), self._expected, status, self._stopped_by, self._stopped_at)
        return end.verdict()

    def _note(self, report: bytes) -> None:
        said = json.loads(report)
        self._ends.setdefault(said["rank"], RankEnd(said["rank"])).note(said, time.monotonic())
