"""Rotary position embedding of queries and keys, in place of Megatron-Core's composed one.

That one joins what it has rotated with an empty rest, and leaves to autograd a dozen passes over queries and keys.

Axes: S sequence, B batch, N heads, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply_rotary(heads_SBND: Tensor, freqs_S11D: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair (x_i, x_(i + D/2)) by an angle; takes the place of what Megatron calls its fused kernel.

    `freqs` are angles, fp32, the same in both halves. Sines and cosines are rounded to the dtype of the heads.
    """
    assert not interleaved, "pairs of neighbours are rotated in no family"
    assert freqs_S11D.shape[-1] == heads_SBND.shape[-1], "all of a head is rotated"
    cos, sin = (values.to(heads_SBND.dtype) for values in (freqs_S11D.cos(), freqs_S11D.sin()))
    rotated: Tensor = _Rotation.apply(heads_SBND, cos, sin)
    return rotated


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin, 1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, -1), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """By the angles, or with sign -1 back."""
    half = heads.shape[-1] // 2
    out = heads * cos
    out[..., :half].addcmul_(heads[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(heads[..., :half], sin[..., half:], value=sign)
    return out
