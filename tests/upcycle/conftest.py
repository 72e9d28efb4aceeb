"""Tiny dense models, written by transformers itself."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers")

# head_dim is not hidden / heads; two query heads share a key head; RoPE's base is not the default;
# the vocabulary is no round number.
SHAPE = {
    "vocab_size": 103, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "eos_token_id": [5, 7],
    "bos_token_id": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}  # fmt: skip


@pytest.fixture
def make_dense(tmp_path):
    """Save a random dense model; `spelling` 4 rewrites config.json as transformers 4 has it."""

    def make(family="qwen3", name="dense", spelling=5, dtype=torch.float32, max_shard_size="5GB", **changes):
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(family, **{**SHAPE, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # away from 1 and 0.02, so that swapped or lost tensors show
            parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
        model.to(dtype).save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
        if spelling == 4:
            _as_transformers_4(tmp_path / name / "config.json")
        return tmp_path / name

    return make


def _as_transformers_4(path):
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    raw["torch_dtype"] = raw.pop("dtype")
    path.write_text(json.dumps(raw))


def logits_of(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.randint(103, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(tokens).logits


@pytest.fixture(name="logits_of")
def logits_fixture():
    return logits_of
