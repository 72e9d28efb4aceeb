import pytest
import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout import FAMILIES, differences, make_config, parse_config

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 103,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    "eos_token_id": [5, 7], "bos_token_id": 3,
}  # fmt: skip
LLAMA = QWEN3 | {"model_type": "llama"}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip


def test_both_spellings_of_rope_read_the_same():
    four = parse_config(QWEN3 | {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"})
    five = parse_config(QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16"})
    assert four == five
    assert four.rope_theta == 1e6
    assert four.rope_scaling is None


def test_both_spellings_of_a_rope_variant_read_the_same():
    old = parse_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}})
    new = parse_config(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}})
    assert old == new
    assert new.rope_scaling == {"rope_type": "llama3", **LLAMA3_ROPE}


def test_what_transformers_assumes_for_keys_left_out():
    bare = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads", "rms_norm_eps")}
    model = parse_config(bare)
    assert (model.head_dim, model.num_kv_heads, model.norm_eps, model.rope_theta) == (8, 4, 1e-6, 10_000)
    assert parse_config({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported .supported: qwen3, qwen2, llama, mistral",
        ),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "the key 'hidden_size' is missing"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is given as 10000.0 and as 1000000"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4},
            },
            "contradict",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "the default RoPE has no factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"model_type": "llama", "head_dim": None, "num_attention_heads": 5}, "head_dim is missing"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": "32"}, "positive whole numbers"),
    ],
)
def test_refused_by_name(changes, said):
    with pytest.raises(CheckpointError, match=said):
        parse_config(QWEN3 | changes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "norm_eps": 3e-6, "init_std": 0.01},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_what_is_written_reads_as_the_same_model(section, family, changes):
    model = section(family, **changes)
    for base in (None, QWEN3, make_config(model, None, torch.float32)):
        assert parse_config(make_config(model, base, torch.bfloat16)) == model


def test_dense_layers_of_an_moe_model_round_trip(section):
    model = section("qwen3_moe", dense_layers=(0,), ffn_hidden_size=40, norm_topk_prob=False)
    assert parse_config(make_config(model, None, torch.float32)) == model


def test_decoder_sparse_step_makes_dense_layers(section):
    raw = make_config(section("qwen3_moe", num_layers=4), None, torch.float32) | {
        "decoder_sparse_step": 2, "mlp_only_layers": [1], "intermediate_size": 40,
    }  # fmt: skip
    model = parse_config(raw)
    assert model.dense_layers == (0, 1, 2)
    assert model.ffn_hidden_size == 40


def test_norm_topk_prob_left_out_means_false_in_qwen3_moe(section):
    raw = make_config(section("qwen3_moe"), None, torch.float32)
    del raw["norm_topk_prob"]
    assert parse_config(raw).norm_topk_prob is False


def test_token_ids_survive_a_change_of_family(section):
    config = make_config(section("qwen3_moe"), QWEN3 | {"max_window_layers": 28}, torch.bfloat16)
    assert config["eos_token_id"] == [5, 7]
    assert config["bos_token_id"] == 3
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert "max_window_layers" not in config


def test_without_a_base_no_token_ids_are_claimed(section):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**make_config(section("llama"), None, torch.float32))
    assert config.eos_token_id is None
    assert config.bos_token_id is None


def test_within_a_family_other_keys_are_kept(section):
    model = section("mixtral")
    base = make_config(model, None, torch.float32) | {"router_jitter_noise": 0.1, "_name_or_path": "/somewhere"}
    config = make_config(model, base, torch.float32)
    assert config["router_jitter_noise"] == 0.1
    assert "_name_or_path" not in config


def test_differences_name_the_fields(section):
    model = section("qwen3_moe")
    assert differences(model, section("qwen3_moe", init_std=0.5, max_seq_len=64)) == []
    assert differences(model, section("qwen3_moe", num_experts=8)) == ["num_experts: 4 expected, 8 found"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", ["llama"]),
        ("rope_scaling", "x"),
        ("rope_parameters", [1]),
        ("layer_types", 5),
        ("mlp_only_layers", 3),
        ("rope_theta", "big"),
        ("decoder_sparse_step", 1.5),
    ],
)
def test_values_of_another_kind_are_named(key, value):
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*expected"):
        parse_config(LLAMA | {key: value})


def test_absurd_sizes_are_refused_at_once():
    with pytest.raises(CheckpointError, match=r"num_(layers.*less than or equal to|hidden_layers.*63 bits)"):
        parse_config(QWEN3_MOE | {"num_hidden_layers": 10**30})


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_theta": "x"}, "rope_theta is 'x'; a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0; a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"rope_type": "llama3"}, "the RoPE variant llama3 needs the key 'factor'"),
        ({"rope_type": "linear", "factor": "x"}, "factor is 'x'; a number above 0"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
        ({"rope_type": "linear", "factor": -1}, "factor is -1"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": {}}, "beta_fast is {}; a number"),
        (
            {"rope_type": "longrope", "short_factor": 5, "long_factor": [1.0] * 8},
            "short_factor is 5; a list of 8 numbers",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}, "long_factor has 1 numbers"),
    ],
)
def test_rope_is_checked_value_by_value(rope, said):
    with pytest.raises(CheckpointError, match=said):
        parse_config(LLAMA | {"rope_parameters": {"rope_theta": 1e4} | rope})


@pytest.mark.parametrize(
    ("key", "value"), [("head_dim", 0), ("num_key_value_heads", 0), ("num_key_value_heads", ""), ("vocab_size", "64")]
)
def test_values_are_read_and_never_taken_for_missing(key, value):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        parse_config(LLAMA | {key: value})
