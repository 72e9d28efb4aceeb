"""Making what was written survive a crash of the machine."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Make the content of a file durable, or the names in a directory. Raise OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
