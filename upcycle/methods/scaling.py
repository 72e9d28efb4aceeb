"""Where a factor on an expert's output is put so that it changes nothing else.

A gated FFN is down(act(gate x) * (up x)): linear in `up` and in `down`, but not in `gate`. So a factor c on the output
is a factor a on up_proj and b on down_proj with a * b = c, and gate_proj keeps its bits.
"""

import math

import torch


def factors(scale: int) -> tuple[float, float]:
    """(a, b) for up_proj and down_proj, as equal as they can be.

    A power of two is divided into powers of two (8 = 4 * 2), since those change no mantissa: the result is exact in
    bf16 and fp16 too. Anything else gives its square root to both.
    """
    if is_power_of_two(scale):
        exponent = scale.bit_length() - 1
        return float(2 ** -(-exponent // 2)), float(2 ** (exponent // 2))
    return math.sqrt(scale), math.sqrt(scale)


def is_power_of_two(scale: int) -> bool:
    return scale & (scale - 1) == 0


def scaled(part: torch.Tensor, matrix: str, scale: int) -> torch.Tensor:
    """`part` of the dense matrix, multiplied so that the expert's output grows by `scale`; fp32 where it changes."""
    up, down = factors(scale)
    factor = {"gate_proj": 1.0, "up_proj": up, "down_proj": down}[matrix]
    return part if factor == 1.0 else part.float() * factor
