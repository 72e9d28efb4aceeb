"""Lock files, which are held until their process ends in whatever way."""

import fcntl
import os
from pathlib import Path


def try_lock(path: Path) -> int | None:
    """Take the lock of a file, which is made if it is not there; return the descriptor that holds it.

    Return None if another process has it. Raise OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if isinstance(e, BlockingIOError):
            return None
        raise
    return fd


def is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock of a file. Raise OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
