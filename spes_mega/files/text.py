"""Small text and JSON files that users give, read within bounds."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from spes_mega.errors import SpesError, system_errors
from spes_mega.files.git_lfs import refuse_pointer_bytes

MAX_BYTES = 64 << 20
"""Far above any config.json, and below what would fill the memory."""


def read_text(path: Path, error: type[SpesError], what: str = "file", max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    A pipe that nobody writes to is empty, and a device ends at `max_bytes`: nothing is waited for without end.

    Raises:
        error: it cannot be read, is larger than `max_bytes`, is a Git LFS pointer, or is not UTF-8; the line is named.
    """
    with system_errors(error, path, f"cannot read the {what}"):
        raw = _read_bounded(path, max_bytes)
    if len(raw) > max_bytes:
        raise error(f"{path}: over {max_bytes >> 20} MiB, too large for a {what}")
    refuse_pointer_bytes(raw, path, error)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise error(f"{path}:{line}: not UTF-8: byte {raw[e.start]:#04x} ({e.reason})") from e


def read_json(path: Path, error: type[SpesError], what: str = "file", max_bytes: int = MAX_BYTES) -> Any:
    """The value in a JSON file. Raises `error` as `read_text` does, or on JSON that is not valid or repeats a key."""
    text = read_text(path, error, what, max_bytes)
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as e:
        raise error(f"{path}:{e.lineno}: not valid JSON: {e.msg} (column {e.colno})") from e
    except RecursionError as e:
        raise error(f"{path}: not valid JSON: nested too deeply") from e
    except ValueError as e:
        raise error(f"{path}: not valid JSON: {e}") from e


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's keys and values as a mapping. Raises ValueError on a key that stands there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} stands there twice")
    return found


def _read_bounded(path: Path, max_bytes: int) -> bytes:
    """At most `max_bytes` + 1 bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with os.fdopen(fd, "rb") as file:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(21, "Is a directory", str(path))
        os.set_blocking(fd, True)
        return file.read(max_bytes + 1)
