"""Whether a folder may be a hub's state directory, and has in each place what belongs there."""

import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_mega.errors import StoreError
from spes_mega.hub.state.drain import REQUEST
from spes_mega.hub.state.run_lock import LOCK
from spes_mega.wire.errors import passing

PARTS = ("rounds", "pushes", "snapshots")
STAGED = re.compile(r"node-(\d{3,})-([0-9a-f]{16})\.safetensors")
"""The name of a committed push: its node and its checksum."""
_OF_A_FIRST_START = {*PARTS, LOCK, REQUEST, "metrics.jsonl", "members.json"}
"""What may be there before run.json is."""
_OF_THE_DISK = {"lost+found"}
"""What may be at the root of a file system that was made for the state."""
_FOLDERS = ("", *PARTS, r"rounds/\d{6,}", r"pushes/\d{6,}", r"snapshots/round-\d{6,}")
_FILES = ("run.json", "members.json", "metrics.jsonl", LOCK, REQUEST, r"rounds/\d{6,}/[^.].*", r"pushes/\d{6,}/[^.].*")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def naming(root: Path) -> Iterator[None]:
    """Raises StoreError with the path and the cause instead of OSError, or ScarceError at what passes by itself."""
    try:
        yield
    except OSError as e:
        raise passing(e) or StoreError(
            f"{e.filename or root}: the state directory cannot be used: {e.strerror or e}"
        ) from e


def check_own(root: Path) -> None:
    """Raises StoreError if `root` has files and is no state directory: the hub's own would be mixed with them."""
    if not root.is_dir() or (root / "run.json").exists():
        return
    known = _OF_A_FIRST_START | _OF_THE_DISK
    strange = sorted(path.name for path in root.iterdir() if path.name not in known and not _half_written(path))
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise StoreError(
            f"{root}: this is no state directory (it has no run.json), and has other files: {strange[0]}{more}; give "
            "--state an empty directory, or one that is not there yet"
        )


def _half_written(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".partial")


def check_layout(root: Path, num_nodes: int) -> None:
    """Raises StoreError naming the first path that is no file, or no directory, though it has to be, or that has the
    push of a node that is not in the run. Changes nothing."""
    pushed: dict[tuple[str, int], Path] = {}
    levels = ("*", "*/*", "rounds/*/*", "pushes/*/*")
    for path in (root, *(path for level in levels for path in sorted(root.glob(level)))):
        _check_kind(path, "" if path == root else path.relative_to(root).as_posix())
        if (match := STAGED.fullmatch(path.name)) and path.parent.parent == root / "pushes":
            node = int(match[1])
            if node >= num_nodes:
                raise StoreError(
                    f"{path}: a push of node {node}, which this run does not have (spes.num_nodes: {num_nodes}); "
                    "move it away"
                )
            if (other := pushed.setdefault((path.parent.name, node), path)) != path:
                raise StoreError(f"{path}: {other.name} is a push of node {node} too; move one of them away")


def _check_kind(path: Path, name: str) -> None:
    """Raises StoreError unless what is at `path` is of the kind that `name`, the path in the directory, asks for."""
    folder = any(re.fullmatch(pattern, name) for pattern in _FOLDERS)
    if not (folder or any(re.fullmatch(pattern, name) for pattern in _FILES)) or not _is_there(path):
        return
    expected = stat.S_IFDIR if folder else stat.S_IFREG
    try:
        found = stat.S_IFMT(path.stat().st_mode)
    except OSError as e:
        raise StoreError(f"{path}: a symbolic link that leads nowhere ({e.strerror}); {_kind(expected)}") from e
    if found != expected:
        raise StoreError(f"{path}: {_KINDS.get(found, 'of a strange kind')}; {_kind(expected)}")


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _kind(expected: int) -> str:
    return f"{_KINDS[expected]} was expected: restore the state directory from a copy, or move this away"
