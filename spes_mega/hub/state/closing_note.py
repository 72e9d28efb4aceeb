"""closing.json: with which pushes a round is closed, so that a hub that is started again makes the same state."""

from dataclasses import asdict, dataclass
from pathlib import Path

from spes_mega.errors import StoreError
from spes_mega.files.durable import sync_path
from spes_mega.hub.state.checksummed import read_sealed, write_sealed
from spes_mega.hub.state.disk_full import noticing_shortage

_FILE = "closing.json"
_RESTORE = "restore the state directory from a copy"


@dataclass(frozen=True)
class ClosingNote:
    """What is decided when a round is closed."""

    nodes: tuple[int, ...]
    """Nodes whose pushes go into the next state."""
    absent: tuple[int, ...]
    """Nodes whose experts others train from the next state on."""


def note_closing(pushes: Path, note: ClosingNote) -> None:
    """Close the round of the directory `pushes` with these pushes, and no others. Raise StoreFullError."""
    path = pushes / _FILE
    with noticing_shortage(path):
        write_sealed(path, asdict(note))
        sync_path(pushes.parent)


def read_closing(pushes: Path) -> ClosingNote | None:
    """Return how an earlier hub began to close the round. Raise StoreError if the file is damaged."""
    path = pushes / _FILE
    try:
        raw = read_sealed(path, _RESTORE)
        return ClosingNote(tuple(map(int, raw["nodes"])), tuple(map(int, raw["absent"])))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as e:
        raise StoreError(f"{path}: damaged: {e!r}; {_RESTORE}") from e


def forget_closing(pushes: Path) -> None:
    """Let the round stay open after all."""
    (pushes / _FILE).unlink()
    sync_path(pushes)
