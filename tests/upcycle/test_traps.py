"""Faults that users of other converters reported: one test for each, under the name of the fault.

A contract stands behind all of them: equal, or a clear error that names the thing; nothing lost.
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spes_mega.errors import CheckpointError, RecipeError
from spes_mega.layout import CheckpointWriter, open_checkpoint
from spes_mega.recipe import ModelSection, Recipe, UpcycleSection
from tests.upcycle.making import run, verified
from upcycle.verify.reference import Reference

TOLERANCE = 1e-4
SPLIT = {"method": "split", "num_experts": 3, "granularity": 4, "router_init": "normal"}


def gap(src, out, logits_of):
    return float((logits_of(out) - logits_of(src)).abs().max())


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral", "olmo2"])
def test_tied_embeddings_stay_tied_through_load_and_save(make_dense, logits_of, tmp_path, family):
    src = make_dense(family, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(src / "model.safetensors")
    run(src, tmp_path / "moe", method="copy")
    assert "lm_head.weight" not in load_file(tmp_path / "moe/model.safetensors")
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert moe.lm_head.weight is moe.model.embed_tokens.weight
    moe.save_pretrained(tmp_path / "saved")
    assert gap(src, tmp_path / "saved", logits_of) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "mistral", "olmo2"])
@pytest.mark.parametrize("settings", [{"method": "copy"}, SPLIT, {"method": "copy", "router_init": "normal"}])
def test_no_expert_stays_as_initialized(make_dense, tmp_path, family, settings):
    """Transformers finds every tensor that it wants, wants every one that it finds, and holds our values."""
    run(make_dense(family), tmp_path / "moe", **settings)
    moe, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stacked = dict(moe.named_parameters())["model.layers.1.mlp.experts.down_proj"]
    with open_checkpoint(tmp_path / "moe") as ours:
        for expert in range(ours.model.num_experts):
            assert torch.equal(stacked[expert], ours.read(f"model.layers.1.mlp.experts.{expert}.down_proj.weight"))


def test_a_tensor_that_is_not_consumed_or_not_filled_is_an_error(make_dense, tmp_path):
    src = make_dense()
    state = load_file(src / "model.safetensors")
    save_file(state | {"model.layers.0.mlp.extra.weight": torch.zeros(2)}, src / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensor: model.layers.0.mlp.extra.weight"):
        run(src, tmp_path / "moe")
    with (
        pytest.raises(CheckpointError, match=r"input_layernorm.weight was not filled completely"),
        CheckpointWriter(tmp_path / "moe", ModelSection(**plain()), torch.float32) as writer,
    ):
        writer.write("model.embed_tokens.weight", torch.zeros(8, 4))
    assert not (tmp_path / "moe").exists()


def plain(**changes):
    shape = {
        "family": "llama", "num_layers": 1, "hidden_size": 4, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4,
        "ffn_hidden_size": 4, "vocab_size": 8,
    }  # fmt: skip
    return shape | changes


@pytest.mark.parametrize("renormalize", [True, False])
def test_routers_agree_only_if_both_sides_renormalize_alike(make_dense, logits_of, tmp_path, renormalize):
    """We write norm_topk_prob: true, and read either value as it stands."""
    src = make_dense()
    run(src, tmp_path / "moe", method="copy", router_init="mlp_std")
    path = tmp_path / "moe/config.json"
    raw = json.loads(path.read_text())
    assert raw["norm_topk_prob"] is True
    path.write_text(json.dumps(raw | {"norm_topk_prob": renormalize}))
    assert (gap(src, tmp_path / "moe", logits_of) <= TOLERANCE) == renormalize
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    h = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), open_checkpoint(tmp_path / "moe") as ours:
        assert ours.model.norm_topk_prob == renormalize
        theirs = moe.model.layers[1].mlp(h)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        assert torch.allclose(Reference(ours.model, ours.read).moe(1, h), theirs, atol=1e-4)


def test_top_1_of_renormalized_weights_has_no_router_gradient_and_is_refused(make_dense, tmp_path):
    with pytest.raises(ValueError, match="top_k 1 renormalized is always 1, so the router would get no gradient"):
        UpcycleSection(top_k=1)
    moe = {"family": "qwen3_moe", "num_experts": 2, "top_k": 1, "expert_hidden_size": 4, "ffn_hidden_size": None}
    with pytest.raises(ValueError, match="the router gets no gradient"):
        Recipe(model=plain(**moe, norm_topk_prob=True))
    assert Recipe(model=plain(**moe, norm_topk_prob=False)).model.top_k == 1
    gradients = {}
    for renormalize in (True, False):
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        model = ModelSection(**plain(**moe, norm_topk_prob=renormalize))
        weights = Reference(model, lambda name, rows=rows: rows).router_weights(0, torch.ones(3, 4))
        weights.amax(dim=-1).sum().backward()
        gradients[renormalize] = float(rows.grad.abs().max())
    assert gradients[True] <= 1e-7 < 1e-3 < gradients[False]
    # one copy out of several, cut into parts: several weights, so it works
    run(make_dense(), tmp_path / "moe", **SPLIT | {"top_k": 1})


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_head_dim_is_its_own_number(make_dense, logits_of, tmp_path, family):
    src = make_dense(family, hidden_size=64, num_attention_heads=4, head_dim=32)
    plan = run(src, tmp_path / "moe", method="copy")
    assert (plan.model.hidden_size, plan.model.num_heads, plan.model.head_dim) == (64, 4, 32)
    assert json.loads((tmp_path / "moe/config.json").read_text())["head_dim"] == 32
    assert gap(src, tmp_path / "moe", logits_of) <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "held", "wrong"), [("qwen3", 16, 64), ("qwen3", 16, 1), ("olmo2", 32, 8), ("olmo2", 32, 1)]
)
def test_norms_of_one_head_and_of_all_heads_are_never_broadcast(make_dense, tmp_path, family, held, wrong):
    src = make_dense(family)
    state = load_file(src / "model.safetensors")
    name = "model.layers.1.self_attn.q_norm.weight"
    assert state[name].shape == (held,) or family == "olmo2"
    state[name] = torch.ones(wrong)
    save_file(state, src / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}: shape \[{wrong}\], but config.json asks for"):
        run(src, tmp_path / "moe")


def test_query_groups_and_biases_that_are_not_zero(make_dense, logits_of, tmp_path):
    src = make_dense("qwen2", num_attention_heads=4, num_key_value_heads=2)
    state = load_file(src / "model.safetensors")
    assert all(float(state[f"model.layers.0.self_attn.{part}_proj.bias"].abs().min()) > 0 for part in "qkv")
    plan = run(src, tmp_path / "moe", method="copy")
    assert gap(src, tmp_path / "moe", logits_of) <= TOLERANCE
    assert verified(src, tmp_path / "moe", plan).max_difference <= 1e-5


def test_a_vocabulary_of_no_round_size_is_not_padded_and_nothing_is_dropped_out(make_dense, logits_of, tmp_path):
    src = make_dense(vocab_size=1003, attention_dropout=0.0)
    run(src, tmp_path / "moe", method="copy")
    state = load_file(tmp_path / "moe/model.safetensors")
    assert state["model.embed_tokens.weight"].shape == state["lm_head.weight"].shape == (1003, 32)
    assert json.loads((tmp_path / "moe/config.json").read_text())["vocab_size"] == 1003
    moe = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").train()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(moe(tokens).logits, moe(tokens).logits)


@pytest.mark.parametrize("settings", [{"method": "noise"}, {"method": "drop"}, SPLIT])
def test_two_shards_give_what_one_file_gives(make_dense, tmp_path, settings):
    one, two = make_dense(name="one"), make_dense(name="two", max_shard_size="90KB")
    assert len(list(two.glob("*.safetensors"))) == 2
    run(one, tmp_path / "a", **settings)
    run(two, tmp_path / "b", **settings)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_splitting_is_exact_only_with_the_factor_on_up_and_down_and_whole_groups(make_dense, logits_of, tmp_path):
    """Three variants of one result: as it is; the factor moved to gate; rows of a group that are not equal."""
    src = make_dense()
    plan = run(src, tmp_path / "right", **SPLIT)
    assert gap(src, tmp_path / "right", logits_of) <= TOLERANCE

    def variant(name, change):
        run(src, tmp_path / name, **SPLIT)
        state = load_file(tmp_path / name / "model.safetensors")
        for key in state:
            change(key, state[key])
        save_file(state, tmp_path / name / "model.safetensors", {"format": "pt"})
        return gap(src, tmp_path / name, logits_of)

    def factor_on_gate(key, tensor):
        if ".experts." in key:
            tensor *= {"gate": 2, "up": 0.5, "down": 1}[key.split(".")[-2].removesuffix("_proj")]

    def groups_torn(key, tensor):
        if key.endswith(".mlp.gate.weight"):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)))

    assert variant("gate", factor_on_gate) > 0.05
    assert variant("torn", groups_torn) > 0.05
    assert plan.difference() is None
    with pytest.raises(ValueError, match="would get parts of different copies instead of whole ones"):
        UpcycleSection(**SPLIT | {"router_init": "zeros"})


def test_layers_that_a_family_cannot_leave_dense_are_refused_with_the_reason(make_dense, tmp_path):
    with pytest.raises(CheckpointError, match=r"moe_layers odd: mixtral has experts in every layer.*to qwen2_moe"):
        run(make_dense("llama"), tmp_path / "moe", moe_layers="odd")
    with pytest.raises(RecipeError, match="moe_layers 5: there is no layer 5: the model's layers are 0 to 1"):
        run(tmp_path / "dense", tmp_path / "moe", moe_layers="5")
    assert not (tmp_path / "moe").exists()
