"""A payload on the wire: frames of a chunk each. A frame is 16 bytes of prefix, then the chunk itself.

The prefix has the chunk's offset in the payload and the xxh3-64 of its bytes, both little-endian. Frames are no
protobuf messages, because those would be copied twice more on either side.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import xxhash

from spes_mega.wire.errors import DamagedError, PayloadError

CHUNK_BYTES = 2 << 20
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 3 << 20  # with its prefix below gRPC's default limit of 4 MiB a message
_IN_FLIGHT_BYTES = 4 << 20
_PREFIX = struct.Struct("<QQ")
PREFIX_BYTES = _PREFIX.size


def chunk_bytes(num_nodes: int) -> int:
    """Of a chunk, such that what is in memory of all transfers together hardly depends on the number of nodes."""
    return max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, _IN_FLIGHT_BYTES // num_nodes))


class Piece(NamedTuple):
    """Some bytes of a payload, which are read only when they are due."""

    size: int
    read: Callable[[], bytes | memoryview]


def file_pieces(fd: int, size: int, at_once: int = CHUNK_BYTES) -> Iterator[Piece]:
    """The first `size` bytes of an open file."""
    for offset in range(0, size, at_once):
        count = min(at_once, size - offset)
        yield Piece(count, lambda count=count, offset=offset: os.pread(fd, count, offset))  # type: ignore[misc]


def frame_of(offset: int, *parts: bytes | memoryview) -> bytes:
    """One frame; its chunk is the parts, one after the other."""
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return b"".join((_PREFIX.pack(offset, checksum.intdigest()), *parts))


def frames(pieces: Iterable[Piece], chunk: int, begin: int = 0) -> Iterator[bytes]:
    """Frames of `chunk` bytes (the last may be shorter) of the payload that the pieces make, from byte `begin` on."""
    offset, parts, filled = begin, list[memoryview](), 0
    for view in _from(pieces, begin):
        while len(view):
            part = view[: chunk - filled]
            view = view[len(part) :]
            parts.append(part)
            filled += len(part)
            if filled == chunk:
                frame = frame_of(offset, *parts)
                # Let go before the frame is handed out, so that a slow receiver holds up as little as can be.
                part, parts, filled, offset = memoryview(b""), [], 0, offset + chunk
                yield frame
                del frame
    if filled:
        yield frame_of(offset, *parts)


def _from(pieces: Iterable[Piece], begin: int) -> Iterator[memoryview]:
    skip = begin
    for piece in pieces:
        if skip >= piece.size:
            skip -= piece.size
        else:
            yield memoryview(piece.read())[skip:]
            skip = 0


class Arrival:
    """Writes the frames of one payload to a file and checks each: order, checksum, and the size announced."""

    def __init__(self, fd: int, total_bytes: int, received: int = 0) -> None:
        """`received` bytes are in the file already."""
        self._fd = fd
        self.total = total_bytes
        self.received = received

    def take(self, frame: bytes) -> int:
        """Write a chunk; returns its bytes.

        Raises:
            DamagedError: its checksum is wrong; what came before it stands.
            PayloadError: it is no frame, is not the next one, or goes past the end.
        """
        data = memoryview(frame)[PREFIX_BYTES:]
        if not 0 < len(data) <= MAX_CHUNK_BYTES:
            raise PayloadError(f"a chunk of {len(data)} bytes: 1 to {MAX_CHUNK_BYTES} are allowed")
        offset, checksum = _PREFIX.unpack_from(frame)
        if offset != self.received:
            raise PayloadError(f"a chunk for byte {offset} came where byte {self.received} was due")
        if self.received + len(data) > self.total:
            raise PayloadError(f"more bytes came than the {self.total} announced")
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise DamagedError(f"bad checksum of the chunk at byte {offset}")
        self._write(data)
        return len(data)

    def _write(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], self.received + done)
        self.received += done

    def finish(self) -> None:
        """Raises PayloadError if bytes are missing."""
        if self.received != self.total:
            raise PayloadError(f"the stream ended after {self.received} of {self.total} bytes")
