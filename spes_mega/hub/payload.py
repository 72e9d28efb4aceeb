"""Weights on the wire: the byte stream of a safetensors file, cut into chunks with offset and checksum.

Both sides keep a payload in a file while it is on its way, so that memory does not depend on its size, that an
interrupted transfer can begin again, and that nothing is applied or averaged before all of it has come and was checked.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from spes_mega.errors import CheckpointError
from spes_mega.hub.faults import PayloadError
from spes_mega.hub.proto import hub_pb2 as pb
from spes_mega.layout.safetensors_format import LENGTH_BYTES, Header, header_length, pack_header, parse_header
from spes_mega.layout.tensor_bytes import bytes_of, read_tensor
from spes_mega.outer.codecs import Codec

CHUNK_BYTES = 2 << 20
MAX_CHUNK_BYTES = 3 << 20  # with its frame below gRPC's default limit of 4 MiB a message
SLICE_BYTES = 4 << 20
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def payload_header(shapes: Shapes, codec: Codec, metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a payload that carries these tensors in this order."""
    return pack_header({name: (codec.wire_dtype, shape) for name, shape in shapes.items()}, metadata)


def header_limit(shapes: Shapes) -> int:
    """Bytes that a header naming these tensors may have, generously; bounds what is read from a peer."""
    return 4096 + sum(2 * len(name.encode()) + 256 for name in shapes)


def data_bytes(shapes: Shapes, codec: Codec) -> int:
    """Bytes of these tensors on the wire, without the header."""
    return sum(_numel(shape) for shape in shapes.values()) * codec.wire_dtype.itemsize


def _numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


def row_slices(shape: Shape, row_bytes_factor: int = 1, budget: int = SLICE_BYTES) -> Iterator[tuple[int, int]]:
    """(start, stop) of slices of rows of at most `budget` fp32 bytes each (or one row), all experts together."""
    row_bytes = _numel(shape[1:]) * 4 * row_bytes_factor
    rows = max(1, budget // max(1, row_bytes))
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])


def write_payload(
    file: BinaryIO, shapes: Shapes, tensors: Iterable[tuple[str, Tensor]], codec: Codec, metadata: Mapping[str, str]
) -> int:
    """Write a payload to `file` from its start; `tensors` come in the order of `shapes`. Returns its bytes.

    Raises:
        ValueError: a tensor's name or shape is not the one that is due.
    """
    written = file.write(payload_header(shapes, codec, metadata))
    due = iter(shapes.items())
    for name, tensor in tensors:
        if (name, tuple(tensor.shape)) != (expected := next(due, None)):
            raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} given where {expected} is due")
        written += file.write(bytes_of(codec.encode(tensor)))
    if (missing := next(due, None)) is not None:
        raise ValueError(f"tensor {missing[0]} was not given")
    file.flush()
    return written


def chunk_of(offset: int, data: bytes) -> pb.Chunk:
    return pb.Chunk(offset=offset, crc32=zlib.crc32(data), data=data)


def file_chunks(file: BinaryIO, size: int) -> Iterator[pb.Chunk]:
    """The first `size` bytes of an open file as chunks; leaves the file's position alone."""
    for offset in range(0, size, CHUNK_BYTES):
        yield chunk_of(offset, os.pread(file.fileno(), min(CHUNK_BYTES, size - offset), offset))


def piece_chunks(pieces: Iterable[bytes | memoryview]) -> Iterator[pb.Chunk]:
    """Pieces of any size, one after the other, as chunks of CHUNK_BYTES (the last may be shorter)."""
    offset = 0
    pending = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            take = min(CHUNK_BYTES - len(pending), len(view))
            pending += view[:take]
            view = view[take:]
            if len(pending) == CHUNK_BYTES:
                # Emptied before the chunk is handed out, so that a slow receiver holds up as little memory as can be.
                chunk = chunk_of(offset, bytes(pending))
                pending.clear()
                offset += CHUNK_BYTES
                yield chunk
                del chunk
    if pending:
        yield chunk_of(offset, bytes(pending))


class ChunkSink:
    """Writes the chunks of one payload to a file and checks each: order, checksum, and the size announced."""

    def __init__(self, file: BinaryIO, total_bytes: int) -> None:
        self._file = file
        self._total = total_bytes
        self.received = 0

    def take(self, chunk: pb.Chunk) -> int:
        """Write a chunk; returns its bytes.

        Raises:
            PayloadError: it is not the next one, is damaged, or goes past the end.
        """
        if chunk.offset != self.received:
            raise PayloadError(f"a chunk for byte {chunk.offset} came where byte {self.received} was due")
        data = chunk.data  # each access to a bytes field makes a copy
        if not 0 < len(data) <= MAX_CHUNK_BYTES:
            raise PayloadError(f"a chunk of {len(data)} bytes: 1 to {MAX_CHUNK_BYTES} are allowed")
        if self.received + len(data) > self._total:
            raise PayloadError(f"more bytes came than the {self._total} announced")
        if zlib.crc32(data) != chunk.crc32:
            raise PayloadError(f"bad checksum of the chunk at byte {chunk.offset}")
        self._file.write(data)
        self.received += len(data)
        return len(data)

    def finish(self) -> None:
        """Raises PayloadError if bytes are missing."""
        if self.received != self._total:
            raise PayloadError(f"the stream ended after {self.received} of {self._total} bytes")
        self._file.flush()


class StoredPayload:
    """A complete payload in an open file; tensors are read one at a time, or rows of one."""

    def __init__(self, file: BinaryIO, codec: Codec, source: str, max_header: int | None = None) -> None:
        """Raises PayloadError naming `source` if the header or the file's length is not right."""
        self._file = file
        self._codec = codec
        self._source = source
        self.size = os.fstat(file.fileno()).st_size
        self.header = self._parse(max_header if max_header is not None else self.size)
        if self.header.file_bytes != self.size:
            raise PayloadError(f"{source}: {self.size} bytes, the header speaks of {self.header.file_bytes}")

    def _parse(self, max_header: int) -> Header:
        try:
            length = header_length(os.pread(self._file.fileno(), LENGTH_BYTES, 0), self._source, max_header)
            return parse_header(os.pread(self._file.fileno(), length, LENGTH_BYTES), self._source)
        except CheckpointError as e:
            raise PayloadError(str(e)) from e

    @classmethod
    def open(cls, path: Path, codec: Codec, source: str, max_header: int | None = None) -> "StoredPayload":
        """Open the payload in a file."""
        file = path.open("rb")
        try:
            return cls(file, codec, source, max_header)
        except BaseException:
            file.close()
            raise

    @property
    def shapes(self) -> dict[str, Shape]:
        """Names and shapes in the order of their bytes."""
        return {name: spec.shape for name, spec in self.header.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, decoded to fp32."""
        spec = self.header.tensors[name]
        return self._decode(spec.start, spec.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor along its first axis, decoded to fp32."""
        spec = self.header.tensors[name]
        row_bytes = _numel(spec.shape[1:]) * spec.dtype.itemsize
        return self._decode(spec.start + start * row_bytes, (stop - start, *spec.shape[1:]))

    def _decode(self, offset: int, shape: Shape) -> Tensor:
        fd, begin = self._file.fileno(), self.header.data_start + offset
        return self._codec.decode(read_tensor(fd, begin, self._codec.wire_dtype, shape, self._source))

    def check(self, expected: Shapes) -> None:
        """Raises PayloadError naming the tensor unless names, shapes and dtypes are those expected."""
        tensors = self.header.tensors
        if missing := [name for name in expected if name not in tensors]:
            raise PayloadError(f"{self._source}: tensor {missing[0]} is missing ({len(missing)} in all)")
        for name, spec in tensors.items():
            if name not in expected:
                raise PayloadError(f"{self._source}: tensor {name[:200]} was not expected from this node")
            if spec.shape != tuple(expected[name]):
                raise PayloadError(f"{self._source}: {name} has shape {spec.shape}, expected {tuple(expected[name])}")
            if spec.dtype != self._codec.wire_dtype:
                raise PayloadError(f"{self._source}: {name} is {spec.dtype}, expected {self._codec.wire_dtype}")

    def check_finite(self) -> None:
        """Raises PayloadError naming the first tensor with a NaN or an infinity."""
        for name, spec in self.header.tensors.items():
            for start, stop in row_slices(spec.shape):
                low, high = self.read_rows(name, start, stop).aminmax()
                if not (low.isfinite() and high.isfinite()):
                    raise PayloadError(f"{self._source}: {name} has NaN or infinite values")

    def close(self) -> None:
        self._file.close()
