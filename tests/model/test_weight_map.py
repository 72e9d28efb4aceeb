import weakref

import pytest
import torch
from torch import nn

from spes_mega.errors import CheckpointError
from spes_mega.layout.megatron import fusions
from spes_mega.layout.names import expected_tensors
from spes_mega.model import WeightMap, build, export_weights, load_weights
from tests.model import tiny
from tests.model.te_names import te_name

MODELS = {
    "moe": tiny.section("qwen3_moe", frozen_dtype="train"),
    "moe with a dense layer": tiny.section("qwen3_moe", dense_layers=(1,), ffn_hidden_size=40, frozen_dtype="train"),
    "mixtral": tiny.section("mixtral", frozen_dtype="train"),
    "dense": tiny.section("qwen3"),
    "dense tied": tiny.section("llama", tie_embeddings=True),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_round_trip_is_exact_and_in_canonical_order(model, dtype):
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    weights = tiny.random_weights(model, dtype=torch_dtype)
    gpt = tiny.loaded(tiny.recipe(model, dtype=dtype), weights, owned=(1, 2) if model.is_moe else None)
    assert {p.dtype for p in gpt.parameters()} == {torch_dtype}
    exported = dict(export_weights(gpt, model))
    assert list(exported) == list(expected_tensors(model))
    for name, tensor in weights.items():
        assert exported[name].dtype == torch_dtype
        assert torch.equal(exported[name], tensor), name


def test_reading_is_in_canonical_order_and_once():
    model = MODELS["moe"]
    weights, asked = tiny.random_weights(model), []

    def read(name):
        asked.append(name)
        return weights[name]

    load_weights(build(tiny.recipe(model)), model, read)
    assert asked == list(expected_tensors(model))


@pytest.mark.parametrize("owned", [(), (2, 3), (0, 2, 5), None])
def test_experts_keep_their_global_numbers(owned):
    model = MODELS["moe"]
    gpt = build(tiny.recipe(model), owned)
    load_weights(gpt, model, lambda name: torch.full(expected_tensors(model)[name], _expert_of(name)))
    for entry in WeightMap(model, gpt).entries:
        (expert,) = {_expert_of(name) for name in entry.names}
        assert (entry.parameter == expert).all(), entry.parameter_name
        assert entry.parameter.requires_grad == (expert < 0 or owned is None or expert in owned)


def _expert_of(name):
    return float(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else -1.0


def test_every_entry_joins_what_it_splits():
    model = MODELS["moe with a dense layer"]
    gpt = tiny.loaded(tiny.recipe(model), tiny.random_weights(model))
    for entry in WeightMap(model, gpt).entries:
        value = torch.randn(entry.shape, dtype=torch.float64)
        assert torch.equal(entry.join(entry.split(value)), value)
        for (name, part), shape in zip(entry.split(value).items(), entry.shapes, strict=True):
            assert part.shape == shape == expected_tensors(model)[name]


def test_missing_and_misshapen_tensors_are_named():
    model = MODELS["moe"]
    gpt = build(tiny.recipe(model))
    weights = tiny.random_weights(model)
    key = "model.layers.1.self_attn.k_proj.weight"
    entry = next(e for e in WeightMap(model, gpt).entries if key in e.names)
    with pytest.raises(CheckpointError, match=f"{key}: missing"):
        entry.join({name: weights[name] for name in entry.names if name != key})
    # the right number of values in the wrong shape must not slip in
    weights[key] = weights[key].reshape(32, 128)
    with pytest.raises(CheckpointError, match=rf"{key}: has shape \(32, 128\), .* needs \(64, 64\)"):
        load_weights(gpt, model, weights.__getitem__)


def test_a_model_of_another_shape_is_refused_by_name():
    gpt = build(tiny.recipe(MODELS["dense tied"]))
    untied = MODELS["dense tied"].model_copy(update={"tie_embeddings": False})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: no parameter"):
        WeightMap(untied, gpt)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..*: not a tensor of the recipe's model"):
        WeightMap(MODELS["dense tied"].model_copy(update={"num_layers": 1}), gpt)
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight: has shape \(1003, 64\)"):
        WeightMap(MODELS["dense tied"].model_copy(update={"vocab_size": 1024}), gpt)


def test_a_parameter_that_no_rule_knows_is_named():
    gpt = build(tiny.recipe(MODELS["dense"]))
    gpt.decoder.layers[0].extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.extra\.weight: no rule"):
        WeightMap(MODELS["dense"], gpt)


ATTENTION = {
    "linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight",
    "q_layernorm.weight", "k_layernorm.weight",
}  # fmt: skip
TRANSFORMER_ENGINE = {
    "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight",
    *(f"decoder.layers.{layer}.self_attention.{name}" for layer in (0, 1) for name in ATTENTION),
    "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.mlp.router.weight",
    *(
        f"decoder.layers.0.mlp.experts.groups.{group}.linear_fc{linear}.weight{index}"
        for group in range(3) for linear in (1, 2) for index in (0, 1)
    ),
    "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight",
}  # fmt: skip
"""All parameters of "moe with a dense layer" that owns experts 2 and 3 of 6, as `make te-check` finds them."""


def with_transformer_engine_names(model, **train):
    """A stand-in for the model of Transformer Engine's modules, which need CUDA: its names, our parameters."""
    gpt = build(tiny.recipe(model, **train), owned=(2, 3) if model.is_moe else None)
    renamed = {te_name(name, model): parameter for name, parameter in gpt.named_parameters()}
    gpt.named_parameters = lambda: renamed.items()
    return gpt


@pytest.mark.parametrize("zero_stage", [1, 3])  # experts in groups, and one after the other
def test_transformer_engine_names_are_covered(zero_stage):
    model = MODELS["moe with a dense layer"]
    gpt = with_transformer_engine_names(model, zero_stage=zero_stage)
    assert {name for name, _ in gpt.named_parameters()} == TRANSFORMER_ENGINE
    by_name = {entry.parameter_name: entry.names for entry in WeightMap(model, gpt).entries}
    assert by_name["decoder.layers.0.mlp.experts.groups.2.linear_fc1.weight1"] == (
        "model.layers.0.mlp.experts.5.gate_proj.weight",
        "model.layers.0.mlp.experts.5.up_proj.weight",
    )
    assert by_name["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] == (
        "model.layers.1.post_attention_layernorm.weight",
    )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_what_transformer_engine_names_hold_round_trips(model):
    gpt, weights = with_transformer_engine_names(model), tiny.random_weights(model)
    load_weights(gpt, model, weights.__getitem__)
    exported = dict(export_weights(gpt, model))
    assert list(exported) == list(expected_tensors(model))
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_qkv_is_interleaved_by_group_for_weights_and_biases():
    # 4 query heads, 2 KV heads, head_dim 1: group 0 holds q0 q1 k0 v0, group 1 holds q2 q3 k1 v1
    model = tiny.section("qwen3", head_dim=1)
    for trailing in ((), (3,)):
        rows = torch.arange(8.0).reshape(8, *([1] * len(trailing))).expand(8, *trailing).contiguous()
        query, key, value = (part.reshape(-1, *trailing) for part in fusions.qkv(rows, model))
        assert query.reshape(4, -1)[:, 0].tolist() == [0, 1, 4, 5]
        assert key.reshape(2, -1)[:, 0].tolist() == [2, 6]
        assert value.reshape(2, -1)[:, 0].tolist() == [3, 7]


def test_loading_holds_one_source_tensor_at_a_time():
    model = MODELS["moe"]
    weights, alive = tiny.random_weights(model), []

    def read(name):
        assert [ref for ref in alive if ref() is not None] == []
        tensor = weights[name].clone()
        alive.append(weakref.ref(tensor))
        return tensor

    gpt = build(tiny.recipe(model))
    memory = {name: parameter.data_ptr() for name, parameter in gpt.named_parameters()}
    load_weights(gpt, model, read)
    assert {name: parameter.data_ptr() for name, parameter in gpt.named_parameters()} == memory
