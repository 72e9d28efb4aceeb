"""Git LFS pointer files: what stands in the place of a large file in a clone that did not fetch it."""

from pathlib import Path

from spes_mega.errors import SpesError

_MAGIC = b"version https://git-lfs.github.com/spec/"
_MAX_BYTES = 1024  # the specification's limit is lower


def refuse_pointer(path: Path, error: type[SpesError]) -> None:
    """Raise `error` if the file at `path` is a Git LFS pointer. What cannot be read is left to its reader."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                refuse_pointer_bytes(file.read(_MAX_BYTES + 1), path, error)
    except OSError:
        return


def refuse_pointer_bytes(content: bytes, path: Path, error: type[SpesError]) -> None:
    """The same for what was read of it, of which more than 1 KiB is too much for a pointer."""
    if content.startswith(_MAGIC) and len(content) <= _MAX_BYTES:
        raise error(f"{path}: is a Git LFS pointer, not the file itself: fetch it with `git lfs pull` in its clone")
