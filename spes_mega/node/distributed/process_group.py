"""The process group of a node's ranks: made from what the launcher says, or an error that names both ends."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from spes_mega.errors import SpesError
from spes_mega.node.distributed.lifelines import LostRankError
from spes_mega.node.distributed.place import Place, take_place
from spes_mega.node.stop import Stopped
from spes_mega.node.zero.deepspeed_patches import default_timeout, leave_out_shared_memory_comm


@contextmanager
def process_group(place: Place | None = None, deadline_s: float = 1800.0) -> Iterator[None]:
    """Join the node's ranks, for which rank 0 waits `deadline_s` seconds, and which wait so long for it.

    nccl where CUDA exists, else gloo. Raises SpesError: no launcher started this process, or LostRankError: this rank
    and rank 0 cannot reach each other.
    """
    place = place or take_place()
    import deepspeed

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    leave_out_shared_memory_comm()
    with naming_both_ends(place, deadline_s):
        store, rank, size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=deadline_s)))
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=default_timeout())
    deepspeed.init_distributed(verbose=False)  # takes the group that there is
    try:
        yield
    except (SpesError, Stopped):  # what all ranks raise; after anything else others may not be there to say goodbye to
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def naming_both_ends(place: Place, deadline_s: float) -> Iterator[None]:
    """Raise LostRankError instead of what torch raises while ranks connect to each other."""
    try:
        yield
    except (RuntimeError, ValueError) as e:  # those of torch.distributed among them
        raise _unreachable(place, e, deadline_s) from e


def _unreachable(place: Place, error: Exception, deadline_s: float) -> LostRankError:
    cause = str(error).splitlines()[0][:300]
    address = f"{place.master_addr}:{place.master_port}"
    if place.rank == 0:
        ends = f"{place.text} waited at {address} for the other {place.size - 1} ranks"
    else:
        ends = f"{place.text} cannot join rank 0 at {address}"
    return LostRankError(
        f"{ends} ({deadline_s:g} s, spes.join_deadline_s): {cause}. Are all machines of the node started, with the "
        "same MASTER_ADDR, an address of rank 0's machine that the others can reach? GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME choose the network interface (docs/guides/several-machines.md)"
    )
