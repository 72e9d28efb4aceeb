"""What a round is held against, and what a process takes: loopback, disk, memory, CPU time."""

import os
import re
import socket
import time
from pathlib import Path

_STREAM_BYTES = 4 << 30
_AT_ONCE = 1 << 20
_DISK_BYTES = 1 << 30
_TICKS = os.sysconf("SC_CLK_TCK")


def loopback_bytes_per_s() -> float:
    """One plain TCP stream on loopback, from a process of its own to this one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            _send(server.getsockname())
            os._exit(0)
        stream, _ = server.accept()
        buffer, received, started = bytearray(_AT_ONCE), 0, time.perf_counter()
        while count := stream.recv_into(buffer):
            received += count
        seconds = time.perf_counter() - started
        os.waitpid(child, 0)
    return received / seconds


def _send(address: tuple[str, int]) -> None:
    data = bytes(_AT_ONCE)
    with socket.create_connection(address) as stream:
        for _ in range(_STREAM_BYTES // _AT_ONCE):
            stream.sendall(data)


def disk_bytes_per_s(folder: Path) -> float:
    """Writing a new file in large pieces and making it durable."""
    file, data = folder / "disk", os.urandom(16 << 20)
    started = time.perf_counter()
    with file.open("wb", buffering=0) as stream:
        for _ in range(_DISK_BYTES // len(data)):
            stream.write(data)
        os.fdatasync(stream.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return _DISK_BYTES / seconds


def peak_rss_bytes(pid: int | str = "self") -> int:
    return _status(pid, "VmHWM")


def rss_bytes(pid: int | str = "self") -> int:
    return _status(pid, "VmRSS")


def reset_peak_rss() -> None:
    """From now on, `peak_rss_bytes` of this process begins with what it has in use."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(pid: int | str, field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found, f"Linux shows {field}"
    return int(found[1]) * 1024


def cpu_seconds(pid: int) -> float:
    """Of all threads of a living process, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
