"""The models that rounds are measured with, and the recipe of a run of them."""

import math
from pathlib import Path
from typing import Any

from spes_mega.layout.names import expected_tensors
from spes_mega.recipe import Recipe, parse_recipe

_COMMON = {"family": "qwen3_moe", "top_k": 2, "max_seq_len": 2048, "num_experts": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "20M": {
        "num_layers": 4, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64,
        "expert_hidden_size": 320, "vocab_size": 6_400,
    },
    "200M": {
        "num_layers": 12, "hidden_size": 640, "num_heads": 10, "num_kv_heads": 10, "head_dim": 64,
        "expert_hidden_size": 430, "vocab_size": 16_384,
    },
    "500M": {
        "num_layers": 12, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64,
        "expert_hidden_size": 688, "vocab_size": 20_000,
    },
    "2B": {
        "num_layers": 16, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64,
        "expert_hidden_size": 2048, "vocab_size": 151_665,
    },
}  # fmt: skip
"""Nine in ten of the 200M model's experts' weights and of all weights: 0.8 are experts, as in the paper's models."""
SEQ_LEN = 512


def make_recipe(params: str, nodes: int, rounds: int, codec: str, merge: bool) -> dict[str, Any]:
    """A recipe as YAML would give it; every round is one step, and every one merges if any does."""
    spes: dict[str, Any] = {"num_nodes": nodes, "sync_every": 1, "snapshot_every": 10**6}
    if codec != "fp32":
        spes["wire"] = {way: {"shared": codec, "experts": codec} for way in ("up", "down")}
    if merge:
        spes |= {"merge_interval": 1, "merge_steps": 10**6}
    return {
        "name": f"benchmark-{params}",
        "model": _COMMON | SHAPES[params],
        "spes": spes,
        "train": {"steps": rounds, "seq_len": SEQ_LEN},
    }


def parsed(raw: dict[str, Any]) -> Recipe:
    return parse_recipe(raw, source="benchmark", base=Path())


def num_parameters(recipe: Recipe) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(recipe.model).values())
