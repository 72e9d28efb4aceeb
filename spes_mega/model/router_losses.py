"""The router's auxiliary losses, which Megatron-Core adds to the gradient by itself.

In training every router attaches `aux_loss_coeff` / L * balance + `router_z_loss_coeff` * z to its output, L being the
number of MoE layers: the losses never appear in the loss that the caller sees, only in the gradient (times a scale) and
in a tracker, without their coefficients. Scale and tracker are global to the process.
"""

from typing import NamedTuple

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import nn

from spes_mega.model.megatron_patches import router_loss_sums, weigh_balance_loss


class RouterLosses(NamedTuple):
    """Means over MoE layers and forward passes, without coefficients.

    `balance` of a layer is E * sum over experts of (its share of the routed tokens) * (its mean probability): 1 where
    experts share evenly (MegaBlocks; transformers' own, on one layer, is top_k times as much).
    """

    balance: float
    z: float


def set_router_loss_scale(scale: float) -> None:
    """Multiply the gradient of the router's losses; 1 / grad_accumulation where the main loss is averaged so."""
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))


def take_router_losses(num_moe_layers: int, num_forwards: int) -> RouterLosses:
    """This rank's losses of the `num_forwards` training passes since the last call; a coefficient of 0 gives 0."""
    kept = router_loss_sums()
    sums = [kept.get(name) for name in ("load_balancing_loss", "z_loss")]
    count = max(1, num_moe_layers * num_forwards)
    losses = RouterLosses(*(0.0 if values is None else values.sum().item() / count for values in sums))
    for values in sums:
        if values is not None:
            values.zero_()
    return losses


def weigh_owned_experts(model: nn.Module, weight: float) -> None:
    """Multiply the terms of owned experts in the balance loss of every layer by `weight`, from the next pass on.

    That of the reference's `using_decayed_aux_loss`, which multiplies their tokens: it is the same product.
    """
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        owned = [run.owned for run in layer.experts.runs for _ in range(run.size)]
        weigh_balance_loss(layer.router, torch.tensor([weight if mine else 1.0 for mine in owned]))
