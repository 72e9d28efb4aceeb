"""The recipe as Megatron-Core's `TransformerConfig`."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from spes_mega.errors import RecipeError
from spes_mega.layout.names import expected_tensors
from spes_mega.model.cpu_support import without_expected_warnings
from spes_mega.recipe import ModelSection, Recipe, TrainSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def use_transformer_engine() -> bool:
    """Whether the model is built from Transformer Engine's modules: it is importable, and CUDA is there."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(recipe: Recipe, *, device: torch.device, te: bool) -> TransformerConfig:
    """Translate a recipe. Weights are left as allocated: `build` and `load_weights` say what is in them.

    Raises:
        RecipeError: the model asks for something that is not built here (RoPE scaling, other qk-norms).
    """
    _refuse_unsupported(recipe.model)
    settings = {
        **_shape(recipe.model),
        **_experts(recipe.model, recipe.train, te=te),
        **_kernels(device),
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


def _refuse_unsupported(model: ModelSection) -> None:
    if model.rope_scaling is not None:
        kind = model.rope_scaling.get("rope_type", model.rope_scaling.get("type"))
        raise RecipeError(
            f"model.rope_scaling: RoPE variant {kind!r} is not supported, only plain RoPE; "
            "remove rope_scaling if the model is to run with plain RoPE"
        )


def _shape(model: ModelSection) -> dict[str, Any]:
    # Which optional weights a family has is declared once, by its tensor names.
    tensors = expected_tensors(model)
    q_norm = tensors.get("model.layers.0.self_attn.q_norm.weight")
    if q_norm not in (None, (model.head_dim,)):
        raise RecipeError(
            f"model.family {model.family}: qk-norm over {q_norm} is not supported, only per head ({model.head_dim},)"
        )
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size or model.expert_hidden_size,
        "qk_layernorm": q_norm is not None,
        "add_qkv_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
    }


def _experts(model: ModelSection, train: TrainSection, *, te: bool) -> dict[str, Any]:
    if not model.is_moe:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_hidden_size,
        "moe_layer_freq": [int(model.is_moe_layer(layer)) for layer in range(model.num_layers)],
        "moe_router_topk": model.top_k,
        # Softmax over the chosen logits alone is the renormalized top-k of the softmax over all of them.
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": train.aux_loss_coeff,
        "moe_z_loss_coeff": train.router_z_loss_coeff or None,
        # The same as all-to-all where expert parallelism is 1, and without its CUDA streams.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": te,
    }


def _kernels(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        # False makes every module allocate on torch.cuda.current_device().
        "use_cpu_initialization": not on_cuda,
        # Compiled activations pay on a GPU; on the CPU compiling costs more than a small run takes.
        "bias_activation_fusion": on_cuda,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "moe_permute_fusion": False,
        "persist_layer_norm": False,
    }
