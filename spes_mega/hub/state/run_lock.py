"""The lock of a state directory: one hub uses it at a time."""

import time
from pathlib import Path

from spes_mega.errors import StoreError
from spes_mega.files.lock import is_locked, try_lock

LOCK = "lock"
TRIES = 5


def take_lock(state: Path) -> int:
    """Take the lock; return the descriptor that holds it. Raise StoreError if another hub has it."""
    for _ in range(TRIES):  # `--drain` looks for a moment whether it is held
        if (fd := try_lock(state / LOCK)) is not None:
            return fd
        time.sleep(0.1)
    raise StoreError(f"{state}: another hub is using this state directory")


def in_use(state: Path) -> bool:
    """Tell whether a hub holds the lock of a state directory."""
    return is_locked(state / LOCK)
