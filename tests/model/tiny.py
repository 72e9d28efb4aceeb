"""Tiny random models: as a recipe, as transformers builds them, and the checkpoint that goes with both."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.layout.names import expected_tensors
from spes_mega.model import build, load_weights
from spes_mega.recipe import ModelSection, Recipe, TrainSection

# head_dim is not hidden_size / num_heads, two query heads share a key head, the vocabulary is no round number.
SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 1003,
    "max_seq_len": 128,
    "rope_theta": 500_000.0,
}
DENSE: dict[str, Any] = {**SHAPE, "ffn_hidden_size": 80}
MOE: dict[str, Any] = {**SHAPE, "num_experts": 6, "top_k": 2, "expert_hidden_size": 48}


def section(family: str, **changes: Any) -> ModelSection:
    declared = FAMILIES[family]
    shape = {**(MOE if declared.is_moe else DENSE)}
    if declared.has_shared_expert:
        shape["shared_expert_hidden_size"] = 40
    if declared.even_heads:
        shape["head_dim"] = shape["hidden_size"] // shape["num_heads"]
    return ModelSection(family=family, **{**shape, **changes})


def recipe(model: ModelSection, **train: Any) -> Recipe:
    defaults = {"seq_len": 64, "dtype": "fp32", "aux_loss_coeff": 0.0, "router_z_loss_coeff": 0.0}
    return Recipe(model=model, train=TrainSection(**{**defaults, **train}))


def random_weights(model: ModelSection, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor random, norms and routers included, so that no default value can hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_tensors(model).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.3 * noise if name.endswith("norm.weight") else 0.15 * noise).to(dtype)
    return weights


def loaded(the_recipe: Recipe, weights: dict[str, torch.Tensor], owned: Any = None) -> Any:
    gpt = build(the_recipe, owned)
    load_weights(gpt, the_recipe.model, weights.__getitem__)
    return gpt


def tokens(model: ModelSection, batch: int = 2, length: int = 33, seed: int = 7) -> torch.Tensor:
    return torch.randint(model.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def transformers_model(model: ModelSection) -> Any:
    """The same architecture by transformers, randomized throughout."""
    torch.manual_seed(11)
    hf = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model.family, **_config(model)), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return hf


def _config(model: ModelSection) -> dict[str, Any]:
    width = model.ffn_hidden_size or (8 if model.family.startswith("qwen") else model.expert_hidden_size)
    config = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_seq_len,
        "rope_parameters": {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta},
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "intermediate_size": width,
        "sliding_window": model.sliding_window,
        "pad_token_id": None,
    }
    if model.is_moe:
        config |= {
            "num_local_experts": model.num_experts,
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.top_k,
            "moe_intermediate_size": model.expert_hidden_size,
            "shared_expert_intermediate_size": model.shared_expert_hidden_size,
            "norm_topk_prob": model.norm_topk_prob,
            "mlp_only_layers": list(model.dense_layers),
        }
    return config


def saved_weights(hf: Any, model: ModelSection, folder: Path) -> dict[str, torch.Tensor]:
    """What transformers writes to disk, by canonical name."""
    hf.save_pretrained(folder)
    canonical = {FAMILIES[model.family].to_disk(name): name for name in expected_tensors(model)}
    return {canonical.get(name, name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
