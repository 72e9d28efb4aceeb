"""The safetensors format: an 8-byte little-endian length, a JSON header of that length, then raw tensor bytes.

Used at rest and on the wire, so parsing is strict and bounded: headers come from files and peers we don't trust.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from spes_mega.errors import CheckpointError
from spes_mega.quoting import quoted

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 8
_KEPT_HEADERS = 32
CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a header; `start` and `stop` count bytes from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A parsed header: tensors in the order of their bytes, metadata, and where the data starts and ends."""

    tensors: Mapping[str, TensorSpec]
    metadata: Mapping[str, str]
    data_start: int

    @property
    def data_bytes(self) -> int:
        return max((spec.stop for spec in self.tensors.values()), default=0)

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes


def byte_count(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor."""
    return math.prod(shape) * dtype.itemsize


def pack_header(specs: Specs, metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header for tensors whose bytes follow in the order of `specs`."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in specs.items():
        end = offset + byte_count(dtype, shape)
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the format keeps the data 8-byte aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(prefix: bytes, source: str, limit: int = MAX_HEADER_BYTES) -> int:
    """Length of the JSON header, from a file's first 8 bytes. Raises CheckpointError over `limit`."""
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{source}: only {len(prefix)} bytes: truncated, or not a safetensors file")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if not 2 <= length <= limit:
        raise CheckpointError(f"{source}: a header of {length} bytes: not a safetensors file")
    return length


def parse_header(text: bytes, source: str) -> Header:
    """Parse the JSON header (without its length).

    Those parsed last are kept: from round to round the same ones come again, and each has thousands of tensors.

    Raises:
        CheckpointError: malformed JSON, repeated names, unknown dtypes, sizes that contradict each other,
            gaps or overlaps; the message names `source` and the tensor.
    """
    try:
        return _parsed(text)
    except CheckpointError as e:
        raise CheckpointError(f"{source}: {e}") from e.__cause__


@lru_cache(_KEPT_HEADERS)
def _parsed(text: bytes) -> Header:
    try:
        raw = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"the safetensors header is not valid JSON: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError("the safetensors header is not a JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ must map strings to strings")
    specs = {name: _parse_spec(name, entry) for name, entry in raw.items()}
    specs = dict(sorted(specs.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_contiguous(specs)
    return Header(specs, metadata, LENGTH_BYTES + len(text))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in pairs:
        if name in out:
            raise ValueError(f"{quoted(name)} stands there twice")
        out[name] = value
    return out


def _parse_spec(name: str, entry: Any) -> TensorSpec:
    try:
        code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as e:
        raise CheckpointError(f"{quoted(name)}: dtype, shape and two data_offsets expected") from e
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(f"{quoted(name)}: dtype {quoted(str(code))} is not supported ({', '.join(DTYPES)})")
    numbers = (*shape, start, stop)
    if len(shape) > MAX_AXES or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(
            f"{quoted(name)}: shape and data_offsets must be whole numbers >= 0, with at most {MAX_AXES} axes"
        )
    if stop - start != byte_count(DTYPES[code], shape):
        raise CheckpointError(
            f"{quoted(name)}: {stop - start} bytes for {code} of shape {list(shape)}, "
            f"which takes {byte_count(DTYPES[code], shape)}"
        )
    return TensorSpec(DTYPES[code], shape, start, stop)


def _check_contiguous(specs: Mapping[str, TensorSpec]) -> None:
    end = 0
    for name, spec in specs.items():
        if spec.start != end:
            raise CheckpointError(f"{quoted(name)}: starts at byte {spec.start} where byte {end} was expected")
        end = spec.stop
