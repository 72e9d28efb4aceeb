"""Small files of the state directory: written durably, and read back with their checksum."""

import json
import os
from pathlib import Path
from typing import Any

import xxhash

from spes_mega.errors import StoreError
from spes_mega.files.durable import sync_path

_CHECKSUM, _CONTENT = "xxh3_64", "content"


def write_text(path: Path, text: str) -> None:
    """Put a file in its place, so that a crash leaves the old content or the new. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError:
        if partial.is_file():
            partial.unlink()
        raise
    sync_path(path.parent)


def read_json(path: Path, remedy: str) -> Any:
    """The JSON in a file.

    Raises:
        FileNotFoundError: it is not there.
        StoreError: it cannot be read, or is not JSON; `remedy` says what to do.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as e:
        raise StoreError(f"{path}: damaged: {getattr(e, 'strerror', None) or e}; {remedy}") from e


def write_sealed(path: Path, content: Any) -> None:
    """Put a JSON file with its checksum in its place. Raises OSError."""
    write_text(path, json.dumps({_CHECKSUM: _checksum(content), _CONTENT: content}))


def read_sealed(path: Path, remedy: str) -> Any:
    """What `write_sealed` wrote. Raises what `read_json` does, and StoreError if the checksum is missing or wrong.

    A list was written before there were checksums.
    """
    raw = read_json(path, remedy)
    if isinstance(raw, list):
        return raw
    if not (isinstance(raw, dict) and raw.keys() == {_CHECKSUM, _CONTENT}):
        raise StoreError(f"{path}: damaged: it has no checksum; {remedy}")
    if raw[_CHECKSUM] != (found := _checksum(raw[_CONTENT])):
        raise StoreError(f"{path}: damaged: its checksum is {found}, and was {raw[_CHECKSUM]!r:.40}; {remedy}")
    return raw[_CONTENT]


def _checksum(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
