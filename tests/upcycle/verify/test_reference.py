"""The plain-torch decoder layer computes what transformers' does, for every family, RoPE variant and router rule."""

import json

import pytest
import torch
import transformers

from spes_mega.layout import open_checkpoint
from spes_mega.layout.families.config_json import parse_config
from tests.upcycle.making import randomized
from upcycle.verify.reference import Reference

DENSE = ("qwen3", "qwen2", "llama", "mistral", "olmo2")
MOE = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "flex_olmo")
SHAPE = {
    "vocab_size": 103, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}  # fmt: skip
EXPERTS = {
    "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
ROPE = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn mscale": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.2,
        "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip


def differences_by_layer(tmp_path, family, length=40, **changes):
    """The largest difference of each layer's output from that of transformers, with its size."""
    torch.manual_seed(3)
    shape = SHAPE | (EXPERTS if family in MOE else {})
    if family == "flex_olmo":
        shape |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.AutoConfig.for_model(family, **shape | changes)
    model = randomized(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")).eval()
    model.save_pretrained(tmp_path / "model")
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda module, args, kwargs, out: seen.append(
                (args[0] if args else kwargs["hidden_states"], out[0] if isinstance(out, tuple) else out)
            ),
            with_kwargs=True,
        )
    with torch.inference_mode():
        model(torch.randint(103, (2, length)))
        with open_checkpoint(tmp_path / "model") as checkpoint:
            ours = Reference(checkpoint.model, checkpoint.read)
            return [
                (float((ours.layer(k, x) - y).abs().max()), float((y - x).abs().max())) for k, (x, y) in enumerate(seen)
            ]


def check(found):
    assert len(found) == 2
    for difference, size in found:
        assert size > 0.5
        assert difference <= 1e-5 * max(size, 1)  # fp32 sums of some 100 terms in another order


@pytest.mark.parametrize("family", DENSE + MOE)
def test_every_family(tmp_path, family):
    check(differences_by_layer(tmp_path, family))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "flex_olmo"])
def test_routers_that_renormalize_and_those_that_do_not(tmp_path, family, renormalize):
    check(differences_by_layer(tmp_path, family, norm_topk_prob=renormalize))


@pytest.mark.parametrize("variant", ROPE)
def test_rope_variants(tmp_path, variant):
    rope = {"rope_type": variant, "rope_theta": 10_000.0, **ROPE[variant]}
    check(differences_by_layer(tmp_path, "llama", rope_parameters=rope))


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 48}])
def test_the_original_length_is_what_transformers_takes(tmp_path, kind, spelling, beside):
    rope = {"rope_type": kind, **ROPE[kind]}
    raw = SHAPE | {"model_type": "llama", "rope_parameters": None, "rope_theta": 1e4, **beside}
    for given in (rope, {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}):
        (tmp_path / "config.json").write_text(json.dumps(raw | {spelling: given}))
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
        ours = parse_config(raw | {spelling: given})
        assert ours.rope_scaling["original_max_position_embeddings"] == theirs["original_max_position_embeddings"]


def test_longrope_beyond_its_first_length_has_other_factors(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **ROPE["longrope"]}
    check(differences_by_layer(tmp_path, "llama", length=20, rope_parameters=rope))


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_a_sliding_window(tmp_path, family):
    check(differences_by_layer(tmp_path, family, sliding_window=5))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_key_and_value_heads(tmp_path, kv_heads):
    check(differences_by_layer(tmp_path, "qwen3", num_key_value_heads=kv_heads, head_dim=16))


def test_dense_layers_among_moe_layers(tmp_path):
    check(differences_by_layer(tmp_path, "qwen3_moe", mlp_only_layers=[1]))
