"""The model: Megatron-Core's GPTModel, its experts partitioned by ownership, and the map of its weights.

Importing this package imports torch and Megatron-Core.
"""

from spes_mega.model.megatron_patches import prepare_megatron

prepare_megatron()

from spes_mega.model.gpt import build  # noqa: E402
from spes_mega.model.loss import forward_logits, language_model_loss  # noqa: E402
from spes_mega.model.parallel import ensure_parallel_state  # noqa: E402
from spes_mega.model.partitioned_experts import reset_tokens_per_expert, tokens_per_expert  # noqa: E402
from spes_mega.model.router_losses import (  # noqa: E402
    set_router_loss_scale,
    take_router_losses,
    weigh_owned_experts,
)
from spes_mega.model.weight_map import WeightMap, export_weights, load_weights  # noqa: E402

__all__ = [
    "WeightMap",
    "build",
    "ensure_parallel_state",
    "export_weights",
    "forward_logits",
    "language_model_loss",
    "load_weights",
    "reset_tokens_per_expert",
    "set_router_loss_scale",
    "take_router_losses",
    "tokens_per_expert",
    "weigh_owned_experts",
]
