"""Which devices the ranks of a node get: those of CUDA_VISIBLE_DEVICES, read as CUDA reads it, or the CPU."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from spes_mega.errors import RecipeError

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Devices:
    """The devices of a node's ranks on this machine."""

    visible: str
    """CUDA_VISIBLE_DEVICES of every rank, which takes the device of its local rank; empty: the CPU."""
    ranks: int


def devices_of(ranks: int | None) -> Devices:
    """Return the devices for so many ranks, by default one rank a GPU, or a single one on the CPU.

    Raises RecipeError: a device that is named is not there, or there are more ranks than devices.
    """
    value = os.environ.get(VARIABLE)
    named = None if value is None else named_devices(value)
    physical = named is not None and named != [] and not named[0].isdigit()
    if named == [] or not (has_gpus() or physical):
        return Devices("", ranks or 1)
    if named is not None and len(named) > 1 and named[0].startswith("MIG-"):
        raise RecipeError(f"{VARIABLE}={value}: a process can use one MIG device: name one, and start a node for each")
    count = count_gpus()
    if named is not None and count < len(named):
        raise RecipeError(
            f"{VARIABLE}={value}: PyTorch finds {count} of these {len(named)} devices on this machine; `nvidia-smi -L` "
            f"lists what is there, and an empty {VARIABLE} is the CPU"
        )
    if count == 0:
        click.echo("PyTorch sees none of this machine's GPUs (its driver, or a CPU build?): using the CPU", err=True)
        return Devices("", ranks or 1)
    if ranks is not None and ranks > count:
        raise RecipeError(f"{ranks} ranks need a GPU each, and there are {count} for them here: see {VARIABLE}")
    return Devices(",".join((named or [str(n) for n in range(count)])[:ranks]), ranks or count)


def named_devices(value: str) -> list[str]:
    """Return the devices that the value makes visible: up to the first that is none, and none if one comes twice."""
    parts = [part.strip() for part in value.split(",")]
    prefix = next((p for p in ("GPU-", "MIG-") if parts[0].startswith(p)), None)
    names: list[str] = []
    for part in parts:
        if not (part.startswith(prefix) if prefix else part.isascii() and part.isdigit()):
            break
        names.append(part)
    return names if len(set(names)) == len(names) else []


def has_gpus() -> bool:
    """Whether this machine has NVIDIA GPUs."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def count_gpus() -> int:
    """Number of devices that PyTorch finds, in a process of its own: its libraries take hundreds of megabytes."""
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    lines = found.stdout.split()
    return int(lines[-1]) if found.returncode == 0 and lines else 0
