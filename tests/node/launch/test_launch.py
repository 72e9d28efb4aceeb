"""From options to the launcher's command line, and what is refused before anything starts."""

import json
import socket
import sys
from pathlib import Path

import click
import pytest
import yaml

from spes_mega.errors import AccessError, RecipeError, SpesError
from spes_mega.node import main as main_module
from spes_mega.node.launch import command as command_module
from spes_mega.node.launch.command import free_port, launcher_arguments, launcher_environment, remote_arguments
from spes_mega.node.launch.devices import Devices
from spes_mega.node.launch.hostfile import Cluster
from spes_mega.node.launch.monitor import RANK_ENVIRONMENT
from spes_mega.node.options import NodeOptions, node_options
from spes_mega.node.preflight import check_node
from spes_mega.overlays import accept_overlays
from spes_mega.recipe import Recipe, load_recipe

MODEL = {
    "family": "qwen3_moe", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
    "num_experts": 4, "top_k": 2, "expert_hidden_size": 8, "vocab_size": 8,
}  # fmt: skip


def parse(*arguments):
    found = []

    @accept_overlays
    @click.command()
    @node_options
    def command(**options):
        found.append(NodeOptions.of(options))

    command.main(list(arguments), standalone_mode=False)
    return found[0]


def test_options_survive_the_way_through_the_launcher():
    options = parse(
        "r.yaml", "--node", "3", "--hub", "h:1", "--token-file", "t", "--insecure", "--set", "a.b=1", "--set", "c=[2]"
    )
    assert (options.out, options.resume) == (Path("runs/node-3"), "auto")
    assert options.overrides == ("a.b=1", "c=[2]")
    assert parse(*options.arguments()) == options
    keyed = parse("r.yaml", "--hub", "h:1", "--keys", "k")
    assert keyed.keys == Path("k")
    assert parse(*keyed.arguments()) == keyed
    overlaid = parse("r.yaml", "--set", "a.b=1", "--overlay", "all.yaml")
    assert overlaid.overrides == (Path("all.yaml"), "a.b=1")
    assert parse(*overlaid.arguments()) == overlaid
    alone = parse("r.yaml", "--init", "dir", "--out", "here", "--resume", "never")
    assert (alone.node, alone.hub, alone.resume) == (0, None, "never")
    assert parse(*alone.arguments()) == alone


def test_data_of_this_node_is_found_from_the_current_folder_whatever_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = parse("r.yaml", "--data", "my data: part #1")
    Path("r.yaml").write_text(yaml.safe_dump({"model": MODEL}))
    assert load_recipe("r.yaml", options.overrides).data.train == tmp_path / "my data: part #1"
    assert parse(*options.arguments()) == options


def test_init_with_a_hub_is_refused():
    with pytest.raises(click.UsageError, match="--init"):
        parse("r.yaml", "--hub", "h:1", "--init", "dir")


def test_the_launcher_starts_monitors_on_this_machine_alone():
    arguments = launcher_arguments(parse("r.yaml"), 2, 1234)
    assert arguments[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert {"--num_gpus=2", "--master_port=1234", "--hostfile=/dev/null"} < set(arguments)
    assert arguments[arguments.index("--module") + 1 :][:2] == ["spes_mega.node.launch.monitor", "r.yaml"]


def test_deepspeed_reads_no_hostfile():
    from deepspeed.launcher import runner

    parsed = runner.parse_args(launcher_arguments(parse("r.yaml"), 2, 1234)[3:])
    assert (parsed.hostfile, parsed.num_gpus) == ("/dev/null", 2)
    assert runner.fetch_hostfile(parsed.hostfile) is None


def test_what_another_launcher_left_in_the_environment_does_not_reach_this_one(monkeypatch):
    left = {
        "RANK": "3",
        "LOCAL_SIZE": "x",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "h",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in (left | {"CUDA_VISIBLE_DEVICES": "7", "NCCL_DEBUG": "WARN", "DS_ACCELERATOR": "cuda"}).items():
        monkeypatch.setenv(name, value)
    env = launcher_environment(Devices("GPU-7", 1))
    assert not left.keys() & env.keys()
    assert (env["NCCL_DEBUG"], env["PYTHONSAFEPATH"], env["DS_ENV_FILE"]) == ("WARN", "1", "/dev/null")
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert json.loads(env[RANK_ENVIRONMENT]) == {"CUDA_VISIBLE_DEVICES": "GPU-7", "DS_ACCELERATOR": "cuda"}


def test_a_free_port_is_none_of_those_for_outgoing_connections():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 < free_port() < first


def test_a_port_that_somebody_listens_on_is_not_taken(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(command_module, "FREE_PORTS", range(port, port + 1))
        with pytest.raises(AccessError, match=rf"no TCP port from {port} to {port} is free"):
            free_port()


def test_slurm_is_given_a_file_that_is_there():
    cluster = Cluster(Path("hosts"), {"a": 1, "b": 1}, None, "slurm", "", "a")
    program = [part for part in remote_arguments(parse("r.yaml"), 1234, cluster, "mark") if part.endswith(".py")]
    assert [Path(part).is_file() for part in program] == [True]


@pytest.mark.parametrize(
    ("spes", "node", "hub", "message"),
    [
        ({"num_nodes": 2}, 2, "h:1", r"--node 2: the recipe has nodes 0\.\.1"),
        ({"num_nodes": 2}, 0, None, "spes.num_nodes is 2: give --hub"),
        ({"merge_steps": 10}, 0, None, "merged by the hub: give --hub"),
        ({"outer": {"shared": {"lr": 0.7}}}, 0, None, "the outer optimizer runs on the hub: give --hub"),
    ],
)
def test_a_node_that_cannot_be_is_refused(spes, node, hub, message):
    with pytest.raises(RecipeError, match=message):
        check_node(Recipe.model_validate({"model": MODEL, "spes": spes}), node, hub)


@pytest.mark.parametrize(("rank", "reported"), [("0", True), ("1", False)])
def test_an_error_is_reported_once_and_its_exit_code_is_that_of_every_rank(monkeypatch, capsys, rank, reported):
    def fail(**_):
        raise RecipeError("no such key")

    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        main_module.main(fail)
    assert ended.value.code == RecipeError.exit_code
    assert ("error: no such key" in capsys.readouterr().err) == reported


def test_without_a_launcher_the_node_says_how_to_start_it(monkeypatch, tmp_path):
    from spes_mega.node.distributed.process_group import process_group

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SpesError, match="RANK is not set: start this with `spes-mega launch`"), process_group():
        pass
