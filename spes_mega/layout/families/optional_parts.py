"""Parts that one family always has and another never: what stands in a checkpoint when they do nothing.

A bias of zeros adds nothing. A shared expert of zeros (its gate too) adds nothing and stays so: with zeros on both
sides of every product, each of its gradients is exactly zero, and weight decay keeps zeros zero. So a model that was
given one for the sake of its family trains as if it had none.
"""

import re
from collections.abc import Callable

import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.layout.names import expected_tensors, shared_expert_name
from spes_mega.recipe import ModelSection

UNUSED_SHARED_EXPERT_WIDTH = 16
"""The smallest that fused kernels take as it is (alignment to 16, and tensor parallelism of up to 16)."""

_OPTIONAL = re.compile(
    r".*\.(?:(?P<qkv_bias>[qkv]_proj\.bias)|(?P<shared_expert>shared_expert\.\w+\.weight|shared_expert_gate\.weight))"
)


def optional_part(name: str) -> str | None:
    """The part, "qkv_bias" or "shared_expert", that a canonical name belongs to; None for what no model can lack."""
    match = _OPTIONAL.fullmatch(name)
    return match.lastgroup if match else None


def unused_parts(model: ModelSection, read: Callable[[str], torch.Tensor]) -> frozenset[str]:
    """The optional parts of `model` that do nothing: biases that are all zeros, shared experts with a zero matrix.

    Any zero matrix will do, for a shared expert's output is down(silu(gate) * up).

    Args:
        read: gives the tensor of a canonical name; called for optional parts alone.
    """
    family = FAMILIES[model.family]
    unused = set()
    if family.qkv_bias:
        biases = (name for name in expected_tensors(model) if optional_part(name) == "qkv_bias")
        if all(_is_zero(read(name)) for name in biases):
            unused.add("qkv_bias")
    if family.has_shared_expert:
        layers = [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]
        if all(
            any(_is_zero(read(shared_expert_name(n, m))) for m in ("down_proj", "gate_proj", "up_proj")) for n in layers
        ):
            unused.add("shared_expert")
    return frozenset(unused)


def _is_zero(tensor: torch.Tensor) -> bool:
    return not tensor.any()


def shared_expert_width(model: ModelSection, to: str) -> int | None:
    """FFN width of the shared expert that the model has as one of the family `to`; an unused one where it has none."""
    if not FAMILIES[to].has_shared_expert:
        return None
    return model.shared_expert_hidden_size or UNUSED_SHARED_EXPERT_WIDTH


def check_holds(model: ModelSection, to: str, unused: frozenset[str] = frozenset()) -> None:
    """Raises CheckpointError with the reason where the family `to` cannot hold `model` (see `Family.refuses`)."""
    if reason := FAMILIES[to].refuses(model, FAMILIES[model.family], unused):
        able = [name for name, family in FAMILIES.items() if family.is_moe == FAMILIES[to].is_moe]
        able = [name for name in able if not FAMILIES[name].refuses(model, FAMILIES[model.family], unused)]
        advice = f"; {' or '.join(able)} can" if able else ""
        raise CheckpointError(f"{to} cannot hold this {model.family} model: {reason}{advice}")
