"""Megatron-Core's layer specs, changed where a family asks for other parts."""

from collections.abc import Collection
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.model.attention import SDPAttention
from spes_mega.model.config import DTYPES
from spes_mega.model.grouped_experts import GroupedExperts
from spes_mega.model.megatron_patches import mlp_submodules
from spes_mega.model.norms import PostNormLayer, norm_over_all_heads
from spes_mega.model.partitioned_experts import PartitionedExperts
from spes_mega.recipe import ModelSection, Recipe


def block_spec(
    config: TransformerConfig, recipe: Recipe, owned: Collection[int], *, te: bool
) -> TransformerBlockSubmodules:
    """All layers of a model: dense ones, and those with experts of which `owned` are trained."""
    model = recipe.model
    kinds = [model.num_experts if model.is_moe_layer(layer) else None for layer in range(model.num_layers)]
    specs = {num_experts: _layer_spec(model, num_experts, te=te) for num_experts in set(kinds)}
    if model.is_moe:
        _partition(specs[model.num_experts], recipe, owned, te=te)
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=_norm(te=te))


def _norm(*, te: bool) -> Any:
    if not te:
        return WrappedTorchNorm
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _layer_spec(model: ModelSection, num_experts: int | None, *, te: bool) -> ModuleSpec:
    family = FAMILIES[model.family]
    if te:
        make = get_gpt_layer_with_transformer_engine_spec
    else:
        make = partial(get_gpt_layer_local_spec, normalization="RMSNorm")
    spec = make(num_experts=num_experts, moe_grouped_gemm=te, qk_layernorm=family.qk_norm == "head")
    attention = spec.submodules.self_attention.submodules
    if not te:
        attention.core_attention = SDPAttention
    if family.qk_norm == "full":
        attention.q_layernorm = norm_over_all_heads(model.num_heads)
        attention.k_layernorm = norm_over_all_heads(model.num_kv_heads)
    if family.norm_placement == "post":
        _normalize_outputs(spec, is_moe=num_experts is not None, te=te)
    return spec


def _normalize_outputs(spec: ModuleSpec, *, is_moe: bool, te: bool) -> None:
    spec.module = PostNormLayer
    spec.params = {**(spec.params or {}), "output_norm": _norm(te=te)}
    spec.submodules.input_layernorm = IdentityOp
    spec.submodules.pre_mlp_layernorm = IdentityOp
    if te:  # its linear layers have the norm of their input built in
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not is_moe:
            mlp_submodules(spec).linear_fc1 = TEColumnParallelLinear


def _partition(spec: ModuleSpec, recipe: Recipe, owned: Collection[int], *, te: bool) -> None:
    moe = mlp_submodules(spec)
    # ZeRO-3 gathers a module's own parameters for its forward pass: matrix by matrix in Megatron's sequential experts.
    stock = moe.experts if te or recipe.train.zero_stage == 3 else GroupedExperts
    frozen_dtype = DTYPES[recipe.frozen_dtype]
    params = {"owned": owned, "frozen_dtype": frozen_dtype, "stock": stock}
    moe.experts = ModuleSpec(module=PartitionedExperts, params=params)
