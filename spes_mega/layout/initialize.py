"""Random weights for training from scratch, and the keyed randomness that everything random here uses."""

import hashlib
import math

import torch

from spes_mega.recipe import ModelSection

_SCALED = ("o_proj.weight", "down_proj.weight")


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator keyed by (seed, name), so that what is drawn depends on no order, thread or shard."""
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))


def initial_tensor(model: ModelSection, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A freshly drawn fp32 tensor of a canonical name.

    Norms are 1, biases 0, matrices N(0, init_std); projections into the residual stream are scaled by
    1 / sqrt(2 * num_layers) so that its variance doesn't grow with depth (GPT-2).
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(".bias"):
        return torch.zeros(shape)
    std = model.init_std / math.sqrt(2 * model.num_layers) if name.endswith(_SCALED) else model.init_std
    return torch.randn(shape, generator=generator(seed, name)) * std
