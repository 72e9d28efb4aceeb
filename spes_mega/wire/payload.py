"""Weights on the wire: the byte stream of a safetensors file.

Both sides keep a payload in a file while it is on its way, so that memory does not depend on its size, that an
interrupted transfer can begin again, and that nothing is applied or averaged before all of it has come and was checked.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from spes_mega.errors import CheckpointError
from spes_mega.layout.storage.checksums import ReadChecksums, TensorChecksums
from spes_mega.layout.storage.rows import is_finite, row_slices
from spes_mega.layout.storage.safetensors_format import (
    LENGTH_BYTES,
    Header,
    TensorSpec,
    byte_count,
    header_length,
    parse_header,
)
from spes_mega.layout.storage.tensor_bytes import bytes_of, read_tensor, write_tensor
from spes_mega.outer.codecs import CODEC_OF_DTYPE, INT8_LEVELS, lossy
from spes_mega.quoting import quoted
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.tensor_specs import (
    SCALE_SUFFIX,
    Form,
    Forms,
    Shape,
    Shapes,
    payload_header,
    scale_name,
    wire_specs,
)


class PayloadWriter:
    """Fills a payload in a file from its start; rows may come in any order."""

    def __init__(
        self,
        file: BinaryIO,
        forms: Forms,
        metadata: Mapping[str, str] | None = None,
        checksums: TensorChecksums | None = None,
    ) -> None:
        """Writes the header, and makes the file as long as it will be; what it held stays until all is written."""
        self._fd = file.fileno()
        self._forms = forms
        self._checksums = checksums
        header = payload_header(forms, metadata)
        self._header = parse_header(header[LENGTH_BYTES:], "payload")
        self.size = self._header.file_bytes
        os.pwrite(self._fd, header, 0)
        os.truncate(self._fd, self.size)

    def write_rows(self, name: str, start: int, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encode and store rows start.. of a tensor; returns what `Codec.encode` does.

        Raises:
            CheckpointError: the disk is full.
        """
        wire, scale = self._forms[name].codec.encode(rows)
        self._put(name, start, wire)
        if scale is not None:
            self._put(scale_name(name), start, scale)
        return wire, scale

    def _put(self, name: str, start: int, rows: Tensor) -> None:
        spec = self._header.tensors[name]
        offset = _row_offset(spec, start)
        write_tensor(self._fd, self._header.data_start + offset, rows, name)
        if self._checksums is not None:
            self._checksums.wrote(name, offset - spec.start, bytes_of(rows))


def _row_offset(spec: TensorSpec, start: int) -> int:
    return spec.start + start * byte_count(spec.dtype, spec.shape[1:])


def write_payload(
    file: BinaryIO, forms: Forms, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> int:
    """Write a payload to `file`; `tensors` come in the order of `forms`. Returns its bytes.

    Raises:
        ValueError: a tensor's name or shape is not the one that is due.
    """
    writer = PayloadWriter(file, forms, metadata)
    for name, tensor in in_turn({name: form.shape for name, form in forms.items()}, tensors):
        for start, stop in row_slices(tuple(tensor.shape)):
            writer.write_rows(name, start, tensor[start:stop])
    return writer.size


def in_turn(shapes: Shapes, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, after a check that each is the one that is due. Raises ValueError naming one that is not."""
    due = iter(shapes.items())
    for name, tensor in tensors:
        if (name, tuple(tensor.shape)) != (expected := next(due, None)):
            raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} given where {expected} is due")
        yield name, tensor
    if (missing := next(due, None)) is not None:
        raise ValueError(f"tensor {missing[0]} was not given")


class StoredPayload:
    """A complete payload in an open file; tensors are read one at a time, or rows of one.

    The codec of each tensor is known by its dtype on the wire.
    """

    def __init__(self, file: BinaryIO, source: str, max_header: int | None = None, summed: bool = False) -> None:
        """`summed`: what is read is summed up, so that `check_sum` need not read it again.

        Raises PayloadError naming `source` if the header or the file's length is not right.
        """
        self._file = file
        self._checksums = ReadChecksums() if summed else None
        self._source = source
        self.size = os.fstat(file.fileno()).st_size
        self.header = self._parse(max_header if max_header is not None else self.size)
        if self.header.file_bytes != self.size:
            raise PayloadError(f"{source}: {self.size} bytes, the header speaks of {self.header.file_bytes}")
        self.forms = self._forms()

    def _parse(self, max_header: int) -> Header:
        try:
            length = header_length(os.pread(self._file.fileno(), LENGTH_BYTES, 0), self._source, max_header)
            return parse_header(os.pread(self._file.fileno(), length, LENGTH_BYTES), self._source)
        except CheckpointError as e:
            raise PayloadError(str(e)) from e

    def _forms(self) -> dict[str, Form]:
        """Names, shapes and codecs in the order of their bytes."""
        forms = {}
        for name, spec in self.header.tensors.items():
            if name.removesuffix(SCALE_SUFFIX) in self.header.tensors and name.endswith(SCALE_SUFFIX):
                continue
            codec = CODEC_OF_DTYPE.get(spec.dtype)
            if codec is None:
                raise PayloadError(f"{self._source}: {quoted(name)} is {spec.dtype}, which no codec gives")
            forms[name] = Form(spec.shape, codec)
        return forms

    @classmethod
    def open(cls, path: Path, source: str, max_header: int | None = None, summed: bool = False) -> "StoredPayload":
        """Open the payload in a file."""
        file = path.open("rb")
        try:
            return cls(file, source, max_header, summed)
        except BaseException:
            file.close()
            raise

    @property
    def shapes(self) -> dict[str, Shape]:
        """Names and shapes in the order of their bytes."""
        return {name: form.shape for name, form in self.forms.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, decoded to fp32."""
        return self.read_rows(name, 0, self.forms[name].shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor along its first axis, decoded to fp32."""
        codec = self.forms[name].codec
        scale = self._scales(name, start, stop) if codec.scaled else None
        return codec.decode(self._rows(name, start, stop), scale)

    def add_rows(self, name: str, start: int, stop: int, onto: Tensor) -> None:
        """Add rows of a tensor that travels with loss to fp32 rows, in place."""
        codec = lossy(self.forms[name].codec)
        scale = self._scales(name, start, stop) if codec.scaled else None
        codec.add(onto, self._rows(name, start, stop), scale)

    def _scales(self, name: str, start: int, stop: int) -> Tensor:
        one_row = len(self.forms[name].shape) == 1
        return self._rows(scale_name(name), 0 if one_row else start, 1 if one_row else stop)

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        spec = self.header.tensors[name]
        offset, shape = _row_offset(spec, start), (stop - start, *spec.shape[1:])
        rows = read_tensor(self._file.fileno(), self.header.data_start + offset, spec.dtype, shape, self._source)
        if self._checksums is not None:
            self._checksums.read(name, offset - spec.start, bytes_of(rows))
        return rows

    def raw(self, name: str) -> Iterator[tuple[int, int]]:
        """Where the bytes of a tensor are in the file, scales first: (offset, length)."""
        for part in (scale_name(name), name) if self.forms[name].codec.scaled else (name,):
            spec = self.header.tensors[part]
            yield self.header.data_start + spec.start, spec.stop - spec.start

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Bytes of the file. Raises PayloadError if it has become shorter."""
        data = os.pread(self._file.fileno(), length, offset)
        if len(data) != length:
            raise PayloadError(f"{self._source}: truncated at byte {offset + len(data)}")
        return data

    def check(self, expected: Forms) -> None:
        """Raises PayloadError naming the tensor unless names, shapes and dtypes are those expected."""
        specs, tensors = wire_specs(expected), self.header.tensors
        if missing := [name for name in specs if name not in tensors]:
            raise PayloadError(f"{self._source}: tensor {missing[0]} is missing ({len(missing)} in all)")
        for name, spec in tensors.items():
            if name not in specs:
                raise PayloadError(f"{self._source}: tensor {quoted(name)} was not expected from this node")
            dtype, shape = specs[name]
            if spec.shape != shape:
                raise PayloadError(f"{self._source}: {name} has shape {spec.shape}, expected {shape}")
            if spec.dtype != dtype:
                raise PayloadError(f"{self._source}: {name} is {spec.dtype}, expected {dtype}")

    def check_sum(self, checksum: str) -> None:
        """Raises PayloadError unless this is the checksum of the file, and of all that was read of it so far."""
        try:
            found = (self._checksums or ReadChecksums()).of_file(self._file.fileno(), self._source)
        except (CheckpointError, OSError) as e:
            raise PayloadError(f"{self._source}: cannot be read: {e}") from e
        if found != checksum:
            raise PayloadError(f"{self._source}: its checksum is {found}, and was {checksum}")

    def check_finite(self) -> None:
        """Raises PayloadError naming the first tensor that would decode to a NaN or an infinity, or has a bad scale."""
        for name, (shape, codec) in self.forms.items():
            if codec.scaled:
                self._check_scales(name)
                continue
            for start, stop in row_slices(shape):
                if not is_finite(self._rows(name, start, stop)):
                    raise PayloadError(f"{self._source}: {name} has NaN or infinite values")

    def _check_scales(self, name: str) -> None:
        scales = self._rows(scale_name(name), 0, self.header.tensors[scale_name(name)].shape[0])
        # The largest that int8 can hold decides, so that the values themselves need not be read.
        if not (scales.ge(0).all() and scales.mul(-INT8_LEVELS - 1).isfinite().all()):
            raise PayloadError(f"{self._source}: {name} has a scale that is negative or gives infinite values")

    def close(self) -> None:
        self._file.close()
