"""The recipe as Megatron-Core's `TransformerConfig`."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from spes_mega.errors import RecipeError
from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.layout.families.rope import llama3_factor
from spes_mega.model.megatron_patches import check_recomputation, rotates_by_our_kernel, without_expected_warnings
from spes_mega.recipe import ModelSection, Recipe, TrainSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def use_transformer_engine(model: ModelSection, device: torch.device) -> bool:
    """Whether the model is built of Transformer Engine's modules (`model.implementation`).

    Raises:
        RecipeError: they are asked for, and cannot be had here.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    if model.implementation != "transformer_engine":
        return model.implementation == "auto" and installed and device.type == "cuda"
    if not (installed and torch.cuda.is_available()):
        lack = "there is no CUDA device here" if installed else "the package transformer-engine is not installed"
        raise RecipeError(f"model.implementation: transformer_engine cannot be used, {lack}: use auto or local")
    return True


def transformer_config(recipe: Recipe, *, device: torch.device, te: bool) -> TransformerConfig:
    """Translate a recipe. Weights are left as allocated: `build` and `load_weights` say what is in them.

    Raises:
        RecipeError: the model has a RoPE variant that is not built here.
        IncompatibleError: the installed Megatron-Core cannot recompute activations on the device.
    """
    rope_settings(recipe.model)
    if recipe.train.recompute != "none":
        check_recomputation(device)
    settings = {
        **_shape(recipe.model),
        **_experts(recipe.model, recipe.train, te=te),
        **_kernels(device),
        **_recompute(recipe.train),
        "normalization": "RMSNorm",
        "layernorm_epsilon": recipe.model.norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "perform_initialization": False,
        "params_dtype": DTYPES[recipe.train.dtype],
        "bf16": recipe.train.dtype == "bf16",
    }
    with without_expected_warnings():
        return TransformerConfig(**settings)


def rope_settings(model: ModelSection) -> dict[str, Any]:
    """What GPTModel takes for the model's rotary embedding. Raises RecipeError, naming a variant it has not."""
    rope = {"position_embedding_type": "rope", "rotary_base": model.rope_theta}
    factor = llama3_factor(model)
    return rope if factor is None else rope | {"rope_scaling": True, "rope_scaling_factor": factor}


def _shape(model: ModelSection) -> dict[str, Any]:
    family = FAMILIES[model.family]
    window = model.sliding_window
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size or model.expert_hidden_size,
        "qk_layernorm": family.qk_norm != "none",
        "add_qkv_bias": family.qkv_bias,
        # Megatron counts the positions to the left and right of a query, without its own.
        "window_size": None if window is None else (window - 1, 0),
    }


def _experts(model: ModelSection, train: TrainSection, *, te: bool) -> dict[str, Any]:
    if not model.is_moe:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_hidden_size,
        "moe_layer_freq": [int(model.is_moe_layer(layer)) for layer in range(model.num_layers)],
        "moe_shared_expert_intermediate_size": model.shared_expert_hidden_size,
        "moe_shared_expert_gate": model.shared_expert_hidden_size is not None,
        "moe_router_topk": model.top_k,
        # Softmax over the chosen logits alone is the renormalized top-k of the softmax over all of them.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        # Megatron-Core adds the layers up; the coefficient is meant for their mean.
        "moe_aux_loss_coeff": train.aux_loss_coeff / model.num_moe_layers,
        "moe_z_loss_coeff": train.router_z_loss_coeff or None,
        # The same as all-to-all where expert parallelism is 1, and without its CUDA streams.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": te,
    }


def _recompute(train: TrainSection) -> dict[str, Any]:
    """What Megatron-Core computes again. Of attention nothing: its kernels keep no S x S scores to begin with."""
    if train.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if train.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    return {}


def _kernels(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        # False makes every module allocate on torch.cuda.current_device().
        "use_cpu_initialization": not on_cuda,
        # Compiled activations pay on a GPU; on the CPU compiling costs more than a small run takes.
        "bias_activation_fusion": on_cuda,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": rotates_by_our_kernel(),
        "gradient_accumulation_fusion": False,
        "moe_permute_fusion": False,
        "persist_layer_norm": False,
    }
