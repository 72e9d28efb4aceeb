"""The result, opened in stock transformers, computes what its source does."""

import json

import pytest
import tokenizers
import torch
import transformers

from spes_mega.layout import open_checkpoint
from spes_mega.recipe import load_recipe
from tests.upcycle.making import run

# Logits are of order 10 here; sums of two equal halves differ by rounding alone.
TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spelling", [4, 5])
def test_copies_compute_the_same(make_dense, logits_of, tmp_path, family, tied, spelling):
    src = make_dense(family, spelling=spelling, tie_word_embeddings=tied)
    run(src, tmp_path / "moe", method="copy", num_experts=4)
    expected = logits_of(src)
    assert float(expected.abs().max()) > 1
    assert float((logits_of(tmp_path / "moe") - expected).abs().max()) <= TOLERANCE
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert type(moe).__name__ == {"qwen3": "Qwen3MoeForCausalLM", "llama": "MixtralForCausalLM"}[family]
    assert (moe.lm_head.weight is moe.model.embed_tokens.weight) == tied
    assert moe.config.eos_token_id == [5, 7]
    assert moe.config.bos_token_id == 3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": 8}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("qwen3", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
        ("qwen3", {"num_key_value_heads": 4, "head_dim": 32}),
    ],
)
@pytest.mark.parametrize("router_init", ["normal", "mlp_std"])
def test_any_router_will_do_while_experts_are_equal(make_dense, logits_of, tmp_path, family, changes, router_init):
    src = make_dense(family, spelling=4, **changes)
    run(src, tmp_path / "moe", method="copy", router_init=router_init, num_experts=5, top_k=3)
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE


SPLIT = {"method": "split", "num_experts": 3, "router_init": "normal"}


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(
    "settings",
    [
        SPLIT | {"granularity": 2, "top_k": 1},
        SPLIT | {"granularity": 3},
        SPLIT | {"granularity": 4, "router_init": "mlp_std"},
        SPLIT | {"granularity": 8, "num_experts": 2, "router_init": "zeros"},  # all are taken
        {"method": "partition", "num_experts": 4, "top_k": 4},
        {"method": "partition", "num_experts": 6, "top_k": 6, "partition_by": "kmeans"},
    ],
)
def test_split_and_whole_partitions_compute_the_same(make_dense, logits_of, tmp_path, family, settings):
    src = make_dense(family, intermediate_size=96)
    plan = run(src, tmp_path / "moe", **settings)
    assert plan.difference() is None
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE


def test_split_in_bf16_by_powers_of_two_keeps_all_bits(make_dense, logits_of, tmp_path):
    src = make_dense(dtype=torch.bfloat16, intermediate_size=96)
    run(src, tmp_path / "moe", **SPLIT, granularity=8)
    with open_checkpoint(tmp_path / "moe") as moe:
        assert {moe.dtype(name) for name in moe.names} == {torch.bfloat16}
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE


def test_the_size_of_what_comes_out(make_dense, tmp_path):
    src = make_dense()
    dense = sum(t.numel() for t in tensors_of(src).values())
    ffn = 2 * 3 * 32 * 48
    split = run(src, tmp_path / "split", **SPLIT, granularity=4)
    assert (split.model.num_experts, split.model.top_k, split.model.expert_hidden_size) == (12, 8, 12)
    assert sum(t.numel() for t in tensors_of(tmp_path / "split").values()) == dense + 2 * ffn + 2 * 12 * 32
    part = run(src, tmp_path / "part", method="partition", num_experts=6)
    assert (part.model.num_experts, part.model.top_k, part.model.expert_hidden_size) == (6, 2, 8)
    assert sum(t.numel() for t in tensors_of(tmp_path / "part").values()) == dense + 2 * 6 * 32
    assert part.summary()["params_active"] == dense + 2 * 6 * 32 - ffn * 2 // 3


def test_the_gap_of_inexact_methods_grows_with_what_is_changed(make_dense, logits_of, tmp_path):
    src = make_dense(intermediate_size=96)
    expected = logits_of(src)

    def gap(name, **settings):
        run(src, tmp_path / name, **settings)
        return float((logits_of(tmp_path / name) - expected).abs().mean())

    drops = [gap(f"drop-{ratio}", method="drop", drop_ratio=ratio) for ratio in (0.0, 0.1, 0.9)]
    assert drops[0] <= TOLERANCE < 0.05 < drops[1] < drops[2]
    parts = [gap(f"part-{k}", method="partition", num_experts=8, top_k=k) for k in (8, 7, 2)]
    assert parts[0] <= TOLERANCE < 0.05 < parts[1] < parts[2]


@pytest.mark.parametrize(
    ("layers", "dense"), [("odd", [0, 2]), ("even", [1, 3]), ("1-2", [0, 3]), ("0,3", [1, 2]), ("3", [0, 1, 2])]
)
def test_layers_that_stay_dense(make_dense, logits_of, tmp_path, layers, dense):
    src = make_dense(num_hidden_layers=4)
    plan = run(src, tmp_path / "moe", method="copy", moe_layers=layers)
    assert list(plan.model.dense_layers) == dense
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE
    raw = json.loads((tmp_path / "moe/config.json").read_text())
    assert (raw["mlp_only_layers"], raw["decoder_sparse_step"]) == (dense, 1)
    with open_checkpoint(src) as source, open_checkpoint(tmp_path / "moe") as moe:
        assert moe.model == plan.model
        for layer in dense:
            name = f"model.layers.{layer}.mlp.up_proj.weight"
            assert torch.equal(moe.read(name), source.read(name))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_another_family_may_leave_layers_dense(make_dense, logits_of, tmp_path, family):
    src = make_dense(family, num_attention_heads=4, num_hidden_layers=4)
    plan = run(src, tmp_path / "moe", method="copy", moe_layers="odd", to="qwen2_moe")
    assert plan.model.dense_layers == (0, 2)
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE


def test_noise_of_zero_is_a_copy(make_dense, logits_of, tmp_path):
    src = make_dense()
    for k, settings in enumerate([{"noise_std": 0.0}, {"noise_fraction": 0.0}]):
        run(src, tmp_path / f"moe-{k}", method="noise", **settings)
        assert float((logits_of(tmp_path / f"moe-{k}") - logits_of(src)).abs().max()) <= TOLERANCE


def test_noise_changes_experts_alone_and_each_one_differently(make_dense, tmp_path):
    src = make_dense("llama")
    run(src, tmp_path / "moe", num_experts=3)
    with open_checkpoint(src) as dense, open_checkpoint(tmp_path / "moe") as moe:
        for name in moe.names:
            if name in dense.names:
                assert torch.equal(moe.read(name), dense.read(name)), name
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            before = dense.read(f"model.layers.1.mlp.{matrix}.weight")
            experts = [moe.read(f"model.layers.1.mlp.experts.{e}.{matrix}.weight") for e in range(3)]
            noise = [expert - before for expert in experts]
            # 1536 draws: the share that is touched has a std of 0.013
            assert all(0.44 < float((n != 0).float().mean()) < 0.56 for n in noise)
            assert not any(torch.equal(noise[a], noise[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
        assert not moe.read("model.layers.0.mlp.gate.weight").any()


@pytest.mark.parametrize(("asked", "kept"), [("source", "bf16"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_dtypes(make_dense, tmp_path, asked, kept):
    src = make_dense(dtype=torch.bfloat16)
    plan = run(src, tmp_path / "moe", method="copy", dtype=asked)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kept]
    with open_checkpoint(tmp_path / "moe") as moe:
        assert {moe.dtype(name) for name in moe.names} == {dtype}
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").dtype == dtype
    assert (plan.rounds is None) == (asked != "fp16")
    assert plan.bytes_out == sum(t.nbytes for t in tensors_of(tmp_path / "moe").values())


def tensors_of(path):
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def test_what_stands_beside_the_weights(make_dense, tmp_path):
    src = make_dense(max_position_embeddings=64)
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(src / "tokenizer.json"))
    plan = run(src, tmp_path / "moe", num_experts=4, seed=9)
    assert (tmp_path / "moe/tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()
    assert (tmp_path / "moe/generation_config.json").read_bytes() == (src / "generation_config.json").read_bytes()
    facts = json.loads((tmp_path / "moe/upcycle.json").read_text())
    assert facts["settings"] == plan.settings.model_dump()
    assert [source["name"] for source in facts["sources"]] == ["dense"]
    recipe = load_recipe(tmp_path / "moe/recipe.yaml")
    with open_checkpoint(tmp_path / "moe") as moe:
        assert recipe.model == moe.model
    assert recipe.upcycle == plan.settings
    assert recipe.train.seq_len == 64
