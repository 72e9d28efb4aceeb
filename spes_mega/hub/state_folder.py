"""Whether a folder may be a hub's state directory."""

from pathlib import Path

from spes_mega.errors import StoreError
from spes_mega.hub.drain import LOCK, REQUEST

PARTS = ("rounds", "pushes", "snapshots")
_OF_A_FIRST_START = {*PARTS, LOCK, REQUEST, "metrics.jsonl", "members.json"}
"""What may be there before run.json is."""
_OF_THE_DISK = {"lost+found"}
"""What may be at the root of a file system that was made for the state."""


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
