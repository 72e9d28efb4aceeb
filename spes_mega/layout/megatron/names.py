"""The one map between Megatron-Core's parameter names and the canonical tensor names.

`RULES` is the whole map, for the local and the Transformer Engine modules alike: it fills models (`model/`) and reads
Megatron-Core's own state dicts. Experts have their global numbers in canonical names, and in Megatron's a group (of
experts that are owned or frozen together) and a number within it; every other rule is one name to a few.
"""

import re
from typing import NamedTuple

from spes_mega.layout.megatron.fusions import Fusion, copy, gated, qkv


class Rule(NamedTuple):
    """A parameter (alternative spellings of its name; `{layer}`, `{group}`, `{index}` are numbers), its tensors."""

    parameters: tuple[str, ...]
    names: tuple[str, ...]
    fusion: Fusion = copy


_MEGATRON = "decoder.layers.{layer}."
_CANONICAL = "model.layers.{layer}."
_GROUP = _MEGATRON + "mlp.experts.groups.{group}."
_EXPERT = _CANONICAL + "mlp.experts.{expert}."


def _layer_rule(parameters: tuple[str, ...], names: tuple[str, ...], fusion: Fusion = copy) -> Rule:
    return Rule(tuple(_MEGATRON + p for p in parameters), tuple(_CANONICAL + n for n in names), fusion)


def _qkv_rule(kind: str) -> Rule:
    names = tuple(f"self_attn.{matrix}_proj.{kind}" for matrix in "qkv")
    return _layer_rule((f"self_attention.linear_qkv.{kind}",), names, qkv)


def _feed_forward_rules(megatron: str, canonical: str) -> tuple[Rule, Rule]:
    return (
        _layer_rule(
            (megatron + "linear_fc1.weight",), (canonical + "gate_proj.weight", canonical + "up_proj.weight"), gated
        ),
        _layer_rule((megatron + "linear_fc2.weight",), (canonical + "down_proj.weight",)),
    )


def _expert_rule(linear: str, matrices: tuple[str, ...], fusion: Fusion = copy) -> Rule:
    spellings = (
        _GROUP + "local_experts.{index}." + linear + ".weight",  # SequentialMLP
        _GROUP + linear + ".weight{index}",  # TEGroupedMLP
    )
    return Rule(spellings, tuple(_EXPERT + matrix + ".weight" for matrix in matrices), fusion)


RULES = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",)),
    _layer_rule(("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), ("input_layernorm.weight",)),
    _qkv_rule("weight"),
    _qkv_rule("bias"),
    _layer_rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    _layer_rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    _layer_rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",)),
    _layer_rule(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), ("post_attention_layernorm.weight",)),
    # Our own modules, in models whose layers normalize outputs
    _layer_rule(("attention_output_norm.weight",), ("post_attention_layernorm.weight",)),
    _layer_rule(("mlp_output_norm.weight",), ("post_feedforward_layernorm.weight",)),
    *_feed_forward_rules("mlp.", "mlp."),
    _layer_rule(("mlp.router.weight",), ("mlp.gate.weight",)),
    _expert_rule("linear_fc1", ("gate_proj", "up_proj"), gated),
    _expert_rule("linear_fc2", ("down_proj",)),
    *_feed_forward_rules("mlp.shared_experts.", "mlp.shared_expert."),
    _layer_rule(("mlp.shared_experts.gate_weight",), ("mlp.shared_expert_gate.weight",)),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",)),
)


def _pattern(parameter: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(parameter)))


_PATTERNS = tuple((_pattern(parameter), rule) for rule in RULES for parameter in rule.parameters)


def rule_of(parameter_name: str) -> tuple[Rule, dict[str, int]] | None:
    """The rule for a parameter, with the numbers in its name (`layer`, `group`, `index`); None if there is none."""
    for pattern, rule in _PATTERNS:
        if match := pattern.fullmatch(parameter_name):
            return rule, {key: int(value) for key, value in match.groupdict().items()}
    return None
