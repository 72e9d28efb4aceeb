"""One process at a time uses a node's --out."""

import fcntl
import os
from pathlib import Path

from spes_mega.errors import CheckpointError, RecipeError, system_errors

LOCK = "lock"


def lock_out(out: Path) -> int:
    """Make the directory and take its lock; it is held until the process ends, in whatever way.

    Returns the lock's file descriptor, which only a test has to close. Raises RecipeError: another node has it;
    CheckpointError: it cannot be made.
    """
    with system_errors(CheckpointError, out, "cannot be written"):
        out.mkdir(parents=True, exist_ok=True)
    with system_errors(CheckpointError, out / LOCK, "cannot be written"):
        fd = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RecipeError(
            f"--out {out}: another node is using this directory, or an older process of this one has not ended yet: "
            "give each node its own --out, and start one process of it at a time"
        ) from None
    return fd
