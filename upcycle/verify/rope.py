"""Rotary position embedding and its variants, as config.json's `rope_scaling` describes them.

RoPE (Su et al., arXiv 2104.09864), linear (Chen et al., arXiv 2306.15595), YaRN (Peng et al., arXiv 2309.00071),
LongRoPE (Ding et al., arXiv 2402.13753), and Llama 3.1's. D is the head dimension.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from spes_mega.errors import CheckpointError
from spes_mega.recipe import ModelSection


def rotations(model: ModelSection, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for positions 0 .. length-1: fp32 [length, D] each, times the variant's attention factor.

    Raises:
        CheckpointError: a variant that is not known, a key that its description lacks, or numbers that lead nowhere.
    """
    scaling = model.rope_scaling or {}
    kind = scaling.get("rope_type", "default")
    if kind not in _VARIANTS:
        raise CheckpointError(f"RoPE variant {kind!r} is not supported here (supported: {', '.join(_VARIANTS)})")
    plain = 1.0 / model.rope_theta ** (torch.arange(0, model.head_dim, 2, dtype=torch.float32) / model.head_dim)
    try:
        frequencies, factor = _VARIANTS[kind](model, scaling, plain, length)
    except KeyError as e:
        raise CheckpointError(f"config.json: the RoPE variant {kind} needs the key {e}") from e
    except (ArithmeticError, ValueError) as e:
        raise CheckpointError(f"config.json: the RoPE variant {kind} cannot be computed from its numbers: {e}") from e
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn [..., length, D]: dimension i with dimension i + D/2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


Result = tuple[torch.Tensor, float]
Variant = Callable[[ModelSection, dict[str, Any], torch.Tensor, int], Result]


def _default(model: ModelSection, scaling: dict[str, Any], plain: torch.Tensor, length: int) -> Result:
    return plain, 1.0


def _linear(model: ModelSection, scaling: dict[str, Any], plain: torch.Tensor, length: int) -> Result:
    return plain / scaling["factor"], 1.0


def _dynamic(model: ModelSection, scaling: dict[str, Any], plain: torch.Tensor, length: int) -> Result:
    """Like plain RoPE up to the length that the model is declared for, beyond it with a larger base."""
    if length <= model.max_seq_len:
        return plain, 1.0
    dim, factor = model.head_dim, scaling["factor"]
    growth = (factor * length / model.max_seq_len - (factor - 1)) ** (dim / (dim - 2))
    return plain * growth ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0


def _yarn(model: ModelSection, scaling: dict[str, Any], plain: torch.Tensor, length: int) -> Result:
    """Slow rotations are interpolated, fast ones kept, with a ramp in between."""
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or model.max_seq_len / original

    def dimension_of(turns: float) -> float:
        return model.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, model.head_dim - 1)
    ramp = (torch.arange(model.head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    ramp = ramp.clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention(scaling, factor)


def _yarn_attention(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


def _longrope(model: ModelSection, scaling: dict[str, Any], plain: torch.Tensor, length: int) -> Result:
    """Each frequency has its own factor, one for short and one for long texts."""
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or model.max_seq_len / original
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = scaling["long_factor"] if length > original else scaling["short_factor"]
    return plain / torch.tensor(factors, dtype=torch.float32), float(attention)


def _llama3(model: ModelSection, scaling: dict[str, Any], plain: torch.Tensor, length: int) -> Result:
    """Long wavelengths are stretched, short ones kept, with a smooth passage in between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - smooth) + plain * smooth, 1.0


_VARIANTS: dict[str, Variant] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
