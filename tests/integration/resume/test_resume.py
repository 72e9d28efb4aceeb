"""Real processes, killed or stopped in mid-run and started again, against runs that nobody disturbed.

All stages and precisions, in one process: test_resume_exactness.py.
"""

import re
import signal
from itertools import count

import pytest
import torch

from spes_mega.recipe import load_recipe
from tests.integration.processes import launch
from tests.integration.resume.test_resume_exactness import Node
from tests.integration.runs.test_lone_node import figures, weights

STEPS = 40  # so many that a node is killed before it has ended
# stage, dtype, and the steps after which it is killed; `checkpoint.every` is 2
CASES = {"zero1-fp32": (1, "fp32", (5,)), "zero3-bf16": (3, "bf16", (5,))}


def kill(node):
    for process in node.family():
        process.send_signal(signal.SIGKILL)
    node.wait()


def checkpoints(out):
    folder = out / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory, write_recipe):
    folder, numbers = tmp_path_factory.mktemp("recipes"), count()

    def make(stage, dtype, every=2, spes=None, **train):
        # without this every parameter is so small that ZeRO-3 leaves it whole
        more = {"zero_optimization": {"stage3_param_persistence_threshold": 100}} if stage == 3 else {}
        train = {"steps": STEPS, "dtype": dtype, "zero_stage": stage} | train
        sections = {"train": train, "checkpoint": {"every": every}, "deepspeed": more, "spes": spes or {}}
        return write_recipe(folder, f"r{next(numbers)}", **sections)

    return make


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory, recipe_of):
    """Folder with `whole`, the run of one process, and `killed`, that of several, all but the last of them killed."""
    folder = tmp_path_factory.mktemp(request.param)
    stage, dtype, ends = CASES[request.param]
    recipe = recipe_of(stage, dtype)
    node = whole = launch(recipe, "--out", folder / "whole")
    try:
        whole.succeed()
        for number, step in enumerate(ends):
            node = launch(recipe, "--out", folder / "killed")
            node.wait_for(f"step {step}/")
            kill(node)
            (folder / f"output-{number}").write_text(node.output)
        node = launch(recipe, "--out", folder / "killed").succeed()
        (folder / "output").write_text(node.output)
    finally:
        node.end()
        whole.end()
    return folder


def test_a_killed_node_ends_where_an_undisturbed_one_does(pair):
    assert [row["step"] for row in figures(pair / "whole")] == list(range(1, STEPS + 1))
    assert figures(pair / "killed") == figures(pair / "whole")
    expected, found = weights(pair / "whole/final"), weights(pair / "killed/final")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_it_went_on_from_a_checkpoint_each_time(pair):
    outputs = [path.read_text() for path in sorted(pair.glob("output-*"))] + [(pair / "output").read_text()]
    assert "goes on after step" not in outputs[0]
    for output in outputs[1:]:
        assert re.search(r"goes on after step \d*[02468], in round \d+ ", output)
        assert "step 1/40" not in output
    assert checkpoints(pair / "killed") == ["step-000038", "step-000040"]


def test_another_number_of_ranks_and_stage_go_on_from_the_same_checkpoint(tmp_path, recipe_of, start_node, ranks):
    """Two ranks in stage 1 are stopped; one in stage 3 takes their place."""
    # ranks balance their experts each for itself, so that with the loss for it two ranks are not one
    train, out = {"aux_loss_coeff": 0.0}, tmp_path / "out"
    node = start_node(recipe_of(1, "fp32", 100, micro_batch_size=2, **train), "--out", out, ranks=2)
    node.wait_for("step 3/")
    node.popen.send_signal(signal.SIGTERM)
    undisturbed = Node(tmp_path / "undisturbed", load_recipe(recipe_of(1, "fp32", 100, **train)), ranks).train(STEPS)
    assert node.wait() == 128 + signal.SIGTERM
    (stopped,) = checkpoints(out)
    step = int(stopped.removeprefix("step-"))
    assert len(figures(out)) == step >= 3
    again = start_node(recipe_of(3, "fp32", 100, **train), "--out", out).succeed()
    assert f"goes on after step {step}," in again.output
    assert len(figures(out)) == STEPS
    for found, expected in zip(figures(out)[: step + 6], undisturbed, strict=False):
        assert found["step"] == expected["step"]
        # sums in another order; without Adam's moments it would be off by 5e-3 two steps later
        assert found["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-4)


def test_a_node_with_a_hub_that_is_killed_in_mid_round_goes_on_there(tmp_path, recipe_of, start_node, start_hub, ranks):
    recipe = recipe_of(1, "fp32", spes={"sync_every": STEPS})
    hub = start_hub(recipe, tmp_path / "hub")
    arguments = recipe, "--hub", hub.address, "--out", tmp_path / "out"
    node = start_node(*arguments)
    node.wait_for("step 5/")
    kill(node)
    again = start_node(*arguments).succeed()
    assert re.search(r"goes on after step \d*[02468], in round 0 ", again.output)
    undisturbed = Node(tmp_path / "undisturbed", load_recipe(recipe), ranks)
    rows = undisturbed.train(STEPS)
    assert figures(tmp_path / "out") == [{key: row[key] for key in figures(tmp_path / "out")[0]} for row in rows]
    expected, found = undisturbed.state()[0], weights(max((tmp_path / "hub/snapshots").iterdir()))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
