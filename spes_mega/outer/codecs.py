"""In what precision weights travel.

fp32 carries the values themselves, so that nothing is lost and a lone node equals plain training bit for bit. The
lossy codecs, bf16 and int8, carry changes; whoever encodes keeps what rounding lost and adds it to the next change
(error feedback), so that over time nothing is lost either.

Everything works on whole rows (the first axis); a tensor of one axis is one row.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

INT8_LEVELS = 127


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


class Fp32Codec:
    """The values themselves."""

    name = "fp32"
    wire_dtype = torch.float32
    scaled = False
    lossless = True

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows.detach().to(device="cpu", dtype=torch.float32).contiguous(), None

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        return wire


class Bf16Codec:
    """Changes with 8 significant bits: off by at most a 256th of each value (its half step)."""

    name = "bf16"
    wire_dtype = torch.bfloat16
    scaled = False
    lossless = False

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        return rows.detach().to(device="cpu", dtype=torch.bfloat16).contiguous(), None

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        return wire.to(torch.float32)


class Int8Codec:
    """Changes as whole multiples, -127..127, of a 127th of the row's largest: off by at most half of that."""

    name = "int8"
    wire_dtype = torch.int8
    scaled = True
    lossless = False

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        values = rows.detach().to(device="cpu", dtype=torch.float32).contiguous()
        flat = values.reshape(rows.shape[0] if rows.dim() > 1 else 1, -1)
        # Several times as fast as aminmax, or abs and amax, along an axis.
        scale = torch.maximum(flat.amax(1), flat.amin(1).neg_()).div_(INT8_LEVELS)
        # A scale of 0 (a row of zeros, or of values too small to have one) must not divide: all of it is carried on.
        steps = torch.where(scale > 0, scale, torch.inf)
        # A scale below fp32's normal range is itself rounded, so that a quotient may be over the highest level.
        wire = (flat / steps[:, None]).round_().clamp_(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
        return wire.reshape(rows.shape), scale

    def decode(self, wire: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None, "int8 is scaled"
        values = wire.to(torch.float32)
        return values.mul_(scale.reshape(-1, *(1,) * (wire.dim() - 1)))


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
