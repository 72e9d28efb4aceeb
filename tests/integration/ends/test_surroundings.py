"""What lies about where a node is started, and what goes away while it trains."""

import shutil
import subprocess

import pytest

from spes_mega.layout import open_checkpoint
from spes_mega.recipe import load_recipe
from tests.integration.processes import COMMAND, ENV, PYTHON

ALONE = {"num_nodes": 1, "merge_steps": 0}


def test_the_current_folder_and_other_launchers_have_no_say(tmp_path, write_recipe):
    recipe = write_recipe(tmp_path, spes=ALONE, train={"steps": 2})
    here = tmp_path / "here"
    here.mkdir()
    for name in ("statistics.py", "random.py", "torch.py", "deepspeed.py"):
        (here / name).write_text(f"print('ran {name}'); raise SystemExit(99)\n")
    (here / ".deepspeed_env").write_text("no assignment\n")
    left = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_SIZE": "x", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    left |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": "NoDevFiles", "HOME": str(here)}
    ended = subprocess.run(
        [*PYTHON, "-P", *COMMAND[2:], "launch", recipe, "--out", tmp_path / "out", "--ranks", "2"],
        cwd=here,
        env=ENV | left,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout
    assert "ran " not in ended.stdout
    assert "2 ranks on cpu" in ended.stdout


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_room_for_the_result_is_needed_at_the_start(tmp_path, small_disk, write_recipe, start_node):
    recipe = write_recipe(tmp_path, spes=ALONE, train={"steps": 2})
    node = start_node(recipe, "--out", small_disk / "out")
    assert node.wait() == 4
    assert f"error: {small_disk}/out/final: the model that training ends with needs " in node.output
    assert "step 1/" not in node.output


def test_a_result_that_cannot_be_written_costs_no_step(tmp_path, write_recipe, start_node):
    """The directory of --init, whose tokenizer goes into the result, is moved away while the node trains."""
    first = start_node(write_recipe(tmp_path, "first", spes=ALONE, train={"steps": 2}), "--out", tmp_path / "first")
    first.succeed()
    init = tmp_path / "init"
    shutil.copytree(tmp_path / "first/final", init)
    recipe = write_recipe(tmp_path, spes=ALONE, train={"steps": 200})
    options = (recipe, "--out", tmp_path / "out", "--init", init)
    node = start_node(*options)
    node.wait_for(r"step 1/")
    init.rename(tmp_path / "away")
    assert node.wait() == 4
    assert str(init) in node.output
    assert "The last step is in a checkpoint" in node.output
    assert (tmp_path / "out/checkpoints/step-000200").is_dir()
    (tmp_path / "away").rename(init)
    again = start_node(*options).succeed()
    assert "goes on after step 200" in again.output
    with open_checkpoint(tmp_path / "out/final") as result:
        assert result.model == load_recipe(recipe).model
