"""Overlays on real processes: hub and nodes with the DiLoCo baseline and one more file laid over the same recipe."""

import json

import pytest

from spes_mega.layout import expert_of, open_checkpoint
from spes_mega.recipe import load_recipe
from tests.integration.processes import ROOT, Hub, launch

DILOCO = ROOT / "configs/baselines/diloco.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_recipe):
    """Runs everything once. Of the recipe's three rounds the second overlay makes two."""
    folder = tmp_path_factory.mktemp("overlays")
    recipe = write_recipe(folder, spes={"num_nodes": 2, "snapshot_every": 1})
    (folder / "over.yaml").write_text("spes: {sync_every: 3}\n")
    overlays = ["--overlay", DILOCO, "--overlay", folder / "over.yaml"]
    hub = Hub(recipe, folder / "hub", *overlays)
    processes = [hub]
    try:
        for k, lacking in enumerate(([], overlays[:2])):
            processes.append(launch(recipe, "--hub", hub.address, "--out", folder / f"without-{k}", *lacking))
            (folder / f"without-{k}.txt").write_text(f"{processes[-1].wait()}\n{processes[-1].output}")
        nodes = [
            launch(recipe, "--node", k, "--hub", hub.address, "--out", folder / f"node-{k}", *overlays) for k in (0, 1)
        ]
        processes += nodes
        for k, node in enumerate(nodes):
            (folder / f"node-{k}.txt").write_text(node.succeed().output)
        hub.succeed(60)
    finally:
        for process in processes:
            process.end()
    return folder


@pytest.mark.parametrize("missing", ["without-0", "without-1"])
def test_a_node_that_lacks_an_overlay_is_refused_by_digest(folder, missing):
    code, *output = (folder / f"{missing}.txt").read_text().splitlines()
    settings = [DILOCO] if missing == "without-1" else []
    mine = load_recipe(folder / "recipe.yaml", settings).digest()
    hubs = load_recipe(folder / "recipe.yaml", [DILOCO, folder / "over.yaml"]).digest()
    assert code == "6"
    (refusal,) = [line for line in output if line.startswith("error: ")]
    assert mine[:12] in refusal
    assert hubs[:12] in refusal


def test_hub_and_nodes_run_by_the_merged_recipe(folder):
    newest = max((folder / "hub/rounds").iterdir())
    ledger = json.loads((newest / "round.json").read_text())["ledger"]
    assert [(record["step"], record["nodes"]) for record in ledger["rounds"][1:]] == [(3, [0, 1]), (6, [0, 1])]
    for k in (0, 1):
        assert "experts 0-3 of 4" in (folder / f"node-{k}.txt").read_text()
        rows = [json.loads(line) for line in (folder / f"node-{k}/metrics.jsonl").read_text().splitlines()]
        assert [row["round"] for row in rows] == [0, 0, 0, 1, 1, 1]


def test_every_expert_is_trained_by_both_and_averaged(folder):
    """Under DiLoCo each node pushes all experts: what the hub counts of both is alike, and is everything."""
    with open_checkpoint(folder / "hub/snapshots/round-000002") as checkpoint:
        total = sum(4 * checkpoint.read(name).numel() for name in checkpoint.names)
        assert {key.expert for name in checkpoint.names if (key := expert_of(name))} == {0, 1, 2, 3}
    for k in (0, 1):
        rows = [json.loads(line) for line in (folder / f"node-{k}/metrics.jsonl").read_text().splitlines()]
        assert all(total < row["bytes_up"] < total + 20_000 for row in (rows[2], rows[5]))
