"""The lock of a state directory: one hub uses it at a time."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from spes_mega.errors import StoreError

LOCK = "lock"
TRIES = 5


def take_lock(state: Path) -> int:
    """Take the lock; return the descriptor that holds it. Raise StoreError if another hub has it."""
    fd = os.open(state / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    for _ in range(TRIES):  # `--drain` looks for a moment whether it is held
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        time.sleep(0.1)
    os.close(fd)
    raise StoreError(f"{state}: another hub is using this state directory")


def in_use(state: Path) -> bool:
    """Tell whether a hub holds the lock of a state directory."""
    fd = os.open(state / LOCK, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
