"""Which tensors a payload carries, and in what codec each."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from spes_mega.layout.storage.safetensors_format import byte_count, pack_header
from spes_mega.outer.codecs import FP32, Codec, CodecOf

SCALE_SUFFIX = ".scale"
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


class Form(NamedTuple):
    """How one tensor travels."""

    shape: Shape
    codec: Codec


Forms = Mapping[str, Form]


def forms_of(shapes: Shapes, codec_of: CodecOf) -> dict[str, Form]:
    return {name: Form(shape, codec_of(name)) for name, shape in shapes.items()}


def in_fp32(shapes: Shapes) -> dict[str, Form]:
    """The values themselves."""
    return forms_of(shapes, lambda name: FP32)


def scale_name(name: str) -> str:
    """Name of the tensor with the scales of another one's rows."""
    return name + SCALE_SUFFIX


def wire_specs(forms: Forms) -> dict[str, tuple[torch.dtype, Shape]]:
    """Names, dtypes and shapes of the tensors that really travel, in the order of their bytes."""
    specs: dict[str, tuple[torch.dtype, Shape]] = {}
    for name, (shape, codec) in forms.items():
        if codec.scaled:  # first: the values of an odd number of bytes would leave them unaligned
            specs[scale_name(name)] = (torch.float32, (shape[0] if len(shape) > 1 else 1,))
        specs[name] = (codec.wire_dtype, shape)
    return specs


def payload_header(forms: Forms, metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a payload that carries these tensors in this order."""
    return pack_header(wire_specs(forms), metadata)


def header_limit(forms: Forms) -> int:
    """Bytes that a header naming these tensors may have, generously; bounds what is read from a peer."""
    return 4096 + sum(2 * len(name.encode()) + 256 for name in wire_specs(forms))


def data_bytes(forms: Forms) -> int:
    """Bytes of these tensors on the wire, without the header."""
    return sum(byte_count(dtype, shape) for dtype, shape in wire_specs(forms).values())


class Bounds(NamedTuple):
    """Bytes that a payload may have at most, and those of its header."""

    payload: int
    header: int


def state_bounds(shapes: Shapes, down: CodecOf) -> Bounds:
    """Of anything that a hub may send of a state: each tensor as it is, or its change in the codec that goes down."""
    choices = in_fp32(shapes), forms_of(shapes, down)
    data = sum(max(data_bytes({name: forms[name]}) for forms in choices) for name in shapes)
    header = max(map(header_limit, choices))
    return Bounds(data + header, header)
