"""How Megatron-Core fuses several canonical tensors into one parameter.

A fusion is a function `parts(fused, model)` that returns, for the canonical tensors in order, *views* into the
fused tensor. The views define both directions: to join is to copy into them, to split is to copy out of them.
A view may have more axes than its canonical tensor, never another order of elements.
"""

from collections.abc import Callable

import torch

from spes_mega.recipe import ModelSection

Fusion = Callable[[torch.Tensor, ModelSection], tuple[torch.Tensor, ...]]


def copy(fused: torch.Tensor, model: ModelSection) -> tuple[torch.Tensor, ...]:
    """One canonical tensor, as it is."""
    return (fused,)


def gated(fused: torch.Tensor, model: ModelSection) -> tuple[torch.Tensor, ...]:
    """Gate and up projection, stacked: [2*F, D] -> [F, D], [F, D]."""
    return fused.tensor_split(2)


def qkv(fused: torch.Tensor, model: ModelSection) -> tuple[torch.Tensor, ...]:
    """Query, key and value projections (or their biases), interleaved by KV group.

    For each of the G KV heads in turn: its H/G query heads, its key head, its value head, of head_dim rows each.
    [(H + 2*G)*head_dim, ...] -> [G, H/G*head_dim, ...], [G, head_dim, ...], [G, head_dim, ...].
    """
    queries = model.num_heads // model.num_kv_heads * model.head_dim
    grouped = fused.view(model.num_kv_heads, queries + 2 * model.head_dim, *fused.shape[1:])
    return grouped.split([queries, model.head_dim, model.head_dim], dim=1)
