"""The families that are known. Facts come from each model's public configuration class in transformers (4 and 5)."""

import re
from typing import Any

from spes_mega.errors import CheckpointError
from spes_mega.layout.families.family import Family

REQUIRED = object()

# Buffers that old checkpoints carry although they follow from config.json alone; transformers leaves them out too.
DERIVED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")

# head_dim None: hidden_size / num_attention_heads, as transformers computes it where the key is left out.
_DEFAULTS = {"head_dim": None, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}
_SILU = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
_LLAMA_FIXED = _SILU | {"attention_bias": False, "mlp_bias": False}
_QWEN2_FIXED = _SILU | {"use_sliding_window": False}
_QWEN3_FIXED = _QWEN2_FIXED | {"attention_bias": False}
_QWEN3_DEFAULTS = _DEFAULTS | {"head_dim": 128}
_OLMO_FIXED = _SILU | {"attention_bias": False}
_OLMO_DEFAULTS = _DEFAULTS | {"num_key_value_heads": None, "rms_norm_eps": 1e-5}

_EXPERT_KEYS = {
    "num_experts": ("num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "expert_hidden_size": ("moe_intermediate_size",),
}
_OLMO_EXPERT_KEYS = _EXPERT_KEYS | {"expert_hidden_size": ("intermediate_size",)}

DENSE = (
    Family("qwen3", "Qwen3ForCausalLM", qk_norm="head", defaults=_QWEN3_DEFAULTS, fixed=_QWEN3_FIXED),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, defaults=_DEFAULTS, fixed=_QWEN2_FIXED),
    Family("llama", "LlamaForCausalLM", defaults=_DEFAULTS | {"num_key_value_heads": None}, fixed=_LLAMA_FIXED),
    Family(
        "mistral",
        "MistralForCausalLM",
        sliding_window=True,
        defaults=_DEFAULTS | {"sliding_window": 4096},
        fixed=_SILU,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        qk_norm="full",
        norm_placement="post",
        defaults=_OLMO_DEFAULTS,
        fixed=_OLMO_FIXED,
    ),
)

MOE = (
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_norm="head",
        expert_keys=_EXPERT_KEYS,
        can_mix_dense=True,
        # transformers computes head_dim from the hidden size here, unlike in qwen3
        defaults=_DEFAULTS | {"norm_topk_prob": False},
        fixed=_QWEN3_FIXED,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        ffn_key=None,
        sliding_window=True,
        expert_keys=_EXPERT_KEYS
        | {"num_experts": ("num_local_experts",), "expert_hidden_size": ("intermediate_size",)},
        always_renormalizes=True,
        defaults=_DEFAULTS | {"rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "sliding_window": None},
        fixed=_SILU,
        renames=(
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".up_proj.", ".w3."),
            (".down_proj.", ".w2."),
        ),
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        expert_keys=_EXPERT_KEYS | {"shared_expert_hidden_size": ("shared_expert_intermediate_size",)},
        can_mix_dense=True,
        defaults=_DEFAULTS | {"norm_topk_prob": False},
        fixed=_QWEN2_FIXED | {"qkv_bias": True},
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        ffn_key=None,
        qk_norm="full",
        expert_keys=_OLMO_EXPERT_KEYS,
        even_heads=True,
        defaults=_OLMO_DEFAULTS | {"norm_topk_prob": False},
        fixed=_OLMO_FIXED | {"clip_qkv": None},
    ),
    Family(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        ffn_key=None,
        qk_norm="full",
        norm_placement="post",
        expert_keys=_OLMO_EXPERT_KEYS,
        defaults=_OLMO_DEFAULTS | {"norm_topk_prob": False, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0},
        fixed=_OLMO_FIXED,
    ),
)

FAMILIES: dict[str, Family] = {family.name: family for family in (*DENSE, *MOE)}

MOE_OF = {
    "qwen3": "qwen3_moe",
    "qwen2": "qwen2_moe",
    "llama": "mixtral",
    "mistral": "mixtral",
    "olmo2": "flex_olmo",
}
"""The MoE family that holds a dense family's tensors without loss."""


def family_of(raw: dict[str, Any]) -> Family:
    """The family of a config.json. Raises CheckpointError naming a model_type that isn't supported."""
    name = raw.get("model_type")
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"config.json: model_type {name!r} is not supported (supported: {known})")
    return FAMILIES[name]
