"""Builds Megatron-Core's GPTModel from a recipe."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from spes_mega.errors import RecipeError
from spes_mega.model.attention import SDPAttention
from spes_mega.model.config import transformer_config, use_transformer_engine
from spes_mega.model.parallel import ensure_parallel_state
from spes_mega.model.partitioned_experts import PartitionedExperts
from spes_mega.model.router_losses import forget_router_losses
from spes_mega.recipe import ModelSection, Recipe


def build(recipe: Recipe, owned: Iterable[int] | None = None, device: torch.device | str | None = None) -> GPTModel:
    """Build the recipe's model, dense or Mixture-of-Experts, with experts partitioned by ownership.

    All parameters are in `train.dtype` on `device` (default: the current CUDA device where there is one, else the
    CPU). None has its values yet: each is filled with NaN until `load_weights` fills it, so that no forgotten
    weight can pass for a trained one. On the device `meta` nothing is allocated.

    Args:
        recipe: model, and of `train` the dtype and the coefficients of the router's losses.
        owned: global numbers of the experts to train in every MoE layer; None: all of them.

    Raises:
        RecipeError: an owned expert does not exist, or the model asks for what is not supported; names the field.
    """
    ensure_parallel_state()
    model = recipe.model
    device = _device(device)
    te = use_transformer_engine() and device.type == "cuda"
    config = transformer_config(recipe, device=device, te=te)
    with device:
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=_block_spec(config, model, _checked(model, owned), te=te),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_seq_len,
            position_embedding_type="rope",
            rotary_base=model.rope_theta,
            share_embeddings_and_output_weights=model.tie_embeddings,
        )
    gpt.to(dtype=config.params_dtype, device=device)  # torch's own norms ignore params_dtype, routers the device
    _poison(gpt)
    forget_router_losses()
    return gpt


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _checked(model: ModelSection, owned: Iterable[int] | None) -> frozenset[int]:
    experts = frozenset(range(model.num_experts))
    chosen = experts if owned is None else frozenset(owned)
    if unknown := sorted(chosen - experts):
        raise RecipeError(f"owned experts: there is no expert {unknown[0]} (model.num_experts {model.num_experts})")
    return chosen


def _block_spec(
    config: TransformerConfig, model: ModelSection, owned: Collection[int], *, te: bool
) -> TransformerBlockSubmodules:
    kinds = [model.num_experts if model.is_moe_layer(layer) else None for layer in range(model.num_layers)]
    specs = {num_experts: _layer_spec(config, num_experts, owned, te=te) for num_experts in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=_final_norm(te=te))


def _final_norm(*, te: bool) -> Any:
    if not te:
        return WrappedTorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer_spec(config: TransformerConfig, num_experts: int | None, owned: Collection[int], *, te: bool) -> ModuleSpec:
    if te:
        make = get_gpt_layer_with_transformer_engine_spec
    else:
        make = partial(get_gpt_layer_local_spec, normalization="RMSNorm")
    spec = make(num_experts=num_experts, moe_grouped_gemm=te, qk_layernorm=config.qk_layernorm)
    if not te:
        spec.submodules.self_attention.submodules.core_attention = SDPAttention
    if num_experts is not None:
        _partition(spec, owned)
    return spec


def _partition(spec: ModuleSpec, owned: Collection[int]) -> None:
    mlp = spec.submodules.mlp
    # A ModuleSpec in megatron-core 0.16; a functools.partial of MoELayer in 0.19.
    moe = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    moe.experts = ModuleSpec(module=PartitionedExperts, params={"owned": owned, "stock": moe.experts})


@torch.no_grad()
def _poison(gpt: GPTModel) -> None:
    for parameter in gpt.parameters():
        parameter.fill_(float("nan"))
