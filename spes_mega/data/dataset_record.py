"""What `tokenize` records of a dataset beside it (`PREFIX.json`), so that nobody need read all tokens to know it.

A record is believed only of the file that it was made of, which it knows by its fingerprint.
"""

import json
import os
from pathlib import Path

import xxhash
from pydantic import BaseModel, NonNegativeInt, ValidationError

from spes_mega.errors import DataError

WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole for their fingerprint, larger ones in blocks."""
_BLOCK_BYTES = 64 << 10
_BLOCKS = 1024


class DatasetRecord(BaseModel):
    """The part of `PREFIX.json` that is relied on; the file says more, for people."""

    fingerprint: str
    smallest_token: int
    largest_token: NonNegativeInt


def read_record(prefix: Path) -> DatasetRecord | None:
    """Return the record beside a dataset, or None: there is none, or it is of an earlier version or another file."""
    try:
        record = DatasetRecord.model_validate(json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, ValidationError):
        return None
    return record if record.fingerprint == fingerprint(Path(f"{prefix}.bin")) else None


def fingerprint(path: Path) -> str:
    """Return 32 hex digits (xxh3-128) of a file's size and contents: all of them, or 1024 blocks of 64 KiB.

    The blocks are spread evenly from the first byte to the last, so that other text is noticed at the cost of 64 MiB,
    whatever the size; a change of a few bytes in a larger file need not be.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            known = xxhash.xxh3_128(size.to_bytes(8, "little"))
            for offset in _offsets(size):
                known.update(os.pread(file.fileno(), _BLOCK_BYTES, offset))
    except OSError as e:
        raise DataError(f"{path}: cannot read: {e.strerror}") from e
    return known.hexdigest()


def _offsets(size: int) -> list[int]:
    if size <= WHOLE_BYTES:
        return list(range(0, size, _BLOCK_BYTES))
    return [i * (size - _BLOCK_BYTES) // (_BLOCKS - 1) for i in range(_BLOCKS)]
