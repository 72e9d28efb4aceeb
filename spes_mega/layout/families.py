"""Families: how one Hugging Face model_type names its tensors and writes its config.json.

A family is data; `config.py` reads and writes configurations from it. Facts come from each model's public
configuration class in transformers (4 and 5).
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from spes_mega.errors import CheckpointError

REQUIRED = object()


@dataclass(frozen=True)
class Family:
    """One model_type.

    Attributes:
        qk_norm: "head" for an RMSNorm over each head's query and key.
        ffn_key: config.json's key for the width of a dense FFN; None where no layer can be dense.
        expert_keys: for an MoE family, ModelSection field -> config.json keys, the one we write first.
        defaults: what transformers assumes when config.json leaves a key out; any other key must be there.
        fixed: key -> the value it must have (or leave out), since our model has no such part.
        renames: (canonical, on disk) parts of tensor names.
    """

    name: str
    architecture: str
    ffn_key: str | None = "intermediate_size"
    qk_norm: Literal["none", "head"] = "none"
    qkv_bias: bool = False
    expert_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    can_mix_dense: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def is_moe(self) -> bool:
        return bool(self.expert_keys)

    def to_disk(self, name: str) -> str:
        """Name on disk of a canonical name."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return name


# Buffers that old checkpoints carry although they follow from config.json alone.
DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|.*\.self_attn\.rotary_emb\.inv_freq")

_SILU = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
_QWEN3_FIXED = _SILU | {"attention_bias": False, "use_sliding_window": False}
_QWEN3_DEFAULTS = {"head_dim": 128, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            qk_norm="head",
            defaults=_QWEN3_DEFAULTS,
            fixed=_QWEN3_FIXED,
        ),
        Family(
            name="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            qk_norm="head",
            expert_keys={
                "num_experts": ("num_experts", "num_local_experts"),
                "top_k": ("num_experts_per_tok",),
                "expert_hidden_size": ("moe_intermediate_size",),
            },
            can_mix_dense=True,
            # transformers computes head_dim from the hidden size here, unlike in qwen3
            defaults=_QWEN3_DEFAULTS | {"head_dim": None, "norm_topk_prob": False},
            fixed=_QWEN3_FIXED,
        ),
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            defaults={"head_dim": None, "num_key_value_heads": None, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6},
            fixed=_SILU | {"attention_bias": False, "mlp_bias": False},
        ),
        Family(
            name="mixtral",
            architecture="MixtralForCausalLM",
            ffn_key=None,
            expert_keys={
                "num_experts": ("num_local_experts",),
                "top_k": ("num_experts_per_tok",),
                "expert_hidden_size": ("intermediate_size",),
            },
            defaults={"head_dim": None, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
            fixed=_SILU | {"sliding_window": None},
            renames=(
                (".mlp.", ".block_sparse_moe."),
                (".gate_proj.", ".w1."),
                (".up_proj.", ".w3."),
                (".down_proj.", ".w2."),
            ),
        ),
    )
}

MOE_OF = {"qwen3": "qwen3_moe", "llama": "mixtral"}
"""The MoE family that holds a dense family's tensors without loss."""


def family_of(raw: dict[str, Any]) -> Family:
    """The family of a config.json. Raises CheckpointError naming a model_type that isn't supported."""
    name = raw.get("model_type")
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"config.json: model_type {name!r} is not supported (supported: {known})")
    return FAMILIES[name]
