"""Lock files, which are held until their process ends in whatever way."""

import fcntl
import os
from pathlib import Path

_TAKEN = BlockingIOError, PermissionError
"""How a lock is refused that another process has: POSIX allows both where flock is emulated by fcntl."""


def try_lock(path: Path) -> int | None:
    """Take the lock of a file, which is made if it is not there; return the descriptor that holds it.

    Return None if another process has it. Raise OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except _TAKEN:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock of a file. Raise OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except _TAKEN:
        return True
    finally:
        os.close(fd)
    return False
