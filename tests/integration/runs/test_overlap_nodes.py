"""Two nodes under the deepspeed launcher that train on while they synchronize, one of them with two ranks."""

import json

import pytest
import torch

from spes_mega.layout import expected_tensors, expert_of, initial_tensor, open_checkpoint
from spes_mega.outer.ownership import ownership_of, pushed_names
from spes_mega.recipe import load_recipe
from tests.integration.processes import Hub, launch

STEPS, EVERY = 9, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("overlap")


@pytest.fixture(scope="module")
def recipe(folder, write_recipe):
    spes = {"num_nodes": 2, "sync_every": EVERY, "overlap": True, "merge_interval": 4, "merge_steps": 6}
    train = {"steps": STEPS, "dtype": "bf16", "zero_stage": 2, "micro_batch_size": 2, "log_every": 100}
    return write_recipe(folder, spes=spes, train=train)


@pytest.fixture(scope="module")
def rows(folder, recipe):
    """Runs everything once: the lines of metrics of each node."""
    hub = Hub(recipe, folder / "hub")
    nodes = [
        launch(recipe, "--node", k, "--hub", hub.address, "--out", folder / f"node-{k}", ranks=2 - k) for k in (0, 1)
    ]
    try:
        for node in nodes:
            node.succeed()
        hub.succeed(60)
    finally:
        for process in (*nodes, hub):
            process.end()
    return [
        [json.loads(line) for line in (folder / f"node-{k}/metrics.jsonl").read_text().splitlines()] for k in (0, 1)
    ]


def test_all_rounds_were_closed_by_both_nodes_with_one_merge(folder, rows):
    newest = max((folder / "hub/rounds").iterdir())
    closed = [r for r in json.loads((newest / "round.json").read_text())["ledger"]["rounds"] if r["round"] > 0]
    assert [r["step"] for r in closed] == [2, 4, 6, 8, 9]
    assert all(sorted(r["nodes"]) == [0, 1] for r in closed)
    assert [r["merge_alpha"] is not None for r in closed] == [False, True, False, False, False]


def test_every_step_is_trained_and_the_loss_falls(rows):
    for node in rows:
        assert [row["step"] for row in node] == list(range(1, STEPS + 1))
        assert [row["round"] for row in node] == [(step - 1) // EVERY for step in range(1, STEPS + 1)]
        assert node[-1]["lm_loss"] < node[0]["lm_loss"] - 0.1


def test_each_round_travels_once(recipe, rows):
    loaded = load_recipe(recipe)
    shapes = expected_tensors(loaded.model)
    ownership = ownership_of(loaded.model.num_experts, 2, loaded.spes.ownership)
    for k, node in enumerate(rows):
        names = pushed_names(shapes, ownership, k, expert_of)
        up = 5 * sum(4 * torch.Size(shapes[name]).numel() for name in names)
        assert up < sum(row["bytes_up"] for row in node) < up + 5 * 20_000


def test_the_hub_has_trained_weights_of_both_in_the_end(folder, recipe, rows):
    loaded = load_recipe(recipe)
    with open_checkpoint(max((folder / "hub/snapshots").iterdir())) as checkpoint:
        for name in checkpoint.names:
            if not name.endswith("norm.weight"):
                drawn = initial_tensor(loaded.model, name, checkpoint.shape(name), loaded.train.seed)
                assert not torch.equal(checkpoint.read(name), drawn), f"{name} was never trained"
