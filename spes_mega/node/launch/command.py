"""`spes-mega launch`: one node of a run under the `deepspeed` launcher, on this machine."""

import json
import os
import random
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from spes_mega.data.dataset_files import training_data
from spes_mega.errors import AccessError
from spes_mega.node.launch.devices import VARIABLE, Devices, devices_of, has_gpus
from spes_mega.node.launch.hostfile import CLUSTER_KEYS, PORT, Cluster, cluster_options
from spes_mega.node.launch.monitor import RANK_ENVIRONMENT
from spes_mega.node.launch.remote import RemoteProcesses
from spes_mega.node.launch.supervision import NodeProcesses
from spes_mega.node.options import NodeOptions, node_options
from spes_mega.node.preflight import check_node
from spes_mega.recipe import load_recipe
from spes_mega.security.access import exposed
from spes_mega.signals import handle

_FOREIGN = re.compile(r"((LOCAL|GROUP|ROLE|CROSS)_)?(RANK|(WORLD_)?SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
FREE_PORTS = range(20_000, 32_000)
"""Below the ephemeral ports of Linux (net.ipv4.ip_local_port_range starts at 32768)."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


RUNNER = [
    sys.executable,
    "-m",
    "deepspeed.launcher.runner",  # what the `deepspeed` script runs
    "--log_level=critical",  # a rank has said what ended it
]


def launcher_arguments(options: NodeOptions, ranks: int, port: int, cluster: Cluster | None = None) -> list[str]:
    """The `deepspeed` command line that starts a node's ranks on this machine; of a `cluster`, those that are here."""
    # without a hostfile DeepSpeed would take hosts from /job/hostfile, where there is one
    here = [f"--hostfile={os.devnull}", f"--num_gpus={ranks}", f"--master_port={port}"]
    where = cluster.launcher_arguments(port) if cluster else here
    return [*RUNNER, *where, "--module", "spes_mega.node.launch.monitor", *options.arguments()]


def remote_arguments(options: NodeOptions, port: int, cluster: Cluster, mark: str) -> list[str]:
    """The `deepspeed` command line that starts a node's ranks on the machines of `cluster`, by ssh or srun."""
    program = ["--module", "spes_mega.node.main"]
    if cluster.launcher == "slurm":  # for which DeepSpeed knows no modules
        program = [str(Path(__file__).parents[1] / "main.py")]
    arguments = ["--mark", mark, *options.arguments()]
    return [*RUNNER, *cluster.launcher_arguments(port), *program, *cluster.rank_arguments(arguments)]


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on, so that several nodes can share a machine.

    It is below those that the system gives to outgoing connections, one of which could take it before it is used.
    """
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AccessError(
        f"no TCP port from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} is free; pass --port with one that is"
    )


def _environment() -> dict[str, str]:
    """Ours without what another launcher has left there, and without what Python and DeepSpeed read by themselves."""
    env = {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}
    return env | {
        "DS_ENV_FILE": os.devnull,  # or DeepSpeed takes variables from .deepspeed_env, here or in the home directory
        "PYTHONSAFEPATH": "1",  # or modules in the current folder take the place of those that are meant
    }


def launcher_environment(devices: Devices) -> dict[str, str]:
    """Of the launcher of ranks on this machine.

    It takes numbers of devices only: it counts ranks on a CPU, and each rank gets its devices from its monitor.
    """
    env = _environment()
    env.pop(VARIABLE, None)
    if not devices.visible:
        # threads that spin while they wait slow several nodes on one machine down many times
        env.setdefault("OMP_WAIT_POLICY", "passive")
    accelerator = env.get("DS_ACCELERATOR", None if devices.visible else "cpu")
    own = {VARIABLE: devices.visible, "DS_ACCELERATOR": accelerator}
    return env | {RANK_ENVIRONMENT: json.dumps(own), "DS_ACCELERATOR": "cpu"}


def remote_environment() -> dict[str, str]:
    """Of the launcher of ranks on other machines, to which it passes some of it on."""
    env = _environment()
    if not has_gpus():
        env.setdefault("DS_ACCELERATOR", "cpu")
        env.setdefault("OMP_WAIT_POLICY", "passive")
    return env


@click.command()
@node_options
@cluster_options
@click.option("--ranks", type=click.IntRange(1), help="processes on this machine  [default: one a GPU, else 1]")
@click.option(
    "--port",
    "--master_port",
    "--master-port",
    type=click.IntRange(1, 65535),
    help=f"for the ranks among themselves  [default: a free one; {PORT} with --hostfile]",
)
def command(ranks: int | None, port: int | None, **options: Any) -> None:
    """Train as one node of the run that RECIPE describes."""
    cluster = Cluster.of(options | {"ranks": ranks})
    node = NodeOptions.of({key: value for key, value in options.items() if key not in CLUSTER_KEYS})
    recipe = load_recipe(node.recipe, node.overrides)  # the ranks check again; this one answers at once
    check_node(recipe, node.node, node.hub)
    remote = cluster is not None and cluster.machine is None
    if not remote:
        training_data(recipe)
    if node.hub is not None and (cluster is None or cluster.leads):
        node.access()
        for warning in exposed(node.keys, node.token_file):
            click.echo(warning, err=True)
    early: list[int] = []
    handle(STOP_SIGNALS, lambda signum, frame: early.append(signum))  # until there is something to stop
    processes: NodeProcesses | RemoteProcesses
    if cluster is not None and cluster.machine is None:
        processes = RemoteProcesses(sum(cluster.slots.values()), cluster.launcher)
        processes.start(remote_arguments(node, port or PORT, cluster, processes.mark), remote_environment())
    else:
        devices = devices_of(cluster.ranks_here if cluster else ranks)
        port = port or (PORT if cluster else free_port())
        arguments = launcher_arguments(node, devices.ranks, port, cluster)
        processes = NodeProcesses(arguments, launcher_environment(devices))
    handle(STOP_SIGNALS, processes.stop)
    if early:
        processes.stop(early[0], None)
    code, lines = processes.wait()
    for line in lines:
        click.echo(line, err=True)
    sys.exit(code)
