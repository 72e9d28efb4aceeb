"""The mean over nodes: FedAvg, which is SGD with learning rate 1 on the mean pseudo-gradient."""

from collections.abc import Iterable

import torch
from torch import Tensor


def average(parts: Iterable[Tensor]) -> Tensor:
    """Mean of equally shaped fp32 tensors, as fp32.

    Sums are in fp64, rounded once at the end, so that the mean of one tensor, or of equal ones, is that tensor bit
    for bit: sums of up to 2**29 equal fp32 values are exact in fp64. Parts are taken one at a time, so that memory
    does not grow with their number. Give them in a fixed order (that of node numbers) and the result does not depend
    on the order in which they came.

    Raises:
        ValueError: no parts, or parts of different shapes.
    """
    total: Tensor | None = None
    first: Tensor | None = None
    count = 0
    for part in parts:
        count += 1
        if first is None:
            first = part
            continue
        if part.shape != first.shape:
            raise ValueError(f"cannot average shapes {tuple(first.shape)} and {tuple(part.shape)}")
        if total is None:
            total = first.to(torch.float64)
        total.add_(part)
    if first is None:
        raise ValueError("the mean of no tensors is not defined")
    if total is None:
        return first.to(torch.float32)
    return total.div_(count).to(torch.float32)
