"""Random weights for training from scratch, and the keyed randomness that everything random here uses."""

import hashlib
import math

import torch

from spes_mega.recipe import ModelSection

_CUT = 3
"""Standard deviations at which truncated weights are cut."""
_AT_ONCE = 1 << 22
_SCALED = ("o_proj.weight", "down_proj.weight")


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator keyed by (seed, name), so that what is drawn depends on no order, thread or shard."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))


def initial_tensor(model: ModelSection, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A freshly drawn fp32 tensor of a canonical name.

    Norms are 1, biases 0, matrices N(0, init_std). With `init: scaled` projections into the residual stream have
    init_std / sqrt(2 * num_layers), so that its variance doesn't grow with depth (GPT-2); with `init: truncated` all
    matrices are cut at 3 init_std, and none is scaled (OLMoE, SPES).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if model.init == "truncated":
        return _truncated(shape, generator(seed, name)).mul_(model.init_std)
    std = model.init_std / math.sqrt(2 * model.num_layers) if name.endswith(_SCALED) else model.init_std
    return torch.randn(shape, generator=generator(seed, name)) * std


def _truncated(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Draw N(0, 1), and again what lies beyond the cut; torch's own takes four times the tensor's memory for it."""
    drawn = torch.randn(shape, generator=random)
    for part in drawn.view(-1).split(_AT_ONCE):
        while len(outside := (part.abs() > _CUT).nonzero().flatten()):
            part[outside] = torch.randn(len(outside), generator=random)
    return drawn
