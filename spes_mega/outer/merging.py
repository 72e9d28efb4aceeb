"""The expert-merging warm-up (arXiv 2602.11543): early in training experts take from the experts most like them.

Axes: E experts of a layer, R rows of an expert matrix, C its columns. Everything works on slices of rows, so
that memory depends on the slice and not on the model.
"""

from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spes_mega.outer.codecs import kernels

Donors = tuple[tuple[int, ...], ...]
SIMILARITY_MATRIX = "gate_proj"
"""The matrix whose flattened values are compared (the gated FFN's input projection)."""

_GRAM_COLUMNS = 1 << 15
"""Values of each expert that are converted to fp64 at once."""


def merge_alpha(step: int, *, alpha: float, merge_steps: int) -> float:
    """Weight of the donors at `step`: alpha * (1 - step / merge_steps), and 0 from merge_steps on."""
    return alpha * (1 - step / merge_steps) if step < merge_steps else 0.0


def merge_due(previous_step: int, step: int, *, interval: int, merge_steps: int) -> bool:
    """Whether a merge belongs between these steps: a multiple of interval lies in (previous_step, step]."""
    return step < merge_steps and step // interval > previous_step // interval


def new_gram(num_experts: int) -> Tensor:
    """An empty Gram matrix, fp64 [E, E]."""
    return torch.zeros(num_experts, num_experts, dtype=torch.float64)


def add_to_gram(gram_EE: Tensor, rows_ERC: Tensor) -> None:
    """Add the inner products of one slice of all experts' rows; slices may be of any size."""
    for flat in rows_ERC.flatten(1).split(_GRAM_COLUMNS, dim=1):
        exact = flat.to(torch.float64)
        gram_EE.addmm_(exact, exact.T)


def cosine_similarity(gram_EE: Tensor) -> Tensor:
    """Cosine similarity of all pairs from their inner products, fp64 [E, E]; 0 for an expert that is all zeros."""
    norm_E = gram_EE.diagonal().sqrt()
    scale_E = torch.where(norm_E > 0, 1 / norm_E, 0)
    return gram_EE * scale_E[:, None] * scale_E[None, :]


def choose_donors(similarity_EE: Tensor, count: int) -> Donors:
    """The `count` most similar other experts of each expert, ascending; ties go to the lower number.

    With fewer than count + 1 experts these are all the others, and with one expert nobody.
    """
    rows = similarity_EE.tolist()
    return tuple(
        tuple(sorted(sorted((e for e in range(len(rows)) if e != own), key=lambda e: (-row[e], e))[:count]))
        for own, row in enumerate(rows)
    )


def merge_rows(rows_ERC: Tensor, donors: Donors, alpha: float, out: Tensor | None = None) -> Tensor:
    """own + alpha * mean(donor - own) for one slice of all experts, from the values before any merge.

    fp32 in and out. An expert that equals its donors, or has none, keeps its values exactly.
    """
    return _merge(rows_ERC, donors, alpha, 1.0, out)


def merge_changes(rows_ERC: Tensor, donors: Donors, alpha: float, out: Tensor | None = None) -> Tensor:
    """alpha * mean(donor - own): what a merge adds to each expert."""
    return _merge(rows_ERC, donors, alpha, 0.0, out)


def _merge(rows_ERC: Tensor, donors: Donors, alpha: float, kept: float, out: Tensor | None) -> Tensor:
    merged = torch.empty(rows_ERC.shape) if out is None else out
    flat, into = (values.numpy().reshape(len(donors), -1) for values in (rows_ERC.contiguous(), merged))
    begins = np.cumsum([0, *map(len, donors)])
    kernels().merge(flat, np.array([*chain(*donors)], dtype=np.int64), begins, alpha, kept, into)
    return merged


class Similarity(NamedTuple):
    """How alike different experts of a layer are: mean and largest cosine similarity."""

    mean: float
    max: float


def similarity_of(similarity_EE: Tensor) -> Similarity:
    """Mean and maximum over the pairs of different experts; needs at least two."""
    first, second = torch.triu_indices(len(similarity_EE), len(similarity_EE), offset=1)
    pairs = similarity_EE[first, second]
    return Similarity(pairs.mean().item(), pairs.max().item())


def mean_similarity(layers: Mapping[int, Similarity]) -> float | None:
    """The mean over the layers; None without any."""
    return sum(layer.mean for layer in layers.values()) / len(layers) if layers else None
