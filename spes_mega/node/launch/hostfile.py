"""One node of several machines: the hostfile, and the part of the `deepspeed` command line that follows from it."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from spes_mega.errors import RecipeError

Command = TypeVar("Command", bound=Callable[..., Any])
CLUSTER_KEYS = ("hostfile", "no_ssh", "node_rank", "launcher", "launcher_args", "master_addr")
PORT = 29_500
"""Of rank 0, where none is given: all machines have to know it."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a node, and how their ranks are started."""

    hostfile: Path
    slots: dict[str, int]
    """Ranks of each machine; those of the first begin with rank 0."""
    machine: int | None
    """This machine's number, if each starts its own ranks; None: all are started from here."""
    launcher: str
    launcher_args: str
    master_addr: str

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Cluster | None":
        """From the values that click gives; None without --hostfile.

        Raises click.UsageError where they contradict each other, RecipeError: the hostfile cannot be used.
        """
        hostfile, no_ssh, node_rank, launcher, launcher_args, master_addr = (options[key] for key in CLUSTER_KEYS)
        if hostfile is None:
            if no_ssh or node_rank is not None or master_addr is not None:
                raise click.UsageError("--no_ssh, --node_rank and --master_addr are for a node with a --hostfile")
            return None
        if options["ranks"] is not None:
            raise click.UsageError("--ranks contradicts --hostfile, whose slots are the ranks of each machine")
        slots = read_hostfile(hostfile)
        if no_ssh and not (node_rank is not None and node_rank < len(slots)):
            raise click.UsageError(f"--no_ssh needs --node_rank, from 0 to {len(slots) - 1}: a line of {hostfile}")
        if node_rank is not None and not no_ssh:
            raise click.UsageError("--node_rank is for --no_ssh; otherwise all machines are started from here")
        if launcher == "slurm" and len(set(slots.values())) > 1:
            raise RecipeError(f"{hostfile}: with --launcher slurm all machines need the same number of slots")
        return cls(hostfile, slots, node_rank, launcher, launcher_args, master_addr or next(iter(slots)))

    @property
    def leads(self) -> bool:
        """Whether this machine has rank 0, so far as is known here: which alone needs keys."""
        return self.machine == 0

    @property
    def ranks_here(self) -> int:
        """Number of ranks on this machine, which starts its own."""
        assert self.machine is not None, "all machines are started from here"
        return list(self.slots.values())[self.machine]

    def launcher_arguments(self, port: int) -> list[str]:
        """Options of DeepSpeed's runner."""
        where = [f"--hostfile={self.hostfile}", f"--master_addr={self.master_addr}", f"--master_port={port}"]
        if self.machine is not None:
            return [*where, "--no_ssh", f"--node_rank={self.machine}"]
        return [*where, "--force_multi", "--no_ssh_check", f"--launcher={self.launcher}", *self._launcher_args()]

    def _launcher_args(self) -> list[str]:
        given = [self.launcher_args] if self.launcher_args else []
        if self.launcher == "slurm":  # which DeepSpeed tells only how many tasks there are
            per_machine = next(iter(self.slots.values()))
            given += [f"--nodes={len(self.slots)} --ntasks-per-node={per_machine} --nodelist={','.join(self.slots)}"]
        return [f"--launcher_args={' '.join(given)}"] if given else []

    def rank_arguments(self, arguments: list[str]) -> list[str]:
        """The command line of a rank, as DeepSpeed has to be given it for the ranks to get it as it is."""
        return [for_pdsh(one) for one in arguments] if self.launcher == "pdsh" and self.machine is None else arguments


def for_pdsh(argument: str) -> str:
    """Quote for pdsh, which replaces %n and the like, and for the shell over there.

    DeepSpeed itself puts arguments with a space into double quotes, and escapes the double quotes in them.
    """
    argument = argument.replace("%", "%%")
    return re.sub(r"([\\$`])", r"\\\1", argument) if " " in argument else shlex.quote(argument)


def read_hostfile(path: Path) -> dict[str, int]:
    """Machines and their slots, in DeepSpeed's format: `NAME slots=N`, one a line. Raises RecipeError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as e:
        raise RecipeError(f"{path}: cannot read the hostfile: {getattr(e, 'strerror', None) or e}") from e
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if (match := re.match(r"(\S+)\s+slots=([1-9]\d{0,3})(\s|$)", text)) is None:
            raise RecipeError(f"{path}:{number}: expected NAME slots=N, with the number of ranks of that machine")
        if match[1] in slots:
            raise RecipeError(f"{path}:{number}: {match[1]} stands there twice: give it one line with all its slots")
        slots[match[1]] = int(match[2])
    if not slots:
        raise RecipeError(f"{path}: names no machine: expected lines of NAME slots=N")
    return slots


def cluster_options(command: Command) -> Command:
    """Add the options of `Cluster` to a command, by the names that DeepSpeed gives them."""
    path = click.Path(path_type=Path)
    for option in reversed(
        (
            click.option("--hostfile", type=path, help="machines of this node: a line of NAME slots=N for each"),
            click.option("--no_ssh", "--no-ssh", is_flag=True, help="this command is given on each of the machines"),
            click.option(
                "--node_rank", "--node-rank", type=click.IntRange(0), help="line of this machine, with --no_ssh"
            ),
            click.option("--master_addr", "--master-addr", help="of rank 0  [default: first machine of the hostfile]"),
            click.option(
                "--launcher",
                type=click.Choice(["pdsh", "slurm"]),
                default="pdsh",
                show_default=True,
                help="starts the machines of the hostfile",
            ),
            click.option("--launcher_args", "--launcher-args", default="", help="more arguments for the launcher"),
        )
    ):
        command = option(command)
    return command
