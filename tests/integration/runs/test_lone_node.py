"""Identities of the outer loop, bit for bit in fp32, with real processes."""

import json

import pytest
import torch

from spes_mega.layout import open_checkpoint
from tests.integration.processes import Hub, launch

TRAIN = {"steps": 5}  # two rounds of two, one of one


def weights(folder):
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def figures(folder):
    """What must be the same, of every step."""
    keys = ("step", "lm_loss", "aux_loss", "z_loss", "grad_norm", "lr", "tokens_per_expert")
    return [{k: json.loads(line)[k] for k in keys} for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def results(tmp_path_factory, write_recipe):
    """Alone, and through a hub, without and with overlap; two nodes that own everything and have the same data."""
    folder = tmp_path_factory.mktemp("identities")
    alone = write_recipe(folder, "alone", train=TRAIN)
    both = write_recipe(
        folder, "both", train=TRAIN, spes={"num_nodes": 2, "ownership": "all"}, data={"sharding": "own"}
    )
    overlap = write_recipe(folder, "overlap", train=TRAIN, spes={"overlap": True})
    processes = [launch(alone, "--out", folder / "alone")]
    try:
        for name, recipe, nodes in (("hub", alone, (0,)), ("overlap", overlap, (0,)), ("diloco", both, (0, 1))):
            hub = Hub(recipe, folder / name)
            processes.append(hub)
            for k in nodes:
                out = folder / f"{name}-node-{k}"
                processes.append(launch(recipe, "--node", k, "--hub", hub.address, "--out", out))
        for process in processes:
            process.succeed()
    finally:
        for process in processes:
            process.end()
    return folder


def snapshot(state):
    return max((state / "snapshots").iterdir())


@pytest.mark.parametrize("through", ["hub", "overlap"])
def test_a_lone_node_through_a_hub_equals_plain_training(results, through):
    assert len(figures(results / "alone")) == 5
    assert figures(results / f"{through}-node-0") == figures(results / "alone")
    expected, found = weights(results / "alone/final"), weights(snapshot(results / through))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_nodes_with_equal_data_that_own_everything_equal_one(results):
    for k in (0, 1):
        assert figures(results / f"diloco-node-{k}") == figures(results / "alone")
    expected, found = weights(results / "alone/final"), weights(snapshot(results / "diloco"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_result_of_a_lone_node_opens_in_transformers(results):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(results / "alone/final")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert torch.equal(model.model.norm.weight, weights(results / "alone/final")["model.norm.weight"])


def test_a_model_that_is_not_finite_is_not_written(tmp_path, write_recipe):
    train = {"steps": 1, "warmup_steps": 0, "lr": 3e38, "weight_decay": 100.0}
    recipe = write_recipe(tmp_path, "wild", train=train, spes={"sync_every": 1})
    node = launch(recipe, "--out", tmp_path / "out")
    assert node.wait() == 1
    assert "has NaN or infinite values after the last step" in node.output
    assert not (tmp_path / "out/final").exists()
    node = launch(recipe, "--out", tmp_path / "other", "--set", "deepspeed.zero_optimization.reduce_bucket_size=many")
    assert node.wait() == 3
    assert "deepspeed.zero_optimization.reduce_bucket_size is 'many': Input should be a valid integer" in node.output


def test_the_balance_loss_of_owned_experts_rises_over_its_warm_up(tmp_path, write_recipe):
    """At a rate of 0, so that nothing else changes; summed over two passes, computed again in the backward pass."""
    train = {"steps": 4, "lr": 0.0, "batch_size": 8, "micro_batch_size": 4}
    settings = {"plain": {}, "warmed": {"aux_loss_warmup": 1.0, "zero_stage": 3, "recompute": "full"}}
    nodes = [
        launch(write_recipe(tmp_path, name, train=train | more), "--out", tmp_path / name)
        for name, more in settings.items()
    ]
    try:
        for node in nodes:
            node.succeed()
    finally:
        for node in nodes:
            node.end()
    plain, warmed = ([step["aux_loss"] for step in figures(tmp_path / name)] for name in settings)
    # one node owns all experts, so that the whole loss is weighed
    expected = [weight * loss for weight, loss in zip((0.775, 0.85, 0.925, 1.0), plain, strict=True)]
    assert warmed == pytest.approx(expected, rel=1e-5)
