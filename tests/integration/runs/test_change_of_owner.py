"""Two nodes as real processes, one of which is killed: another trains its experts from then on."""

import json
import signal
from itertools import pairwise

import pytest
import torch

from spes_mega.client.client import HubClient
from spes_mega.layout import expert_of, open_checkpoint
from spes_mega.recipe import load_recipe
from tests.integration.processes import Hub, launch

STEPS = 12


def read(path):
    with open_checkpoint(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def experts_that_differ(before, after):
    return {key.expert for name in before if (key := expert_of(name)) and not torch.equal(before[name], after[name])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_recipe):
    """Runs everything once. Node 1 trains experts 2 and 3, until it is killed after its first round."""
    folder = tmp_path_factory.mktemp("change_of_owner")
    spes = {"num_nodes": 2, "min_nodes": 1, "sync_every": 2, "adopt_after": 1, "snapshot_every": 1}
    deadlines = {"round_deadline_s": 15, "rpc_deadline_s": 15}
    recipe = write_recipe(folder, spes=spes | deadlines, train={"steps": STEPS, "dtype": "bf16", "zero_stage": 2})
    hub = Hub(recipe, folder / "hub")
    nodes = [launch(recipe, "--node", k, "--hub", hub.address, "--out", folder / f"node-{k}") for k in (0, 1)]
    try:
        hub.wait_for(r"round 1/6 .* nodes 0,1 ")
        for process in nodes[1].family():
            process.send_signal(signal.SIGKILL)
        nodes[0].wait_for("now owns experts 0-3")
        with HubClient.for_recipe(load_recipe(recipe), hub.address, 1) as client:
            (folder / "status.json").write_text(json.dumps(client.status()))
        nodes[0].succeed()
        hub.succeed(60)
    finally:
        for process in (*nodes, hub):
            process.end()
    (folder / "output.txt").write_text(nodes[0].output)
    (folder / "hub.txt").write_text(hub.output)
    return folder


@pytest.fixture(scope="module")
def records(folder):
    newest = max((folder / "hub/rounds").iterdir())
    return json.loads((newest / "round.json").read_text())["ledger"]["rounds"]


def test_the_node_that_is_left_trains_the_experts_of_the_other(folder, records):
    adopted = next(record["round"] for record in records if record["absent"])
    assert [record["absent"] for record in records[adopted:]] == [[1]] * (6 + 1 - adopted)
    assert [record["nodes"] for record in records[adopted:]] == [[0]] * (6 + 1 - adopted)
    states = {record["round"]: read(folder / f"hub/snapshots/round-{record['round']:06d}") for record in records[1:]}
    # in the round that node 1 missed nobody trained its experts; from the next one on they move
    assert experts_that_differ(states[adopted - 1], states[adopted]) == {0, 1}
    for round_ in range(adopted, 6):
        assert experts_that_differ(states[round_], states[round_ + 1]) == {0, 1, 2, 3}


def test_everybody_is_told(folder):
    status = json.loads((folder / "status.json").read_text())
    assert [node["experts"] for node in status["nodes"]] == [[0, 1, 2, 3], []]
    assert [node["absent"] for node in status["nodes"]] == [False, True]
    output = (folder / "output.txt").read_text()
    assert "node 0: now owns experts 0-3\n" in output
    assert "absent nodes: 1; experts from now on: node 0 0-3; node 1 none" in (folder / "hub.txt").read_text()


def test_training_goes_on_without_a_jolt(folder):
    rows = [json.loads(line) for line in (folder / "node-0/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["lm_loss"] for row in rows]
    assert losses[-1] < losses[0] - 0.2
    assert all(after < before + 0.15 for before, after in pairwise(losses))
