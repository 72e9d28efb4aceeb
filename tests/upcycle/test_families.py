"""Every family in, every family out: the result computes what its source does, in transformers and in our model."""

import json

import pytest
import torch
from safetensors.torch import load_file

from spes_mega.cli import main
from spes_mega.errors import CheckpointError
from spes_mega.hub.state.initial import commit_initial
from spes_mega.hub.state.store import Store
from spes_mega.layout import open_checkpoint
from spes_mega.model import build, forward_logits, load_weights
from spes_mega.recipe import ModelSection, Recipe, TrainSection
from tests.upcycle.making import run

TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}


def our_logits(path):
    with open_checkpoint(path) as checkpoint:
        model = checkpoint.model
        gpt = build(Recipe(model=model, train=TrainSection(seq_len=64, dtype="fp32")))
        load_weights(gpt, model, checkpoint.read)
    tokens = torch.randint(103, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return forward_logits(gpt.eval(), tokens)


@pytest.mark.parametrize(
    ("family", "to", "found", "changes"),
    [
        ("qwen2", None, "qwen2_moe", {}),
        ("qwen2", "qwen2_moe", "qwen2_moe", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", "qwen2_moe", "qwen2_moe", {"head_dim": 8}),
        ("llama", None, "mixtral", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
        ("mistral", None, "mixtral", {"sliding_window": None}),
        ("mistral", "mixtral", "mixtral", {"sliding_window": 11}),
        ("mistral", "qwen2_moe", "qwen2_moe", {"sliding_window": None, "tie_word_embeddings": True}),
        ("olmo2", None, "flex_olmo", {"rms_norm_eps": 1e-3}),
        ("qwen3", None, "qwen3_moe", {"tie_word_embeddings": True}),
    ],
)
def test_copies_compute_the_same_everywhere(make_dense, logits_of, tmp_path, family, to, found, changes):
    src = make_dense(family, **changes)
    plan = run(src, tmp_path / "moe", method="copy", num_experts=4, to=to, router_init="normal")
    assert plan.model.family == json.loads((tmp_path / "moe/config.json").read_text())["model_type"] == found
    expected = logits_of(src)
    assert float(expected.abs().max()) > 1
    for logits in (our_logits(src), logits_of(tmp_path / "moe"), our_logits(tmp_path / "moe")):
        assert float((logits - expected).abs().max()) <= TOLERANCE


def test_dense_layers_in_qwen2_moe_have_no_shared_expert(make_dense, logits_of, tmp_path):
    src = make_dense("qwen2")
    run(src, tmp_path / "moe", method="copy", num_experts=4, moe_layers="1")
    expected = logits_of(src)
    for logits in (logits_of(tmp_path / "moe"), our_logits(tmp_path / "moe")):
        assert float((logits - expected).abs().max()) <= TOLERANCE
    names = load_file(tmp_path / "moe/model.safetensors").keys()
    assert sorted(name for name in names if "shared_expert" in name) == [
        "model.layers.1.mlp.shared_expert.down_proj.weight",
        "model.layers.1.mlp.shared_expert.gate_proj.weight",
        "model.layers.1.mlp.shared_expert.up_proj.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
    ]


def test_biases_are_those_of_the_source(make_dense, tmp_path):
    src = make_dense("qwen2")
    run(src, tmp_path / "moe", num_experts=4)
    before, after = (load_file(path / "model.safetensors") for path in (src, tmp_path / "moe"))
    biases = [name for name in before if name.endswith(".bias")]
    assert len(biases) == 6
    assert all(before[name].any() and torch.equal(after[name], before[name]) for name in biases)


@pytest.mark.parametrize("spelling", [4, 5])
@pytest.mark.parametrize(("family", "moe"), [("qwen2", "qwen2_moe"), ("mistral", "mixtral"), ("olmo2", "flex_olmo")])
def test_a_rope_variant_is_carried_through(make_dense, logits_of, tmp_path, family, moe, spelling):
    src = make_dense(family, spelling=spelling, rope_parameters=YARN_ROPE)
    run(src, tmp_path / "moe", method="copy", num_experts=4)
    config = json.loads((tmp_path / "moe/config.json").read_text())
    variant = {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"}
    assert config["model_type"] == moe
    assert config["rope_scaling"].items() >= variant.items()
    assert config["rope_parameters"].items() >= YARN_ROPE.items()
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "to", "said"),
    [
        ("qwen3", "mixtral", "qwen3 normalizes queries and keys over each head, mixtral has no norm .*; qwen3_moe can"),
        ("qwen3", "olmoe", "olmoe normalizes queries and keys over their whole width"),
        ("olmo2", "olmoe", "olmo2 normalizes the outputs of attention"),
        ("qwen2", "mixtral", "qwen2 has biases"),
        (
            "llama",
            "qwen3_moe",
            "llama has no norm on queries and keys, qwen3_moe normalizes .* each head; mixtral or qwen2_moe can",
        ),
    ],
)
def test_a_family_that_cannot_hold_it_says_why(make_dense, tmp_path, capsys, family, to, said):
    src = make_dense(family)
    with pytest.raises(CheckpointError, match=said):
        run(src, tmp_path / "moe", to=to)
    with pytest.raises(SystemExit) as e:
        main(["upcycle", str(src), "--to", to, "--out", str(tmp_path / "moe")])
    assert e.value.code == CheckpointError.exit_code
    assert f"{to} cannot hold this {family} model" in capsys.readouterr().err
    assert not (tmp_path / "moe").exists()


def test_the_state_dict_of_a_megatron_model_gives_the_same_bytes(make_dense, tmp_path):
    src = make_dense("qwen2")
    with open_checkpoint(src) as checkpoint:
        gpt = build(Recipe(model=checkpoint.model, train=TrainSection(seq_len=64, dtype="fp32")))
        load_weights(gpt, checkpoint.model, checkpoint.read)
    torch.save({"model": gpt.state_dict(), "iteration": 12}, tmp_path / "megatron.pt")
    run(src, tmp_path / "a", num_experts=4)
    run(tmp_path / "megatron.pt", tmp_path / "b", src / "config.json", num_experts=4)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_a_hubs_round_is_a_source(tmp_path, logits_of):
    model = ModelSection(
        family="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, ffn_hidden_size=48,
        vocab_size=103, max_seq_len=64,
    )  # fmt: skip
    recipe = Recipe(model=model, train=TrainSection(seq_len=64, seed=5))
    store = Store(tmp_path / "state", recipe)
    commit_initial(store, recipe, None)
    store.close()
    src = store.round_dir(0)
    run(src, tmp_path / "moe", method="copy", num_experts=4)
    assert float((logits_of(tmp_path / "moe") - logits_of(src)).abs().max()) <= TOLERANCE
