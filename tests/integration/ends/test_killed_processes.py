"""What `spes-mega launch` makes of each of its processes being killed, or stopped together with all others."""

import os
import re
import signal
import time

import psutil
import pytest

RUNNER, LAUNCHER = "deepspeed.launcher.runner", "deepspeed.launcher.launch"
MONITOR, RANK = "spes_mega.node.launch.monitor", "spes_mega.node.main"


class Node:
    """A lone node of two ranks in the middle of its run."""

    def __init__(self, process, out):
        self.process, self.out = process, out
        process.wait_for(r"step 3/", timeout=240)
        self.family = process.family()

    def find(self, module, rank=0):
        """The process that runs the module; `rank` is that of a monitor or rank."""
        found = [one for one in self.family if f"-m {module} " in " ".join(one.cmdline()) + " "]
        wanted = [one for one in found if module in (RUNNER, LAUNCHER) or f"--local_rank={rank}" in one.cmdline()]
        assert len(wanted) == 1, (module, rank, [one.cmdline() for one in self.family])
        return wanted[0]

    def ended(self):
        """Exit code and console of a node that has ended; nothing of it is left when `launch` returns."""
        code = self.process.wait(120)
        assert [one for one in self.family if runs(one)] == []
        return code, self.process.output

    def saved(self):
        """Last step that is in a checkpoint, and the last that was trained."""
        steps = [int(path.name.removeprefix("step-")) for path in (self.out / "checkpoints").glob("step-*")]
        trained = re.findall(r"step (\d+)/", self.process.output)
        return max(steps, default=0), int(trained[-1])


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def node(tmp_path, write_recipe, start_node):
    spes = {"num_nodes": 1, "sync_every": 1000}
    recipe = write_recipe(tmp_path, spes=spes, train={"steps": 100_000}, checkpoint={"every": 50_000})
    return Node(start_node(recipe, "--out", tmp_path / "out", ranks=2), tmp_path / "out")


@pytest.mark.parametrize(("rank", "signum", "hint"), [(1, signal.SIGKILL, "memory"), (0, signal.SIGSEGV, "")])
def test_a_killed_rank_is_named_in_one_line(node, rank, signum, hint):
    node.find(RANK, rank).send_signal(signum)
    code, output = node.ended()
    assert code == 128 + signum
    errors = [line for line in output.splitlines() if not re.match(r"node 0: |.*\[0\]", line)]
    assert len(errors) == 1, output
    assert errors[0].startswith(f"error: rank {rank} was killed by signal {int(signum)} ({signum.name})")
    assert hint in errors[0]


@pytest.mark.parametrize(
    ("module", "code", "line"),
    [
        (LAUNCHER, 137, "error: DeepSpeed's launcher was killed, and its ranks have stopped"),
        (RUNNER, 137, "error: DeepSpeed's runner was killed by signal 9 (SIGKILL), and its ranks have stopped"),
    ],
)
def test_a_killed_launcher_is_a_failure_and_the_ranks_save(node, module, code, line):
    node.find(module).kill()
    assert node.ended()[0] == code
    assert line in node.process.output
    assert "Traceback" not in node.process.output
    saved, trained = node.saved()
    assert saved == trained


def test_a_killed_monitor_ends_the_node(node):
    node.find(MONITOR, 1).kill()
    code, output = node.ended()
    assert code == 137
    assert "error: the monitor of rank 1 was killed, and its ranks have stopped" in output
    assert "Traceback" not in output
    saved, trained = node.saved()
    assert saved == trained


def test_ranks_save_and_end_when_launch_itself_is_killed(node):
    node.process.popen.kill()
    end = time.monotonic() + 60
    while any(runs(one) for one in node.family):
        assert time.monotonic() < end
        time.sleep(0.1)
    saved, trained = node.saved()
    assert saved == trained


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_all_processes_at_once_is_a_stop_and_the_ranks_save(node, signum, code):
    for process in node.family:
        process.send_signal(signum)
    assert node.ended()[0] == code
    assert "Traceback" not in node.process.output
    assert "error" not in node.process.output
    saved, trained = node.saved()
    assert saved == trained


def test_nohup_is_heeded(tmp_path, write_recipe, start_node):
    """An ignored SIGHUP stays ignored, at all processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        recipe = write_recipe(tmp_path, spes={"num_nodes": 1}, train={"steps": 100_000})
        process = start_node(recipe, "--out", tmp_path / "out")
    finally:
        signal.signal(signal.SIGHUP, before)
    node = Node(process, tmp_path / "out")
    for one in node.family:
        one.send_signal(signal.SIGHUP)
    step = node.saved()[1]
    process.wait_for(rf"step {step + 50}/")
    process.popen.send_signal(signal.SIGTERM)
    assert node.ended()[0] == 143


def test_a_stop_at_the_very_start_ends_all(tmp_path, write_recipe, start_node):
    recipe = write_recipe(tmp_path, spes={"num_nodes": 1}, train={"steps": 100_000})
    process = start_node(recipe, "--out", tmp_path / "out")
    while len(process.family()) < 2:
        time.sleep(0.01)
    family = process.family()
    os.kill(process.popen.pid, signal.SIGTERM)
    assert process.wait(60) == 143
    end = time.monotonic() + 30
    while any(runs(one) for one in family):
        assert time.monotonic() < end, [one for one in family if runs(one)]
        time.sleep(0.05)
    assert "Traceback" not in process.output
