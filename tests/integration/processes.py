"""Real processes of a run: hubs and nodes, their output, and their ends."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-u"]
COMMAND = [*PYTHON, "-m", "spes_mega.cli"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "DS_ACCELERATOR": "cpu"}


class Process:
    """A command in a session of its own, with its output kept."""

    def __init__(self, arguments, **env):
        self.popen = subprocess.Popen(
            [str(a) for a in arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENV | env,
            start_new_session=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.popen.stdout:
            self.output += line

    def wait(self, timeout=270):
        """Exit code, once the process and all that it wrote are there."""
        code = self.popen.wait(timeout)
        self._reader.join(10)
        return code

    def succeed(self, timeout=270):
        code = self.wait(timeout)
        assert code == 0, f"exit code {code}:\n{self.output}"
        return self

    def wait_for(self, pattern, timeout=180):
        end = time.monotonic() + timeout
        while not (match := re.search(pattern, self.output)):
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.output}"
            assert self.popen.poll() is None or re.search(pattern, self.output), f"ended:\n{self.output}"
            time.sleep(0.05)
        return match

    def family(self):
        """This process and all below it."""
        top = psutil.Process(self.popen.pid)
        return [top, *top.children(recursive=True)]

    def end(self):
        """Whatever is left of it."""
        if self.popen.poll() is None:
            for process in self.family():
                process.send_signal(signal.SIGKILL)
            self.popen.wait()


def launch(recipe, *options, ranks=1, **env):
    """A node under the deepspeed launcher, through `spes-mega launch`."""
    return Process([*COMMAND, "launch", recipe, "--ranks", ranks, *options], **env)


def peak_rss(pid):
    """VmHWM in bytes of a process; 0 if there is none (any more)."""
    try:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # it is just ending
        return 0
    return 1024 * int(found[1]) if found else 0


def peak_of_rank(node):
    """VmHWM in bytes of the process that trains, so far; 0 if there is none (any more)."""
    try:
        for process in psutil.Process(node.popen.pid).children(recursive=True):
            command = process.cmdline()
            if "spes_mega.node.main" in command and any(part.startswith("--local_rank") for part in command):
                return peak_rss(process.pid)
    except psutil.Error:  # it is just ending
        pass
    return 0


class Hub(Process):
    """A hub process that listens."""

    def __init__(self, recipe, state, *options):
        super().__init__([*COMMAND, "hub", recipe, "--state", state, "--listen", "127.0.0.1:0", *options])
        self.state = state
        self.address = self.wait_for(r"listening on (\S+:\d+)")[1]
