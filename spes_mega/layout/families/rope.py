"""RoPE in a config.json: its base, and a variant with its numbers, in the spellings of transformers 4 and 5."""

import math
from typing import Any

from spes_mega.errors import CheckpointError, RecipeError
from spes_mega.recipe import ModelSection

_NUMBERS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Variants that transformers computes from config.json alone, in the same way for every family, with what they need."""
_WITH_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
_LISTS: dict[str, tuple[str, ...]] = {"longrope": ("short_factor", "long_factor")}

_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron-Core takes them to be; the same as in all published Llama 3 models."""


def llama3_factor(model: ModelSection) -> float | None:
    """Factor of the RoPE variant llama3; None for plain RoPE. Raises RecipeError naming a variant that cannot run."""
    if model.rope_scaling is None:
        return None
    variant = dict(model.rope_scaling)
    kind, factor = variant.pop("rope_type", variant.pop("type", None)), variant.pop("factor", None)
    if kind != "llama3" or variant != _LLAMA3_CONSTANTS or not factor:
        raise RecipeError(
            f"model.rope_scaling: RoPE variant {kind!r} with {variant} cannot be run here, only plain RoPE, and llama3 "
            f"with {_LLAMA3_CONSTANTS} and any factor. Converting and upcycling carry it through unchanged; remove "
            "rope_scaling if the model is to run with plain RoPE"
        )
    return float(factor)


def read_rope(raw: dict[str, Any], default_theta: Any, head_dim: int) -> tuple[float, dict[str, Any] | None]:
    """Base and variant; the variant always with `rope_type`, and None when there is none.

    Args:
        default_theta: the base where config.json names none; None if it has to.

    Raises:
        CheckpointError: a value is missing, of another kind, or contradicts another; names the key.
    """
    new, old = dict(raw.get("rope_parameters") or {}), dict(raw.get("rope_scaling") or {})
    given = (new.pop("rope_theta", None), old.pop("rope_theta", None), raw.get("rope_theta"))
    thetas = [_positive("rope_theta", theta) for theta in given if theta is not None]
    if any(theta != thetas[0] for theta in thetas):
        raise CheckpointError(f"config.json: rope_theta is given as {' and as '.join(map(str, thetas))}")
    for rope in (new, old):
        _fill_original_length(rope, raw)
    variants = [v for v in (_variant(rope, head_dim) for rope in (new, old)) if v is not None]
    if len(variants) == 2 and variants[0] != variants[1]:
        raise CheckpointError("config.json: rope_parameters and rope_scaling contradict each other")
    if not thetas and default_theta is None:
        raise CheckpointError("config.json: the key 'rope_theta' is missing")
    return float(thetas[0] if thetas else default_theta), variants[0] if variants else None


def _fill_original_length(rope: dict[str, Any], raw: dict[str, Any]) -> None:
    """As transformers does it for these families, where the same key beside `rope` does not count."""
    key = "original_max_position_embeddings"
    if rope.get("rope_type", rope.get("type")) in _WITH_ORIGINAL_LENGTH and rope.get(key) is None:
        rope[key] = raw.get("max_position_embeddings")


def _variant(rope: dict[str, Any], head_dim: int) -> dict[str, Any] | None:
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", kind) or "default"
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    if kind == "default":
        if rope:
            raise CheckpointError(f"config.json: the default RoPE has no {', '.join(sorted(rope))}")
        return None
    if not isinstance(kind, str) or kind not in _NUMBERS:
        known = ", ".join(("default", *_NUMBERS))
        raise CheckpointError(f"config.json: RoPE variant {kind!r} is not supported (supported: {known})")
    for key in (*_NUMBERS[kind], *_LISTS.get(kind, ())):
        if rope.get(key) is None:
            raise CheckpointError(f"config.json: the RoPE variant {kind} needs the key {key!r}")
    for key, value in rope.items():
        _check_value(key, value, _NUMBERS[kind], head_dim)
    return {"rope_type": kind, **rope}


def _check_value(key: str, value: Any, needed: tuple[str, ...], head_dim: int) -> None:
    if isinstance(value, list):
        if len(value) != head_dim // 2:
            raise CheckpointError(f"config.json: {key} has {len(value)} numbers; head_dim / 2 = {head_dim // 2} needed")
        for number in value:
            _positive(key, number)
    elif key in needed:
        _positive(key, value)
    elif key.endswith("_factor") and key.startswith(("short", "long")):
        raise CheckpointError(f"config.json: {key} is {value!r}; a list of {head_dim // 2} numbers was expected")
    elif not (value is None or isinstance(value, bool) or _is_finite(value)):
        raise CheckpointError(f"config.json: {key} is {value!r}; a number was expected")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not _is_finite(value) or value <= 0:
        raise CheckpointError(f"config.json: {key} is {value!r}; a number above 0 was expected")
    return float(value)
