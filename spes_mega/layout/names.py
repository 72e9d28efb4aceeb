"""Canonical tensor names: those of `Qwen3MoeForCausalLM` checkpoints, one tensor for each expert matrix.

Shapes use H hidden_size, A num_heads * head_dim, K num_kv_heads * head_dim, F FFN width, E experts, V vocabulary.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.layout.families.family import Family
from spes_mega.recipe import ModelSection

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"
EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")
Shape = tuple[int, ...]

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class ExpertKey(NamedTuple):
    """Which expert a matrix belongs to; `expert` is its global number."""

    layer: int
    expert: int
    matrix: str


def expert_name(layer: int, expert: int, matrix: str) -> str:
    """Canonical name of one expert matrix (`matrix` is one of EXPERT_MATRICES)."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"


def dense_name(layer: int, matrix: str) -> str:
    """Canonical name of one matrix of a dense layer's FFN."""
    return f"model.layers.{layer}.mlp.{matrix}.weight"


def shared_expert_name(layer: int, matrix: str) -> str:
    """Canonical name of one matrix of an MoE layer's shared expert."""
    return f"model.layers.{layer}.mlp.shared_expert.{matrix}.weight"


def shared_expert_gate_name(layer: int) -> str:
    """Canonical name of the gate of the shared expert, shape [1, H]: its output is scaled by sigmoid(gate @ x)."""
    return f"model.layers.{layer}.mlp.shared_expert_gate.weight"


def router_name(layer: int) -> str:
    """Canonical name of the router of an MoE layer, shape [E, H]."""
    return f"model.layers.{layer}.mlp.gate.weight"


@lru_cache(1 << 16)
def expert_of(name: str) -> ExpertKey | None:
    """The expert that a canonical name belongs to; None for a shared tensor."""
    match = _EXPERT.fullmatch(name)
    return ExpertKey(int(match[1]), int(match[2]), match[3]) if match else None


def expected_tensors(model: ModelSection) -> dict[str, Shape]:
    """All tensors of a model, canonical name -> shape, in canonical order. A tied model has no output head."""
    family = FAMILIES[model.family]
    shapes: dict[str, Shape] = {EMBEDDING: (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        shapes.update(_attention(model, family, f"model.layers.{layer}."))
        shapes.update(_feed_forward(model, layer))
        if family.norm_placement == "post":
            shapes[f"model.layers.{layer}.post_feedforward_layernorm.weight"] = (model.hidden_size,)
    shapes[FINAL_NORM] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes[OUTPUT_HEAD] = (model.vocab_size, model.hidden_size)
    return shapes


def _attention(model: ModelSection, family: Family, prefix: str) -> Iterator[tuple[str, Shape]]:
    hidden, query, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    if family.norm_placement == "pre":
        yield prefix + "input_layernorm.weight", (hidden,)
    for part, rows in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        yield f"{prefix}self_attn.{part}.weight", (rows, hidden)
        if family.qkv_bias:
            yield f"{prefix}self_attn.{part}.bias", (rows,)
    if family.qk_norm != "none":
        per_head = family.qk_norm == "head"
        yield prefix + "self_attn.q_norm.weight", (model.head_dim if per_head else query,)
        yield prefix + "self_attn.k_norm.weight", (model.head_dim if per_head else kv,)
    yield prefix + "self_attn.o_proj.weight", (hidden, query)
    yield prefix + "post_attention_layernorm.weight", (hidden,)


def _feed_forward(model: ModelSection, layer: int) -> Iterator[tuple[str, Shape]]:
    if not model.is_moe_layer(layer):
        for matrix in EXPERT_MATRICES:
            yield dense_name(layer, matrix), _matrix_shape(matrix, model.ffn_hidden_size, model.hidden_size)
        return
    yield router_name(layer), (model.num_experts, model.hidden_size)
    for expert in range(model.num_experts):
        for matrix in EXPERT_MATRICES:
            name = expert_name(layer, expert, matrix)
            yield name, _matrix_shape(matrix, model.expert_hidden_size, model.hidden_size)
    if model.shared_expert_hidden_size is not None:
        for matrix in EXPERT_MATRICES:
            name = shared_expert_name(layer, matrix)
            yield name, _matrix_shape(matrix, model.shared_expert_hidden_size, model.hidden_size)
        yield shared_expert_gate_name(layer), (1, model.hidden_size)


def _matrix_shape(matrix: str, width: int | None, hidden: int) -> Shape:
    assert width is not None, "ModelSection guarantees the widths that its layers need"
    return (hidden, width) if matrix == "down_proj" else (width, hidden)
