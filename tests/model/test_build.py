from importlib.util import find_spec

import pytest
import torch

from spes_mega.errors import RecipeError
from spes_mega.layout.names import expected_tensors
from spes_mega.model import build, forward_logits
from spes_mega.recipe import Recipe
from tests.model import tiny


def test_weights_that_were_not_loaded_cannot_pass_for_a_model():
    model = tiny.section("qwen3_moe")
    gpt = build(tiny.recipe(model))
    assert all(parameter.isnan().all() for parameter in gpt.parameters())
    assert forward_logits(gpt, tiny.tokens(model)).isnan().all()


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_parameter_counts_are_exact_on_the_meta_device(family):
    model = tiny.section(family, num_layers=5, vocab_size=151_665, hidden_size=1024)
    gpt = build(tiny.recipe(model), device="meta")
    assert {parameter.device.type for parameter in gpt.parameters()} == {"meta"}
    expected = sum(torch.Size(shape).numel() for shape in expected_tensors(model).values())
    assert sum(parameter.numel() for parameter in gpt.parameters()) == expected


def test_no_dropout_and_no_bias():
    model = tiny.section("qwen3_moe")
    gpt = tiny.loaded(tiny.recipe(model), tiny.random_weights(model))
    assert not [name for name, _ in gpt.named_parameters() if "bias" in name]
    ids = tiny.tokens(model)
    assert torch.equal(forward_logits(gpt.train(), ids), forward_logits(gpt.eval(), ids))


def test_rope_scaling_is_refused_by_name():
    model = tiny.section("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(RecipeError, match=r"model\.rope_scaling: .*'llama3'"):
        build(tiny.recipe(model))


def test_an_owned_expert_that_does_not_exist_is_named():
    with pytest.raises(RecipeError, match="no expert 6 "):
        build(tiny.recipe(tiny.section("qwen3_moe")), owned=(4, 6))
    with pytest.raises(RecipeError, match="no expert 0 "):
        build(tiny.recipe(tiny.section("qwen3")), owned=(0,))


def test_defaults_of_the_recipe_build():
    recipe = Recipe(model=tiny.section("mixtral", max_seq_len=2048))
    gpt = build(recipe, owned=())
    assert recipe.train.aux_loss_coeff == 0.01
    assert gpt.config.moe_aux_loss_coeff == 0.01 / 2  # a mean over two layers, which Megatron-Core adds up
    assert gpt.config.moe_z_loss_coeff == recipe.train.router_z_loss_coeff == 1e-3
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is there")
def test_transformer_engine_that_is_not_there_is_refused_by_name():
    model = tiny.section("qwen3_moe", implementation="transformer_engine")
    with pytest.raises(RecipeError, match=r"model\.implementation: .*transformer-engine is not installed"):
        build(tiny.recipe(model))
    for implementation in ("auto", "local"):
        build(tiny.recipe(tiny.section("qwen3_moe", implementation=implementation)), device="meta")
