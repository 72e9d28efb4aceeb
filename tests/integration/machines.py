"""Two machines that share nothing: network namespaces with a cable between them and hidden folders, where root allows.

Elsewhere they are two folders and the loopback interface; whatever reads a file of the other is then not found out by
the kernel, but by files that only one of them has.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.integration.processes import COMMAND, PYTHON, Process

_ENTER = 'hostname "$1"; mount -t tmpfs tmpfs "$2"; ip link set lo up; shift 2; exec "$@"'


@dataclass
class Machine:
    """A machine with a folder of its own: recipe, data, and what runs there writes."""

    name: str
    folder: Path
    address: str
    enter: list[str]
    """Command that runs another one on this machine."""
    interface: str

    @property
    def recipe(self):
        return self.folder / "recipe.yaml"

    def furnish(self, recipe, dataset):
        """Give it a recipe and data of its own."""
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{dataset}{suffix}", self.folder / f"data{suffix}")
        raw = yaml.safe_load(recipe.read_text())
        raw["data"]["train"] = str(self.folder / "data")
        self.recipe.write_text(yaml.safe_dump(raw))

    def start(self, arguments, **env):
        return Process([*self.enter, *arguments], GLOO_SOCKET_IFNAME=self.interface, **env)

    def torchrun(self, number, master, port, *options, ranks=1):
        """Its part of a node under torchrun: `number` of two machines."""
        torchrun = ["-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", number, "--nproc-per-node", ranks]
        reach = ["--master-addr", master.address, "--master-port", port]
        module = ["-m", "spes_mega.node.main", self.recipe, "--out", self.folder / "out", *options]
        return self.start([*PYTHON, *torchrun, *reach, *module])

    def launch(self, number, master, port, *options):
        """Its part of a node under DeepSpeed's launcher, without ssh."""
        hostfile = self.folder / "hostfile"
        hostfile.write_text("# two machines\none slots=1\ntwo slots=1\n")
        where = ["--hostfile", hostfile, "--no_ssh", "--node_rank", number, "--master_addr", master.address]
        out = ["--out", self.folder / "out"]
        return self.start([*COMMAND, "launch", self.recipe, *where, "--master_port", port, *out, *options])

    def srun(self, number, master, port, *options):
        """Its only task of a job step: the environment that srun makes on the second of two machines, or the first."""
        env = {
            "SLURM_PROCID": number,
            "SLURM_LOCALID": 0,
            "SLURM_NODEID": number,
            "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            "SLURM_STEP_NODELIST": master.address,  # a name that can be resolved
            "SLURM_JOB_ID": port,
            "SLURM_STEP_ID": 0,
        }
        command = [*PYTHON, "-m", "spes_mega.node.main", self.recipe, "--out", self.folder / "out", *options]
        return self.start(command, **{key: str(value) for key, value in env.items()})


def in_namespaces(folder):
    """Two machines in network namespaces, and what takes them down; None where that is not allowed."""
    tag = f"sp{os.getpid() % 100_000}"
    ends = [f"{tag}a", f"{tag}b"]
    if (
        os.geteuid()
        or shutil.which("ip") is None
        or _run("ip", "link", "add", ends[0], "type", "veth", "peer", ends[1])
    ):
        return None

    def take_down():
        for end in ends:
            _run("ip", "netns", "del", end)
        _run("ip", "link", "del", ends[0])

    machines = []
    for number, end in enumerate(ends):
        address = f"10.213.{os.getpid() % 250}.{number + 1}"
        inside = ["ip", "netns", "exec", end]
        here, hidden = folder / f"machine-{number}", folder / f"machine-{1 - number}"
        here.mkdir()
        for command in (
            ["ip", "netns", "add", end],
            ["ip", "link", "set", end, "netns", end],
            [*inside, "ip", "addr", "add", f"{address}/24", "dev", end],
            [*inside, "ip", "link", "set", end, "up"],
        ):
            if _run(*command):
                take_down()
                return None
        enter = [*inside, "unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh", f"machine-{number}", str(hidden)]
        machines.append(Machine(f"machine-{number}", here, address, enter, end))
    return machines, take_down


def on_loopback(folder):
    machines = [Machine(os.uname().nodename, folder / f"machine-{k}", "127.0.0.1", [], "lo") for k in (0, 1)]
    for machine in machines:
        machine.folder.mkdir()
    return machines, lambda: None


def _run(*command):
    return subprocess.run(command, capture_output=True).returncode
