"""Process groups that Megatron-Core asks for.

A node's ranks are data-parallel only: tensor, pipeline, context and expert parallelism are 1, because experts
are spread over nodes instead of over ranks.
"""

import torch.distributed as dist

from spes_mega.model.megatron_patches import prepare_megatron


def ensure_parallel_state() -> None:
    """Initialize Megatron's process groups; without a default group, first make one of this process alone.

    Launchers that start several ranks call `deepspeed.init_distributed` before. The group made here lives in this
    process's memory: no network port is opened and no environment variable read.
    """
    prepare_megatron()
    from megatron.core import parallel_state

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
