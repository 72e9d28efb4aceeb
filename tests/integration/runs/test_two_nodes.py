"""The main job with real processes: a hub, and two nodes under the deepspeed launcher."""

import json

import numpy as np
import pytest
import torch

from spes_mega.layout import expected_tensors, expert_of, initial_tensor, open_checkpoint
from spes_mega.outer.ownership import ownership_of, pushed_names
from spes_mega.recipe import load_recipe

STEPS, EVERY = 7, 2


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two_nodes")


@pytest.fixture(scope="module")
def recipe_file(folder, write_recipe):
    spes = {"num_nodes": 2, "sync_every": EVERY, "merge_interval": 4, "merge_steps": 6, "merge_alpha": 0.1}
    return write_recipe(folder, spes=spes, train={"steps": STEPS, "grad_accumulation": 2})


@pytest.fixture(scope="module")
def nodes(folder, recipe_file):
    """Runs everything once, on what looks like a machine with a CUDA toolkit: output of the nodes."""
    from tests.integration.processes import Hub, launch

    hub = Hub(recipe_file, folder / "hub")
    where = [("--node", k, "--hub", hub.address, "--out", folder / f"node-{k}") for k in (0, 1)]
    started = [launch(recipe_file, *options, CUDA_HOME=str(folder)) for options in where]
    try:
        for node in started:
            node.succeed()
        hub.succeed(30)
    finally:
        for process in (*started, hub):
            process.end()
    return [node.output for node in started]


def test_all_rounds_were_closed_by_both_nodes_with_one_merge(folder, nodes):
    newest = max((folder / "hub/rounds").iterdir())
    closed = [r for r in json.loads((newest / "round.json").read_text())["ledger"]["rounds"] if r["round"] > 0]
    assert [r["step"] for r in closed] == [2, 4, 6, 7]  # the last round is a short one
    assert all(sorted(r["nodes"]) == [0, 1] for r in closed)
    # at step 4: 0.1 * (1 - 4 / 6)
    assert [r["merge_alpha"] for r in closed] == [None, pytest.approx(0.1 / 3), None, None]


def test_every_step_is_reported(folder, nodes):
    for k in (0, 1):
        rows = metrics(folder / f"node-{k}")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert [row["round"] for row in rows] == [0, 0, 1, 1, 2, 2, 3]
        # 4 samples x 2 passes x 16 tokens, each to 2 experts, in each of the 2 layers
        assert all([sum(layer) for layer in row["tokens_per_expert"]] == [256, 256] for row in rows)
        # a balance loss of experts that share evenly is 1, and top-2 of 4 gives at most 2
        assert all(0.99 < row["aux_loss"] < 2 and row["z_loss"] > 0 for row in rows)
        assert rows[0]["lm_loss"] == pytest.approx(np.log(48), abs=0.2)
        assert rows[-1]["lm_loss"] < rows[0]["lm_loss"] - 0.1
        assert [row["lr"] for row in rows[:2]] == pytest.approx([0.005, 0.01])
    # its own text for each node
    assert metrics(folder / "node-0")[0]["lm_loss"] != metrics(folder / "node-1")[0]["lm_loss"]


def test_what_travels_is_shared_weights_and_own_experts(folder, recipe_file, nodes):
    recipe = load_recipe(recipe_file)
    shapes = expected_tensors(recipe.model)
    ownership = ownership_of(recipe.model.num_experts, 2, recipe.spes.ownership)

    def size(names):
        return sum(4 * torch.Size(shapes[name]).numel() for name in names)

    for k in (0, 1):
        rows = {row["step"]: row for row in metrics(folder / f"node-{k}")}
        up = size(pushed_names(shapes, ownership, k, expert_of))
        down = size(shapes) - size(n for n in shapes if (e := expert_of(n)) and e.expert in ownership.owned(k))
        # over the tensors' own bytes goes a header of names
        assert size(shapes) < rows[1]["bytes_down"] < size(shapes) + 20_000
        assert all(up < rows[step]["bytes_up"] < up + 20_000 for step in (2, 4, 6, 7))
        assert all(down < rows[step]["bytes_down"] < down + 20_000 for step in (2, 6))
        assert rows[4]["bytes_down"] > size(shapes)  # the merge has changed the node's own experts, too
        assert all(rows[step]["bytes_up"] == rows[step]["bytes_down"] == 0 for step in (3, 5))
        assert all(rows[step]["sync_seconds"] > 0 for step in (1, 2, 4, 6, 7))


def test_the_console_is_quiet_and_says_what_the_node_trains(nodes):
    for k, output in enumerate(nodes):
        lines = output.splitlines()
        assert len(lines) == 1 + STEPS + 1, output
        assert lines[0].startswith(f"node {k}: 34,272 parameters, 25,056 trained here")
        assert f"experts {2 * k}-{2 * k + 1} of 4" in lines[0]
        assert lines[-2].startswith(f"node {k}: step {STEPS}/{STEPS} round 3")
        assert lines[-1].startswith(f"node {k}: finished; the hub has the model")


def test_the_final_snapshot_opens_in_transformers_with_trained_weights(folder, recipe_file, nodes):
    from transformers import AutoModelForCausalLM

    recipe = load_recipe(recipe_file)
    snapshot = max((folder / "hub/snapshots").iterdir())
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    tokens = torch.arange(0, 32)[None]  # steps of 1: likely under the data
    initial = np.log(recipe.model.vocab_size)
    assert float(model(tokens, labels=tokens).loss) < initial - 0.1
    with open_checkpoint(snapshot) as checkpoint:
        for name in checkpoint.names:
            if not name.endswith("norm.weight"):
                drawn = initial_tensor(recipe.model, name, checkpoint.shape(name), recipe.train.seed)
                assert not torch.equal(checkpoint.read(name), drawn), f"{name} was never trained"
