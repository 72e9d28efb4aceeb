"""`spes-mega launch`: one node of a run under the `deepspeed` launcher, on this machine."""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click

from spes_mega.hub.access import exposed
from spes_mega.node.checks import check_node, training_data
from spes_mega.node.options import NodeOptions, node_options
from spes_mega.node.supervision import NodeProcesses
from spes_mega.recipe import load_recipe
from spes_mega.signals import handle

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launcher_arguments(options: NodeOptions, ranks: int | None, port: int) -> list[str]:
    """The `deepspeed` command line that starts a node's ranks on this machine."""
    return [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",  # what the `deepspeed` script runs
        "--log_level=critical",  # a rank has said what ended it
        *_devices(ranks),
        f"--master_port={port}",
        "--module",
        "spes_mega.node.monitor",
        *options.arguments(),
    ]


def _devices(ranks: int | None) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        # with --num_gpus the launcher would forget which devices are meant
        return [f"--include=localhost:{','.join(visible.split(',')[:ranks])}"]
    if ranks is None and any(Path("/dev").glob("nvidia[0-9]*")):
        return []  # all GPUs
    return [f"--num_gpus={ranks or 1}"]


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, so that several nodes can share a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        env.setdefault("DS_ACCELERATOR", "cpu")
        # threads that spin while they wait slow several nodes on one machine down many times
        env.setdefault("OMP_WAIT_POLICY", "passive")
    return env


@click.command()
@node_options
@click.option("--ranks", type=click.IntRange(1), help="processes on this machine  [default: one a GPU, else 1]")
@click.option("--port", type=click.IntRange(1, 65535), help="for the ranks among themselves  [default: a free one]")
def command(ranks: int | None, port: int | None, **options: Any) -> None:
    """Train as one node of the run that RECIPE describes."""
    node = NodeOptions.of(options)
    recipe = load_recipe(node.recipe, node.overrides)  # the ranks check again; this one answers at once
    check_node(recipe, node.node, node.hub)
    training_data(recipe)
    if node.hub is not None:
        node.access()
        for warning in exposed(node.keys, node.token_file):
            click.echo(warning, err=True)
    processes = NodeProcesses(launcher_arguments(node, ranks, port or free_port()), _environment())
    handle(STOP_SIGNALS, processes.stop)
    code, lines = processes.wait()
    for line in lines:
        click.echo(line, err=True)
    sys.exit(code)
