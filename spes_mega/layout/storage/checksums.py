"""Checksums of files at rest, taken while they are written, so that the data need not be read a second time.

A safetensors file's is the xxh3-64 of its header and of the xxh3-64 of each tensor, in the order of their bytes,
because rows of several tensors are written in turn. Any other file's is that of its bytes. They find damage, no malice.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import xxhash

from spes_mega.errors import CheckpointError
from spes_mega.layout.storage.safetensors_format import LENGTH_BYTES, Header, TensorSpec, header_length, parse_header

CHECKSUMS = "checksums.json"
"""The file that holds those of all other files of its directory."""
_AT_ONCE = 4 << 20


class TensorChecksums:
    """Is told of all that is written to the tensors of one file. Threads may share one if no tensor is in two."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[xxhash.xxh3_64, int]] = {}

    def wrote(self, name: str, offset: int, data: memoryview) -> None:
        """Bytes of a tensor, from its byte `offset` on. A tensor whose bytes come in another order is read again."""
        checksum, done = self._running.get(name) or (xxhash.xxh3_64(), 0)
        if offset == done:
            checksum.update(data)
            self._running[name] = checksum, done + len(data)
        else:
            self._running[name] = checksum, -1

    def of_file(self, fd: int, source: str) -> str:
        """The checksum of the file, when all has been written."""
        return _of_safetensors(fd, source, self._digest)

    def _digest(self, name: str, spec: TensorSpec) -> bytes | None:
        checksum, done = self._running.get(name) or (None, 0)
        return checksum.digest() if checksum is not None and done == spec.stop - spec.start else None


class ReadChecksums(TensorChecksums):
    """Is told of all that is read of the tensors of one file; each may be read from its start to its end repeatedly."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, set[tuple[bytes, int]]] = {}

    def read(self, name: str, offset: int, data: memoryview) -> None:
        """Bytes of a tensor, from its byte `offset` on."""
        if offset == 0 and (earlier := self._running.pop(name, None)) is not None:
            self._before.setdefault(name, set()).add((earlier[0].digest(), earlier[1]))
        self.wrote(name, offset, data)

    def _digest(self, name: str, spec: TensorSpec) -> bytes | None:
        digest, size = super()._digest(name, spec), spec.stop - spec.start
        if digest is None:
            return None
        others = {before for before, done in self._before.get(name, ()) if done == size} - {digest}
        return b"" if others else digest  # read twice and not the same: then the file's checksum is no good one's


class ArrivingChecksums(TensorChecksums):
    """Is told of the bytes of one file as they come, header first."""

    def __init__(self, max_header: int) -> None:
        """A longer header is not read: then the file has no checksum before it was read again."""
        super().__init__()
        self._max_header = max_header
        self._header: Header | None = None
        self._starts: list[int] = []
        self._names: list[str] = []

    def arrived(self, fd: int, offset: int, data: memoryview) -> None:
        """Bytes of the file, from its byte `offset` on, that have just been written to it."""
        if self._header is None:
            self._header = self._read_header(fd, offset + len(data))
        if self._header is None:
            return
        position, end = max(offset - self._header.data_start, 0), offset + len(data) - self._header.data_start
        for name in self._names[max(bisect_right(self._starts, position) - 1, 0) :]:
            spec = self._header.tensors[name]
            if spec.start >= end:
                break
            first, last = max(spec.start, position), min(spec.stop, end)
            if first < last:
                skip = self._header.data_start - offset
                self.wrote(name, first - spec.start, data[first + skip : last + skip])

    def _read_header(self, fd: int, size: int) -> Header | None:
        """None if it has not come yet, or is malformed, which whoever checks the file finds out."""
        if size < LENGTH_BYTES:
            return None
        try:
            length = header_length(os.pread(fd, LENGTH_BYTES, 0), "file", self._max_header)
            if size < LENGTH_BYTES + length:
                return None
            header = parse_header(os.pread(fd, length, LENGTH_BYTES), "file")
        except CheckpointError:
            return None
        self._names = list(header.tensors)
        self._starts = [spec.start for spec in header.tensors.values()]
        return header


def checksum_of(path: Path) -> str:
    """The checksum of a file on the disk.

    Raises:
        CheckpointError: a safetensors file that is malformed or truncated.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        if path.suffix == ".safetensors":
            return _of_safetensors(fd, str(path), lambda name, spec: None)
        return checksum_of_bytes(fd, 0, os.fstat(fd).st_size, str(path)).hexdigest()
    finally:
        os.close(fd)


def check_files(directory: Path) -> frozenset[str]:
    """Names of the files of a directory that are what their checksums say.

    Raises CheckpointError naming the first one that is missing or is not.
    """
    path = directory / CHECKSUMS
    try:
        expected = json.loads(path.read_text(encoding="utf-8")).items()
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path}: missing or damaged: {e}") from e
    checked = set()
    for file, checksum in expected:
        try:
            found = checksum_of(directory / Path(file).name)
        except (OSError, CheckpointError) as e:
            raise CheckpointError(f"{directory / file}: missing or damaged: {e}") from e
        if found != checksum:
            raise CheckpointError(f"{directory / file}: damaged: its checksum is {found}, and was {checksum}")
        checked.add(file)
    return frozenset(checked)


def require(files: Iterable[str], checked: Collection[str], directory: Path) -> None:
    """Raises CheckpointError: one of `files` has no checksum, so that nobody knows whether it is whole."""
    for file in files:
        if file not in checked:
            raise CheckpointError(f"{directory / CHECKSUMS}: damaged: it has no checksum of {file}")


def _of_safetensors(fd: int, source: str, known: Callable[[str, TensorSpec], bytes | None]) -> str:
    length = header_length(os.pread(fd, LENGTH_BYTES, 0), source)
    header = parse_header(text := os.pread(fd, length, LENGTH_BYTES), source)
    if header.file_bytes != (size := os.fstat(fd).st_size):
        raise CheckpointError(f"{source}: {size} bytes, the header speaks of {header.file_bytes}")
    whole = xxhash.xxh3_64(text)
    for name, spec in header.tensors.items():
        digest = known(name, spec)
        if digest is None:
            digest = checksum_of_bytes(fd, header.data_start + spec.start, spec.stop - spec.start, source).digest()
        whole.update(digest)
    return whole.hexdigest()


def checksum_of_bytes(fd: int, offset: int, count: int, source: str) -> xxhash.xxh3_64:
    """The checksum of a part of an open file. Raises CheckpointError if it ends too early."""
    checksum, buffer, end = xxhash.xxh3_64(), memoryview(bytearray(min(count, _AT_ONCE))), offset + count
    while offset < end:
        done = os.preadv(fd, [buffer[: end - offset]], offset)
        if not done:
            raise CheckpointError(f"{source}: truncated at byte {offset}")
        checksum.update(buffer[:done])
        offset += done
    return checksum
