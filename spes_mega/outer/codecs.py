"""In what precision weights travel.

fp32 carries the values themselves, so that nothing is lost and a lone node equals plain training bit for bit. The
lossy codecs, bf16 and int8, carry changes; whoever encodes keeps what rounding lost and adds it to the next change
(error feedback), so that over time nothing is lost either.

Everything works on whole rows (the first axis); a tensor of one axis is one row.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

INT8_LEVELS = 127
_PLUS, _MINUS = np.float32(1), np.float32(-1)


class Codec(Protocol):
    """How the rows of one tensor are put on the wire; both sides know it by its name."""

    @property
    def name(self) -> str: ...

    @property
    def wire_dtype(self) -> torch.dtype:
        """Of the tensor on the wire that has the shape of the values."""
        ...

    @property
    def scaled(self) -> bool:
        """Whether a second tensor, fp32 with one scale a row, travels along."""
        ...

    @property
    def lossless(self) -> bool:
        """True: it carries values; False: changes, rounded."""
        ...

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of any floating dtype to contiguous rows of wire_dtype, and their scales if it is scaled."""
        ...

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        """Rows of wire_dtype (and scales) to fp32 of the same shape."""
        ...


class LossyCodec(Codec, Protocol):
    """What is done with changes without making decoded rows of them; all in place, on contiguous fp32 rows."""

    def add(self, onto: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        """onto + what `decode` gives."""
        ...

    def subtract(self, change: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        """change - what `decode` gives: of a change that was encoded, what rounding lost."""
        ...

    def move(self, before: Tensor, change: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        """Publish a change that was encoded: `before` takes what `decode` gives, `change` keeps the rest.

        That is change + (before - after), and so has also what rounding the sum lost.
        """
        ...


class Fp32Codec:
    """The values themselves."""

    name = "fp32"
    wire_dtype = torch.float32
    scaled = False
    lossless = True

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return _in_fp32(rows), None

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        return wire


class Bf16Codec:
    """Changes with 8 significant bits: off by at most a 256th of each value (its half step)."""

    name = "bf16"
    wire_dtype = torch.bfloat16
    scaled = False
    lossless = False

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        values = _in_fp32(rows)
        wire = torch.empty(values.shape, dtype=torch.bfloat16)
        kernels().bf16_encode(_rows(values, np.uint32), _halves(wire))
        return wire, None

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        return wire.to(torch.float32)

    def add(self, onto: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        kernels().bf16_add(_rows(onto), _halves(wire), _PLUS)

    def subtract(self, change: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        kernels().bf16_add(_rows(change), _halves(wire), _MINUS)

    def move(self, before: Tensor, change: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        kernels().bf16_move(_rows(before), _rows(change), _halves(wire))


class Int8Codec:
    """Changes as whole multiples, -127..127, of a 127th of the row's largest: off by at most half of that."""

    name = "int8"
    wire_dtype = torch.int8
    scaled = True
    lossless = False

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        values = _in_fp32(rows)
        wire = torch.empty(values.shape, dtype=torch.int8)
        scale = torch.empty(values.shape[0] if values.dim() > 1 else 1)
        steps = scale.numpy()
        kernels().int8_scales(_rows(values, np.int32), steps, steps.view(np.int32))
        kernels().int8_encode(_rows(values), steps, _rows(wire))
        return wire, scale

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        values = torch.empty(wire.shape)
        kernels().int8_decode(_rows(wire), _given(scale).numpy(), _rows(values))
        return values

    def add(self, onto: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        kernels().int8_add(_rows(onto), _rows(wire), _given(scale).numpy(), _PLUS)

    def subtract(self, change: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        kernels().int8_add(_rows(change), _rows(wire), _given(scale).numpy(), _MINUS)

    def move(self, before: Tensor, change: Tensor, wire: Tensor, scale: Tensor | None) -> None:
        kernels().int8_move(_rows(before), _rows(change), _rows(wire), _given(scale).numpy())


def kernels() -> ModuleType:
    """They take a second to load, which only those who need them should wait."""
    return import_module("spes_mega.outer.kernels")


def _rows(values: Tensor, bits: type[np.generic] | None = None) -> Any:
    """The memory of contiguous rows as an array [R, C], or that of their bits."""
    assert values.is_contiguous(), "a copy would take the result"
    array = values.numpy()
    rows = array.reshape(array.shape[0] if array.ndim > 1 else 1, -1)
    return rows if bits is None else rows.view(bits)


def _halves(wire: Tensor) -> Any:
    """The bits of bf16 rows, which numpy does not know."""
    return _rows(wire.view(torch.int16), np.uint16)


def _given(scale: Tensor | None) -> Tensor:
    assert scale is not None, "the codec is scaled"
    return scale


def _in_fp32(rows: Tensor) -> Tensor:
    return rows.detach().to(device="cpu", dtype=torch.float32).contiguous()


FP32 = Fp32Codec()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, Bf16Codec(), Int8Codec())}
CODEC_OF_DTYPE: dict[torch.dtype, Codec] = {codec.wire_dtype: codec for codec in CODECS.values()}
CodecOf = Callable[[str], Codec]
"""The codec of a tensor by its name."""


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises ValueError naming the known ones."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: known are {', '.join(CODECS)}")
    return CODECS[name]


def lossy(codec: Codec) -> LossyCodec:
    """A codec that is known to carry changes."""
    assert isinstance(codec, Bf16Codec | Int8Codec), f"{codec.name} carries values"
    return codec
