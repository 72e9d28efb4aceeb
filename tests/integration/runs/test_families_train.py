"""Families with parts of their own, trained by a real node: every weight moves, but those that do nothing stay so."""

import pytest
import torch

from spes_mega.layout import CheckpointWriter, expected_tensors, open_checkpoint
from spes_mega.layout.families.optional_parts import optional_part
from spes_mega.recipe import load_recipe
from tests.integration.conftest import MODEL
from tests.integration.processes import launch

FAMILIES = {
    "qwen2_moe": {"family": "qwen2_moe", "shared_expert_hidden_size": 16, "dense_layers": [0], "ffn_hidden_size": 40},
    "flex_olmo": {"family": "flex_olmo"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, write_recipe):
    """Each family starts from random weights, with biases and the shared expert at zero, and takes two steps."""
    folder = tmp_path_factory.mktemp("families")
    processes = []
    for family, changes in FAMILIES.items():
        recipe = write_recipe(folder, family, model=MODEL | changes, train={"steps": 2, "warmup_steps": 0})
        model = load_recipe(recipe).model
        rng = torch.Generator().manual_seed(1)
        with CheckpointWriter(folder / f"{family}-init", model, torch.float32) as writer:
            for name, shape in expected_tensors(model).items():
                value = torch.randn(shape, generator=rng) * 0.1 + name.endswith("norm.weight")
                writer.write(name, value * (optional_part(name) is None))
        processes.append(launch(recipe, "--out", folder / family, "--init", folder / f"{family}-init"))
    try:
        for process in processes:
            process.succeed()
    finally:
        for process in processes:
            process.end()
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_what_moves_and_what_does_not(results, family):
    with open_checkpoint(results / f"{family}-init") as before, open_checkpoint(results / family / "final") as after:
        for name in before.names:
            moved = not torch.equal(before.read(name), after.read(name))
            assert moved == (optional_part(name) != "shared_expert"), name
            if not moved:
                assert not after.read(name).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_result_opens_in_transformers(results, family):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(results / family / "final")
    assert model.config.model_type == family
    with open_checkpoint(results / family / "final") as final:
        assert torch.equal(model.model.norm.weight, final.read("model.norm.weight"))
