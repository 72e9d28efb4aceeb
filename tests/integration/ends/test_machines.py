"""One node of two machines that share nothing: the same training as on one, bit for bit, and one end for both."""

import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from spes_mega.layout import CheckpointWriter, initial_tensor
from spes_mega.layout.names import expected_tensors
from spes_mega.node.launch.command import free_port
from spes_mega.recipe import load_recipe
from tests.integration.machines import in_namespaces, on_loopback
from tests.integration.processes import COMMAND, Process, launch
from tests.integration.runs.test_lone_node import figures, weights

STEPS = 8


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    found, take_down = in_namespaces(folder) or on_loopback(folder)
    yield found
    take_down()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, write_recipe):
    folder = tmp_path_factory.mktemp("recipe")
    return write_recipe(folder, train={"steps": STEPS, "zero_stage": 2}, checkpoint={"every": 2})


@pytest.fixture(scope="module")
def init(tmp_path_factory, recipe):
    """A checkpoint that no seed gives."""
    path = tmp_path_factory.mktemp("init") / "init"
    model = load_recipe(recipe).model
    with CheckpointWriter(path, model, torch.float32) as writer:
        for name, shape in expected_tensors(model).items():
            writer.write(name, initial_tensor(model, name, shape, seed=5))
    return path


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory, recipe, init):
    """What two ranks of one machine train."""
    out = tmp_path_factory.mktemp("one") / "out"
    node = launch(recipe, "--out", out, "--init", init, ranks=2)
    try:
        node.succeed()
    finally:
        node.end()
    assert len(figures(out)) == STEPS
    return out


@pytest.fixture
def node(machines, recipe, dataset, init, running):
    """Starts the node: `node("torchrun", *options)` gives the processes on both machines."""
    for machine in machines:
        shutil.rmtree(machine.folder)
        machine.folder.mkdir()
        machine.furnish(recipe, dataset)
    shutil.copytree(init, machines[0].folder / "init")  # the other has none

    def start(how, *options, init=True, options_of_second=()):
        port, started = free_port(), []
        for number, machine in enumerate(machines):
            its = [*options, *(options_of_second * number), *(["--init", machine.folder / "init"] if init else [])]
            started.append(running(getattr(machine, how)(number, machines[0], port, *its)))
        return started

    return start


def assert_equal(out, expected):
    assert figures(out) == figures(expected)
    found, right = weights(out / "final"), weights(expected / "final")
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("how", ["launch", "torchrun", "srun"])
def test_two_machines_train_what_one_does(node, machines, on_one_machine, how):
    for process in node(how):
        process.succeed()
    assert_equal(machines[0].folder / "out", on_one_machine)
    assert not (machines[1].folder / "out").exists()


def test_a_lost_machine_ends_the_node_with_its_name_and_it_resumes(node, machines, on_one_machine):
    first, second = node("launch")
    first.wait_for("step 5/")
    for process in second.family():
        process.send_signal(signal.SIGKILL)
    assert first.wait() == 7, first.output
    (line,) = re.findall(r"^error: .*", first.output, re.M)
    assert line.startswith(f"error: lost rank 1 on {machines[1].name}: ")
    assert "Traceback" not in first.output
    first, second = node("launch")
    assert first.wait() == 0, first.output
    assert second.wait() == 0, second.output
    assert re.search("goes on after step [46],", first.output)
    assert_equal(machines[0].folder / "out", on_one_machine)


def test_the_others_end_with_the_name_of_the_first_when_it_is_lost(node, machines):
    first, second = node("srun")
    first.wait_for("step 3/")
    for process in first.family():
        process.send_signal(signal.SIGKILL)
    assert second.wait() == 7, second.output
    (line,) = re.findall(r"^error: .*", second.output, re.M)
    assert line.startswith(f"error: lost rank 0 on {machines[0].name}: ")
    assert "Traceback" not in second.output


def test_stopping_one_machine_stops_the_node_while_rank_0_waits_for_the_hub(node, machines, running):
    two = ("--set", "spes.num_nodes=2", "--set", "spes.merge_steps=0")
    state, first = machines[0].folder / "hub", machines[0]
    hub = running(
        first.start([*COMMAND, "hub", first.recipe, *two, "--state", state, "--listen", "127.0.0.1:0", "--insecure"])
    )
    address = hub.wait_for(r"listening on (\S+:\d+)")[1]
    both = node("srun", "--hub", address, *two, init=False)
    status = [*COMMAND, "status", "--hub", address]
    both[0].wait_for("step 1/")
    while not re.search("last pushed round 0", running(first.start(status)).succeed().output):
        assert both[0].popen.poll() is None, both[0].output
    both[1].popen.terminate()
    assert [process.wait() for process in both] == [143, 143], both[0].output
    assert "Traceback" not in both[0].output + both[1].output


def test_other_data_on_one_machine_are_refused_with_both_names(node, machines):
    builder = IndexedDatasetBuilder(str(machines[1].folder / "data.bin"), dtype=np.uint16)
    for length in (400, 600):
        builder.add_document(list(np.arange(length) % 48), [length])
    builder.finalize(str(machines[1].folder / "data.idx"))
    first, second = node("srun")
    assert first.wait() == second.wait() == 5, first.output
    assert f"{machines[0].name} (rank 0) and {machines[1].name} (rank 1) have different training data" in first.output
    assert "a dataset of 1,000 tokens" in first.output


def test_missing_data_on_one_machine_are_named_with_it(node, machines):
    (machines[1].folder / "data.idx").unlink()
    first, second = node("srun")
    assert first.wait() == second.wait() == 5, first.output
    assert f"error: {machines[1].name} (rank 1): {machines[1].folder}/data.idx: no such file" in first.output


def test_a_killed_rank_is_named_by_the_launchers_of_both_machines(node, machines):
    first, second = node("launch")
    first.wait_for("step 3/")
    ranks = [process for process in second.family() if "spes_mega.node.main" in process.cmdline()]
    ranks[0].send_signal(signal.SIGKILL)
    assert (first.wait(), second.wait()) == (7, 137), first.output + second.output
    assert re.findall(r"^error: (.*?):", first.output, re.M) == [f"lost rank 1 on {machines[1].name}"]
    assert "error: rank 1 was killed by signal 9 (SIGKILL)" in second.output
    assert "Traceback" not in first.output + second.output


def test_another_recipe_on_one_machine_is_refused_with_the_field(node, machines):
    first, second = node("srun", options_of_second=("--set", "train.micro_batch_size=2"))
    assert first.wait() == second.wait() == 3, first.output
    assert (
        f"{machines[0].name} (rank 0) and {machines[1].name} (rank 1) differ: train.micro_batch_size 4 and 2"
        in first.output
    )


def test_a_rank_that_cannot_reach_the_first_names_both_ends(machines, recipe, dataset, running):
    machine = machines[1]
    machine.furnish(recipe, dataset)
    process = running(machine.srun(1, machines[0], free_port(), "--set", "spes.join_deadline_s=3"))
    assert process.wait() == 7
    assert f"rank 1 on {machine.name} cannot join rank 0 at {machines[0].address}:" in process.output
    assert "GLOO_SOCKET_IFNAME" in process.output


PDSH = """
import subprocess, sys
arguments = sys.argv[1:]
hosts, fanout = arguments[arguments.index("-w") + 1].split(","), arguments.index("-w") + 2
assert arguments[:3] == ["-S", "-f", "1024"], arguments
command = " ".join(arguments[fanout:])  # as ssh does
on = lambda k: command.replace("%%", "\\0").replace("%n", str(k)).replace("\\0", "%")
run = [subprocess.Popen(["sh", "-c", on(k)]) for k in range(len(hosts))]
sys.exit(max(abs(process.wait()) for process in run))
"""
SRUN = """
import os, subprocess, sys
arguments = sys.argv[1:]
assert "--nodes=2" in arguments and "--ntasks-per-node=1" in arguments and "--nodelist=one,two" in arguments, arguments
first = arguments.index(next(one for one in arguments if one.startswith("--export=ALL"))) + 1
step = {"SLURM_STEP_NUM_TASKS": arguments[1], "SLURM_STEP_NODELIST": "localhost,two", "SLURM_JOB_ID": str(os.getpid())}
step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}
task = lambda k: os.environ | step | {"SLURM_PROCID": str(k), "SLURM_NODEID": str(k)}
run = [subprocess.Popen(arguments[first:], env=task(k)) for k in range(int(arguments[1]))]
sys.exit(max(abs(process.wait()) for process in run))
"""


@pytest.fixture
def from_here(tmp_path, recipe, init, running):
    """Starts a node whose machines are reached by stand-ins for pdsh and srun, which run everything here."""
    for name, program in (("pdsh", PDSH), ("srun", SRUN), ("sinfo", "")):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{program}")
        (tmp_path / name).chmod(0o755)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=1\ntwo slots=1\n")

    def start(launcher, *options):
        where = ["--hostfile", hostfile, "--launcher", launcher, "--master_addr", "127.0.0.1", "--port", free_port()]
        command = [*COMMAND, "launch", recipe, *where, "--out", tmp_path / "an out", "--init", init, *options]
        return running(Process(command, PATH=f"{tmp_path}:{os.environ['PATH']}"))

    return start


@pytest.mark.parametrize("launcher", ["pdsh", "slurm"])
def test_machines_of_a_hostfile_are_started_from_one(from_here, on_one_machine, tmp_path, launcher):
    from_here(launcher).succeed()
    assert_equal(tmp_path / "an out", on_one_machine)


@pytest.mark.parametrize("launcher", ["pdsh", "slurm"])
def test_arguments_and_exit_codes_come_through_pdsh_and_srun(from_here, launcher):
    refused = from_here(launcher, "--set", "data.train=/nowhere/$HOME data%n")
    assert refused.wait() == 5, refused.output
    assert "/nowhere/$HOME data%n.idx: no such file" in refused.output
