"""State dicts of dense Megatron-Core models, fused by hand here, read under canonical names."""

import argparse
import io
import json

import pytest
import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout import expected_tensors, make_config, open_checkpoint

HEADS, GROUPS, DIM = 4, 2, 16


def canonical_weights(model):
    rng = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=rng) for name, shape in expected_tensors(model).items()}


def interleaved(query, key, value):
    """Each KV head with its query heads, written out head by head."""
    q, k, v = (part.split(DIM) for part in (query, key, value))
    share = HEADS // GROUPS
    return torch.cat([x for g in range(GROUPS) for x in (*q[g * share : (g + 1) * share], k[g], v[g])])


def megatron_state(model, weights, te=False, padding=0):
    """The names of Megatron-Core's local modules, or of its Transformer Engine ones."""
    pad = torch.zeros(padding, model.hidden_size)
    state = {
        "embedding.word_embeddings.weight": torch.cat([weights["model.embed_tokens.weight"], pad]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if not model.tie_embeddings:
        state["output_layer.weight"] = torch.cat([weights["lm_head.weight"], pad])
    for layer in range(model.num_layers):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attention.", theirs + "mlp."
        for kind in ("weight", "bias"):
            parts = [weights.get(f"{ours}self_attn.{m}_proj.{kind}") for m in "qkv"]
            if parts[0] is not None:
                state[f"{attention}linear_qkv.{kind}"] = interleaved(*parts)
        for norm in "qk":
            if f"{ours}self_attn.{norm}_norm.weight" in weights:
                state[f"{attention}{norm}_layernorm.weight"] = weights[f"{ours}self_attn.{norm}_norm.weight"]
        state |= {
            attention + "linear_proj.weight": weights[ours + "self_attn.o_proj.weight"],
            mlp + "linear_fc1.weight": torch.cat([weights[f"{ours}mlp.{m}_proj.weight"] for m in ("gate", "up")]),
            mlp + "linear_fc2.weight": weights[ours + "mlp.down_proj.weight"],
            attention + "linear_qkv.layer_norm_weight" if te else theirs + "input_layernorm.weight": weights[
                ours + "input_layernorm.weight"
            ],
            mlp + "linear_fc1.layer_norm_weight" if te else theirs + "pre_mlp_layernorm.weight": weights[
                ours + "post_attention_layernorm.weight"
            ],
            attention + "linear_qkv._extra_state": io.BytesIO(b"te") if te else None,
            mlp + "linear_fc1._extra_state": torch.zeros(3, dtype=torch.uint8),
        }
    return state


@pytest.fixture
def saved(tmp_path):
    def save(model, content):
        (tmp_path / "config.json").write_text(json.dumps(make_config(model, None, torch.float32)))
        torch.save(content, tmp_path / "model.pt")
        return tmp_path / "model.pt"

    return save


def check(path, weights, config=None):
    with open_checkpoint(path, config) as checkpoint:
        assert list(checkpoint.names) == list(weights)
        for name, tensor in weights.items():
            assert torch.equal(checkpoint.read(name), tensor), name
            # rows that begin and end within a head of a group
            start, stop = len(tensor) // 3, len(tensor) - 1
            assert torch.equal(checkpoint.read_rows(name, start, stop), tensor[start:stop]), name
            assert checkpoint.read_rows(name, 1, 1).shape == (0, *tensor.shape[1:])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
@pytest.mark.parametrize("te", [False, True])
def test_every_tensor_is_read_with_its_own_values(section, saved, family, te):
    model = section(family)
    weights = canonical_weights(model)
    check(saved(model, megatron_state(model, weights, te=te)), weights)


def test_as_megatron_saves_it(section, saved, tmp_path):
    model = section("qwen2", tie_embeddings=True)
    weights = canonical_weights(model)
    state = {f"module.module.{name}": tensor for name, tensor in megatron_state(model, weights, padding=25).items()}
    path = saved(model, {"args": argparse.Namespace(hidden_size=32), "iteration": 7, "model": state})
    (tmp_path / "config.json").rename(tmp_path / "elsewhere.json")
    check(path, weights, tmp_path / "elsewhere.json")


def test_padding_of_the_vocabulary_is_no_part_of_the_model(section, saved):
    model = section("llama", vocab_size=1003)
    weights = canonical_weights(model)
    check(saved(model, {"state_dict": megatron_state(model, weights, padding=21)}), weights)


def test_other_state_dicts_are_refused_by_name(section, saved):
    model = section("qwen2")
    state = megatron_state(model, canonical_weights(model))
    layer = "decoder.layers.0."

    def refused(said, **changes):
        changed = {name: tensor for name, tensor in (state | changes).items() if tensor is not False}
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(saved(model, changed))

    refused("unexpected tensor decoder.layers.0.mlp.linear_fc1.bias", **{layer + "mlp.linear_fc1.bias": torch.ones(3)})
    refused(
        "local_experts.0.linear_fc1.weight .*experts are not read",
        **{layer + "mlp.experts.local_experts.0.linear_fc1.weight": torch.ones(3)},
    )
    refused(
        r"q_layernorm.weight: a qwen2 model .* has no model.layers.0.self_attn.q_norm",
        **{layer + "self_attention.q_layernorm.weight": torch.ones(16)},
    )
    refused("has no model.layers.2.self_attn", **{"decoder.layers.2.self_attention.linear_proj.weight": torch.ones(3)})
    # half of the rows: one of two tensor-parallel ranks
    refused(
        r"linear_qkv.weight: shape \[64, 32\], but config.json asks for \[128, 32\] .only tensor parallel 1",
        **{layer + "self_attention.linear_qkv.weight": torch.ones(64, 32)},
    )
    refused("missing tensor.*model.layers.0.mlp.down_proj.weight", **{layer + "mlp.linear_fc2.weight": False})
    refused("are the same tensor", **{layer + "mlp.linear_fc1.layer_norm_weight": torch.ones(32)})
    refused(r"word_embeddings.weight: shape \[102, 32\]", **{"embedding.word_embeddings.weight": torch.ones(102, 32)})


def test_a_mixture_of_experts_is_refused(section, saved):
    state = megatron_state(section("llama"), canonical_weights(section("llama")))
    with pytest.raises(CheckpointError, match=r"config.json describes a Mixture-of-Experts \(mixtral\)"):
        open_checkpoint(saved(section("mixtral"), state))
