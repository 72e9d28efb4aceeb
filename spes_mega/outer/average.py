"""The mean over nodes: FedAvg, which is SGD with learning rate 1 on the mean pseudo-gradient."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spes_mega.outer.codecs import kernels


def average(parts: Iterable[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Mean of equally shaped fp32 tensors, as fp32; weighted if `weights` are given and not all 0.

    Sums are in fp64, rounded once at the end, so that the mean of one tensor, or of equal ones, is that tensor bit
    for bit: sums of up to 2**29 equal fp32 values are exact in fp64. Parts are taken one at a time, so that memory
    does not grow with their number. Give them in a fixed order (that of node numbers) and the result does not depend
    on the order in which they came.

    Raises:
        ValueError: no parts, parts of different shapes, or not one weight for each.
    """
    weighted = weights is not None and sum(weights) > 0
    first: Tensor | None = None
    total: Any = None
    weight_sum: float = 0
    for part, given in zip(parts, weights if weights is not None else repeat(1), strict=weights is not None):
        weight = float(given) if weighted else 1.0
        weight_sum += weight
        if first is None:
            first, first_weight = part, weight
            continue
        if part.shape != first.shape:
            raise ValueError(f"cannot average shapes {tuple(first.shape)} and {tuple(part.shape)}")
        if total is None:
            total = np.full(first.numel(), -0.0)  # which leaves a sum of -0.0 as it is
            kernels().add_weighted(total, _flat(first), first_weight)
        kernels().add_weighted(total, _flat(part), weight)
    if first is None:
        raise ValueError("the mean of no tensors is not defined")
    if total is None:
        return first.to(torch.float32)
    out = torch.empty(first.shape)
    kernels().divide(total, weight_sum, _flat(out))
    return out


def _flat(values: Tensor) -> Any:
    return values.contiguous().numpy().reshape(-1)
