"""What a run is held against: how fast this disk takes bytes, and how fast these cores draw normal numbers."""

import re
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

_LOOK_EVERY_S = 0.01
_DRAWN_AT_ONCE = 1 << 18


class Run(NamedTuple):
    """`cpu_s` is of all threads, in user and system mode."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    stdout: str


def run_python(*arguments: object) -> Run:
    """Run this Python as a process of its own and watch its memory. Raises SystemExit with its stderr if it fails."""
    started, cpu_before = time.perf_counter(), _cpu_seconds_of_children()
    command = [sys.executable, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peak = _PeakMemory(process)
        stdout, stderr = process.communicate()
        wall = time.perf_counter() - started
        peak.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{stderr}")
    return Run(wall, _cpu_seconds_of_children() - cpu_before, peak.bytes, stdout)


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _PeakMemory(threading.Thread):
    """Reads VmHWM of a process while it lives. (ru_maxrss would not do: a child starts with that of its parent.)"""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._process = process
        self.start()

    def run(self) -> None:
        while self._process.returncode is None:
            try:
                status = Path(f"/proc/{self._process.pid}/status").read_text()
            except OSError:
                return
            if found := re.search(r"VmHWM:\s*(\d+) kB", status):
                self.bytes = max(self.bytes, int(found[1]) * 1024)
            time.sleep(_LOOK_EVERY_S)


def dd_seconds(folder: Path, count: int) -> float:
    """What dd takes to write and sync `count` bytes to a new file in `folder`."""
    file = folder / "dd"
    started = time.perf_counter()
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={file}", "bs=16M", f"count={count}", "iflag=count_bytes", "conv=fdatasync"],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    file.unlink()
    return seconds


def randn_seconds(count: int) -> float:
    """What torch takes to draw `count` normal fp32 numbers on all cores, at its best: into memory that is in use."""
    threads = torch.get_num_threads()
    workers = [threading.Thread(target=_draw, args=(count // threads, seed)) for seed in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started


def _draw(count: int, seed: int) -> None:
    numbers, rng = torch.empty(_DRAWN_AT_ONCE), torch.Generator().manual_seed(seed)
    for start in range(0, count, _DRAWN_AT_ONCE):
        numbers[: count - start].normal_(generator=rng)
