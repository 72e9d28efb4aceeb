"""docs/guides/9b.md: its commands are ones that this version has, and its figures are those of `spes-mega plan`."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from spes_mega.cli import group
from spes_mega.recipe import load_recipe

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/guides/9b.md").read_text()
BLOCKS = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.S)).replace("\\\n", " ")
COMMANDS = [shlex.split(line, comments=True) for line in BLOCKS.splitlines() if line.strip()]
OURS = [arguments for program, *arguments in COMMANDS if program == "spes-mega"]
PLANS = [arguments for arguments in OURS if arguments[0] == "plan"]
# What a reader has when a command's turn comes.
FILES = (
    "Qwen3-1.7B/config.json",
    "corpus/part.jsonl",
    "runs/9b-init/config.json",
    "runs/9b/snapshots/round-000100/config.json",
)


@pytest.fixture
def readers_folder(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", OURS, ids=lambda arguments: " ".join(arguments[:4]))
def test_the_command_exists_and_takes_its_arguments(readers_folder, arguments):
    name, *rest = arguments
    command = group.get_command(None, name)
    with click.Context(command, info_name=name) as ctx:
        while isinstance(command, click.Group):
            command = command.get_command(ctx, rest.pop(0))
        command.make_context(name, rest)


def test_the_walk_has_every_step_and_every_node():
    assert {"plan", "upcycle", "tokenize", "keys", "hub", "launch", "status", "evaluate"} <= {a[0] for a in OURS}
    nodes = [arguments[arguments.index("--node") + 1] for arguments in OURS if arguments[0] == "launch"]
    recipe = load_recipe(ROOT / "configs/9b.yaml")
    assert nodes == [str(node) for node in range(recipe.spes.num_nodes)]
    (keys,) = (arguments for arguments in OURS if arguments[0] == "keys")
    assert keys[keys.index("--nodes") + 1] == str(recipe.spes.num_nodes)


def test_the_download_is_one_that_hugging_face_has():
    program = Path(sys.executable).with_name("hf")
    if not program.exists():
        pytest.skip("huggingface_hub is not installed")
    usage = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=True).stdout
    downloads = [arguments for program, *arguments in COMMANDS if program == "hf"]
    assert len(downloads) == 2
    for arguments in downloads:
        assert arguments[0] == "download"
        for option in arguments:
            assert not option.startswith("--") or option in usage


@pytest.fixture(scope="module")
def planned():
    """What the plan on 80 GB says, then that on 48 GiB."""
    command = group.get_command(None, "plan")
    found = []
    for _, recipe, *options in PLANS:
        done = CliRunner().invoke(command, [str(ROOT / recipe), *options, "--json"], catch_exceptions=False)
        assert done.exit_code == 0
        found.append(json.loads(done.output))
    return found


def test_figures_are_the_plans(planned):
    large, small = planned
    ours, diloco, _ = large["schemes"]
    fp32 = ours["communication_per_round"]["fp32"]
    suggestion = small["suggestions"][0]
    told = [
        *(f"{count:,}" for count in (large["parameters"]["total"], ours["nodes"][0]["params_trained"])),
        *(f"{scheme['peak_bytes'] / 1e9:.2f} GB" for scheme in (ours, diloco)),
        *(f"{fp32[key] / 1e9:.2f} GB" for key in ("up", "down", "down_after_merge")),
        f"{diloco['communication_per_round']['fp32']['up'] / 1e9:.2f} GB",
        f"{large['disk']['hub_state'] / 1e9:.2f} GB",
        f"{4 * large['parameters']['total'] / 1e9:.2f} GB",
        f"{large['disk']['hub_snapshots'] / 1e12:.2f} TB",
        f"{large['disk']['hub_snapshots'] / 1e10:.0f} GB",  # a tenth of them
        ", ".join(f"{large['disk'][key] / 1e9:.2f} GB" for key in ("node", "node_checkpoints")),
        *(f"{large['disk'][key] / 1e9:.0f} GB" for key in ("node", "node_checkpoints")),
        f"{large['tokens_per_step_and_node']:,} tokens",
        f"{ours['compute_s_per_round'] / 60:.1f} minutes",
        f"{fp32['seconds'] / 60:.1f} minutes",
        f"bf16` makes that {100 * ours['communication_per_round']['bf16']['share_lost']:.0f} %",
        f"`int8` {100 * ours['communication_per_round']['int8']['share_lost']:.0f} %",
        "".join(f"--set {setting}`, {suggestion['peak_bytes'] / 1e9:.2f} GB" for setting in suggestion["settings"]),
    ]
    flat = " ".join(TEXT.split())
    assert [figure for figure in told if figure not in flat] == []
    assert (ours["fits"], diloco["fits"], small["fits"]) == (True, False, False)
    assert 0.3 < fp32["share_lost"] < 0.37  # a third
