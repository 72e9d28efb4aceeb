"""Where this process stands among the ranks of its node, as whatever started it says in the environment.

The deepspeed launcher and torchrun set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Plain `srun` sets
variables of its own, from which these follow; they are set here, since torch and DeepSpeed ask for them.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from spes_mega.errors import SpesError

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_RANKS_HERE = ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")  # of deepspeed and of torchrun
_MACHINE = ("CROSS_RANK", "GROUP_RANK", "SLURM_NODEID")  # of deepspeed, torchrun and srun
_FIRST_PORT, _PORTS = 20_000, 12_000  # below those that Linux gives to outgoing connections


@dataclass(frozen=True)
class Place:
    """A rank's place, and how to reach rank 0."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this machine."""
    machine: int
    """Number of the machine in its launcher's count; 0 if it has none."""
    master_addr: str
    master_port: int
    host: str
    """Name of this machine."""

    @property
    def text(self) -> str:
        return f"rank {self.rank} on {self.host}"


def take_place() -> Place:
    """Return this process's place, and set the variables in which torch and DeepSpeed look for it.

    Raises SpesError: it was not started by a launcher, or the launcher left something out.
    """
    if "RANK" not in os.environ and "SLURM_STEP_NODELIST" in os.environ:
        os.environ.update(from_slurm(os.environ))
    return place_of(os.environ)


def place_of(env: Mapping[str, str]) -> Place:
    """The place that the variables of the deepspeed launcher or torchrun describe. Raises SpesError."""
    if missing := [name for name in LAUNCHED if not env.get(name)]:
        raise SpesError(
            f"{missing[0]} is not set: start this with `spes-mega launch`, the deepspeed launcher, torchrun or srun"
        )
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if rank >= size:
        raise SpesError(f"RANK is {rank}, but WORLD_SIZE {size}: ranks count from 0")
    here = next((name for name in _RANKS_HERE if env.get(name)), None)
    machine = next((name for name in _MACHINE if env.get(name)), None)
    return Place(
        rank=rank,
        size=size,
        local_rank=_number(env, "LOCAL_RANK"),
        local_size=max(1, _number(env, here)) if here else 1,
        machine=_number(env, machine) if machine else 0,
        master_addr=env["MASTER_ADDR"],
        master_port=_number(env, "MASTER_PORT"),
        host=socket.gethostname(),
    )


def from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """What a launcher would set, for one task of a job step that `srun` started with one task a rank.

    MASTER_ADDR and MASTER_PORT, where they are set, stay; else they are the step's first machine, and a port that
    follows from the numbers of job and step. Raises SpesError: a variable is missing or malformed.
    """
    needed = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if missing := [name for name in needed if not env.get(name)]:
        raise SpesError(f"{missing[0]} is not set: start this with srun, one task a rank")
    job, step = (re.sub(r"\D", "", env.get(name, "")) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_SIZE": str(_tasks_here(env)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": env.get("MASTER_PORT") or str(_FIRST_PORT + (31 * int(job) + int(step)) % _PORTS),
    }


def first_host(hosts: str) -> str:
    """The first machine of a list as Slurm writes them: `a[01-04,7],b` gives a01. Raises SpesError."""
    match = re.match(r"([^\[\],\s]+)(?:\[(\w+)[^\]]*\]([^\[\],\s]*))?", hosts)
    if match is None:
        raise SpesError(
            f"SLURM_STEP_NODELIST is {hosts[:80]!r}: expected names of machines; set MASTER_ADDR to rank 0's"
        )
    return match[1] + (match[2] or "") + (match[3] or "")


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of the step on this machine: the entry of SLURM_STEP_TASKS_PER_NODE, e.g. `4(x2),3`, for it."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,5})\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    machine = _number(env, "SLURM_NODEID") if env.get("SLURM_NODEID") else 0
    return counts[machine] if machine < len(counts) else 1


def _number(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,9}", env[name]):
        raise SpesError(f"{name} is {env[name][:80]!r}: expected a number from 0")
    return int(env[name])
