"""The router's auxiliary losses, which Megatron-Core adds to the gradient by itself.

In training every router attaches `aux_loss_coeff` * balance + `router_z_loss_coeff` * z to its output: the losses
never appear in the loss that the caller sees, only in the gradient (times a scale) and in a tracker, without their
coefficients. Scale and tracker are global to the process.
"""

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe import moe_utils


class RouterLosses(NamedTuple):
    """Means over MoE layers and forward passes, without coefficients. `balance` is 1 when experts share evenly."""

    balance: float
    z: float


def set_router_loss_scale(scale: float) -> None:
    """Multiply the gradient of the router's losses; 1 / grad_accumulation where the main loss is averaged so."""
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(scale)


def take_router_losses(num_moe_layers: int, num_forwards: int) -> RouterLosses:
    """This rank's losses of the `num_forwards` training passes since the last call; a coefficient of 0 gives 0."""
    entries = _tracked()
    sums = [_values(entries[name]) if name in entries else None for name in ("load_balancing_loss", "z_loss")]
    count = max(1, num_moe_layers * num_forwards)
    losses = RouterLosses(*(0.0 if values is None else values.sum().item() / count for values in sums))
    for values in sums:
        if values is not None:
            values.zero_()
    return losses


def forget_router_losses() -> None:
    """Drop the tracker's entries: they have the number of layers of the model that ran first in this process."""
    _tracked().clear()


def _tracked() -> dict[str, Any]:
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # since 0.17
    except ImportError:
        return moe_utils.get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics


def _values(entry: Any) -> torch.Tensor:
    return entry["values"] if isinstance(entry, dict) else entry.values
