"""The model of Transformer Engine's modules, built without a GPU: how all is named and shaped, and what is trained."""

import json

import pytest
import torch

transformer_engine = pytest.importorskip("transformer_engine", reason="Transformer Engine is not there: make te-check")

from spes_mega.errors import RecipeError  # noqa: E402
from spes_mega.layout import CheckpointWriter, expected_tensors, make_config, open_checkpoint  # noqa: E402
from spes_mega.model import WeightMap, build, export_weights, load_weights  # noqa: E402
from spes_mega.model.partitioned_experts import partitioned_experts  # noqa: E402
from tests.model import tiny  # noqa: E402
from tests.model.te_names import EXTRA_STATE, te_name  # noqa: E402
from tests.model.test_weight_map import TRANSFORMER_ENGINE  # noqa: E402

MODELS = {
    "moe": tiny.section("qwen3_moe"),
    "moe with a dense layer": tiny.section("qwen3_moe", dense_layers=(1,), ffn_hidden_size=40),
    "mixtral": tiny.section("mixtral", sliding_window=16),
    "qwen2_moe": tiny.section("qwen2_moe"),
    "olmoe": tiny.section("olmoe"),
    "dense": tiny.section("qwen3"),
    "dense tied": tiny.section("llama", tie_embeddings=True),
    "biases": tiny.section("qwen2"),
    "norms of outputs": tiny.section("olmo2"),
}
PARTITIONS = [(), (2, 3), (0, 2, 5), None]
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def owned_of(model):
    return (2, 3) if model.is_moe else None


@each_model
def test_names_and_shapes_are_the_local_models(build_te, model):
    local = build(tiny.recipe(model), owned_of(model))
    expected = {te_name(name, model): tuple(p.shape) for name, p in local.named_parameters()}
    found = {name: tuple(p.shape) for name, p in build_te(model, owned_of(model)).named_parameters()}
    assert found == expected


def test_names_are_those_that_the_weight_map_is_tested_with(build_te):
    gpt = build_te(MODELS["moe with a dense layer"], (2, 3))
    assert {name for name, _ in gpt.named_parameters()} == TRANSFORMER_ENGINE


def test_the_modules_are_transformer_engines(build_te):
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    gpt = build_te(MODELS["moe"], (2, 3))
    for layer in gpt.decoder.layers:
        assert isinstance(layer.self_attention.linear_qkv, extension.TELayerNormColumnParallelLinear)
        assert isinstance(layer.self_attention.core_attention, extension.TEDotProductAttention)
        for group in layer.mlp.experts.groups:
            assert isinstance(group, TEGroupedMLP)
            assert isinstance(group.linear_fc1, transformer_engine.pytorch.GroupedLinear)


@each_model
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_round_trip(build_te, model, dtype):
    held = model.model_copy(update={"frozen_dtype": "train"})
    weights = tiny.random_weights(model, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    gpt = build_te(held, owned_of(model), dtype=dtype)
    assert all(parameter.isnan().all() for parameter in gpt.parameters())  # none is left as it was made
    load_weights(gpt, held, weights.__getitem__)
    exported = dict(export_weights(gpt, held))
    assert exported.keys() == expected_tensors(model).keys()
    for name, tensor in weights.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name


def test_a_hugging_face_directory_loads_into_either(build_te, tmp_path):
    model = tiny.section("qwen3_moe", frozen_dtype="train")
    with CheckpointWriter(tmp_path / "moe", model, torch.float32) as writer:
        for name, tensor in tiny.random_weights(model).items():
            writer.write(name, tensor)
    models = (build(tiny.recipe(model), (2, 3)), build_te(model, (2, 3)))
    with open_checkpoint(tmp_path / "moe") as checkpoint:
        for gpt in models:
            load_weights(gpt, model, checkpoint.read)
    local, te = (dict(export_weights(gpt, model)) for gpt in models)
    assert local.keys() == te.keys()
    assert all(torch.equal(local[name], te[name]) for name in local)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("owned", PARTITIONS)
def test_what_is_not_owned_is_frozen_and_lives_in_its_dtype(build_te, owned, dtype):
    model = MODELS["moe"]
    gpt = build_te(model, owned, dtype=dtype)
    trained = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for entry in WeightMap(model, gpt).entries:
        expert = int(entry.names[0].split(".")[5]) if ".experts." in entry.names[0] else None
        trains = expert is None or owned is None or expert in owned
        assert entry.parameter.requires_grad == trains, entry.parameter_name
        assert entry.parameter.dtype == (trained if trains else torch.bfloat16), entry.parameter_name


@pytest.mark.parametrize("owned", PARTITIONS)
def test_each_group_is_owned_or_frozen_as_a_whole(build_te, owned):
    """Transformer Engine asks the first matrix of a group alone whether there are gradients to compute."""
    for experts in partitioned_experts(build_te(MODELS["moe"], owned)):
        for run, group in zip(experts.runs, experts.groups, strict=True):
            assert {parameter.requires_grad for parameter in group.parameters()} == {run.owned}
            assert group.linear_fc1.num_gemms == group.linear_fc2.num_gemms == run.size


def test_a_group_frozen_in_part_is_noticed(build_te):
    model = MODELS["moe"]
    experts = next(partitioned_experts(build_te(model)))
    experts.groups[0].linear_fc2.weight3.requires_grad_(False)
    with pytest.raises(AssertionError, match="owned or frozen as a whole"):
        experts(torch.zeros(0, model.hidden_size), torch.zeros(6, dtype=torch.int64), torch.zeros(0))


@each_model
def test_a_state_dict_holds_the_parameters_and_extra_states(build_te, model):
    gpt = build_te(model, owned_of(model))
    state, names = gpt.state_dict(), {name for name, _ in gpt.named_parameters()}
    extra = {key for key in state if key.endswith(EXTRA_STATE)}
    assert extra
    # a tied head has no parameter of its own
    assert set(state) - extra - names <= {"output_layer.weight"}
    for key in extra:  # nothing that has to be kept: without FP8 they are empty
        assert state[key] is None or not torch.is_tensor(state[key]) or state[key].numel() == 0, key


def test_a_saved_state_dict_loads_into_another_model(build_te, tmp_path):
    model = tiny.section("qwen3_moe", frozen_dtype="train")
    weights = tiny.random_weights(model)
    first, second = build_te(model, (2, 3)), build_te(model, (2, 3))
    load_weights(first, model, weights.__getitem__)
    torch.save(first.state_dict(), tmp_path / "model.pt")
    second.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=False))
    for name, tensor in export_weights(second, model):
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_saved_dense_model_is_a_source_like_any_other(build_te, family, tmp_path):
    model = tiny.section(family)
    weights = tiny.random_weights(model)
    gpt = build_te(model)
    load_weights(gpt, model, weights.__getitem__)
    (tmp_path / "config.json").write_text(json.dumps(make_config(model, None, torch.float32)))
    torch.save({"model": gpt.state_dict()}, tmp_path / "model.pt")
    with open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert list(checkpoint.names) == list(weights)
        for name in checkpoint.names:
            assert torch.equal(checkpoint.read(name), weights[name]), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_is_refused_by_name():
    asked = MODELS["moe"].model_copy(update={"implementation": "transformer_engine"})
    with pytest.raises(RecipeError, match=r"model\.implementation: .* no CUDA device"):
        build(tiny.recipe(asked))
