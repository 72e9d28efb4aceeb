"""In what precision weights travel.

A codec turns a canonical fp32 tensor into the tensor that goes on the wire, and back. fp32 sends the values
themselves, so that nothing is lost and a lone node equals plain training bit for bit.
"""

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """How one tensor is put on the wire; both sides know it by its name."""

    @property
    def name(self) -> str: ...

    @property
    def wire_dtype(self) -> torch.dtype: ...

    def encode(self, values: Tensor) -> Tensor:
        """Any floating dtype to a contiguous tensor of wire_dtype of the same shape."""
        ...

    def decode(self, wire: Tensor) -> Tensor:
        """A tensor of wire_dtype to fp32 of the same shape."""
        ...


class Fp32Codec:
    """The values themselves."""

    name = "fp32"
    wire_dtype = torch.float32

    def encode(self, values: Tensor) -> Tensor:
        return values.detach().to(device="cpu", dtype=torch.float32).contiguous()

    def decode(self, wire: Tensor) -> Tensor:
        return wire


FP32 = Fp32Codec()
CODECS: dict[str, Codec] = {FP32.name: FP32}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises ValueError naming the known ones."""
    if name not in CODECS:
        raise ValueError(f"unknown codec {name!r}: known are {', '.join(CODECS)}")
    return CODECS[name]
