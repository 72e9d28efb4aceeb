"""One process at a time uses a node's --out."""

from pathlib import Path

from spes_mega.errors import CheckpointError, RecipeError, system_errors
from spes_mega.files.lock import try_lock

LOCK = "lock"


def lock_out(out: Path) -> int:
    """Make the directory and take its lock; it is held until the process ends, in whatever way.

    Returns the lock's file descriptor, which only a test has to close. Raises RecipeError: another node has it;
    CheckpointError: it cannot be made.
    """
    with system_errors(CheckpointError, out, "cannot be written"):
        out.mkdir(parents=True, exist_ok=True)
    with system_errors(CheckpointError, out / LOCK, "cannot be written"):
        fd = try_lock(out / LOCK)
    if fd is None:
        raise RecipeError(
            f"--out {out}: another node is using this directory, or an older process of this one has not ended yet: "
            "give each node its own --out, and start one process of it at a time"
        )
    return fd
