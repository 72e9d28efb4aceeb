"""A folder that a benchmark works in."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(folder: Path) -> Iterator[None]:
    """`folder` is made anew, and removed at the end; what the disk still has to do is waited for."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
