"""Removal of what nobody needs any more from a state directory: what crashes left, old states, and old pushes."""

import fcntl
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from spes_mega.hub.state.drain import REQUEST

KEPT_ROUNDS = 2
"""The newest state, and the one before it, from which a slow pull may still be reading."""
_SPARE = ".{}.partial-spare"
_NUMBER = re.compile(r"\d{6,}")
_LEFTOVERS = (
    ".*.partial",
    "pushes/.*.partial-*",
    "rounds/.*.partial-*",
    "snapshots/.*.partial-*",
    "pushes/*/*.part",
    "pushes/*/*.spare",
    REQUEST,
)


def numbers(folder: Path) -> list[int]:
    """Return the rounds that have a directory in `folder`."""
    return [int(path.name) for path in folder.iterdir() if _NUMBER.fullmatch(path.name)]


def spare_files(root: Path) -> dict[str, Path]:
    """Return files that the next state can overwrite, by name."""
    return {path.name: path for path in root.glob(f"rounds/{_SPARE.format('*')}/*")}


def remove_leftovers(root: Path) -> None:
    """Remove what a crash left half-written."""
    for pattern in _LEFTOVERS:
        for path in root.glob(pattern):
            _remove(path)


def remove_old(root: Path, newest: int, open_rounds: Collection[int], last: bool) -> None:
    """Remove old states, but for files that the next one can overwrite, and pushes of rounds that are not open.

    `last`: no state will follow.
    """
    for spare in root.glob(f"rounds/{_SPARE.format('*')}"):
        shutil.rmtree(spare)
    for number in sorted(numbers(root / "rounds")):
        if number <= newest - KEPT_ROUNDS:
            (_remove if last else _retire)(root / "rounds" / f"{number:06d}")
    for number in numbers(root / "pushes"):
        if number not in open_rounds:
            _remove(root / "pushes" / f"{number:06d}")


def _retire(directory: Path) -> None:
    """Keep what is large of a state that is not needed, unless somebody still reads it or a snapshot has it."""
    spare = directory.with_name(_SPARE.format(directory.name))
    directory.rename(spare)  # from here on nobody opens it
    for path in spare.iterdir():
        if path.suffix != ".safetensors" or path.stat().st_nlink > 1 or _is_open(path):
            path.unlink()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Renamed first: a directory with its final name must never be half there.
        doomed = path if path.name.startswith(".") else path.with_name(f".{path.name}.partial-old")
        path.rename(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink()


def _is_open(path: Path) -> bool:
    """Tell whether any process has a file open or mapped; True where that cannot be known."""
    if not hasattr(fcntl, "F_SETLEASE"):
        return True
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # is refused while anybody else has the file
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
