"""Everything that patches DeepSpeed or relies on its internals: no other module does.

Written against the releases 0.19.0 to 0.19.8. Where a patch does not fit the installed release, an optional one is left
out with a line that says so; what is needed raises IncompatibleError.
"""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spes_mega.internals import IncompatibleError, Library, optional_patch

DEEPSPEED = Library("deepspeed", "0.19.0 to 0.19.8")


@optional_patch("its shared-memory all-reduce may be compiled (40 s, needs a compiler) at the first start")
def leave_out_shared_memory_comm() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce, which is for inference, at every first start."""
    DEEPSPEED.check_reads(DEEPSPEED.resolve("deepspeed.comm.torch:build_shm_op"), "__compatible_ops__")
    compatible = DEEPSPEED.resolve("deepspeed.ops:__compatible_ops__")
    if not isinstance(compatible, dict):
        raise DEEPSPEED.error("deepspeed.ops.__compatible_ops__ is not a dict")
    compatible["deepspeed_shm_comm"] = False


def default_timeout() -> datetime.timedelta | None:
    """Return how long DeepSpeed lets a collective wait (DEEPSPEED_TIMEOUT); None, for torch's own: it does not say."""
    try:
        return DEEPSPEED.resolve("deepspeed.constants:default_pg_timeout")  # type: ignore[no-any-return]
    except IncompatibleError:
        return None


def async_io_is_usable() -> bool:
    """Return whether DeepSpeed's async_io can be built here; True where only DeepSpeed itself can find that out."""
    try:
        builder = DEEPSPEED.resolve("deepspeed.ops.op_builder:AsyncIOBuilder")()
        compatible = DEEPSPEED.attribute(builder, "is_compatible")
        DEEPSPEED.check_parameters(compatible, "verbose")
    except IncompatibleError:
        return True
    return bool(compatible(verbose=False))


@optional_patch("the optimizer of ZeRO stages 1 and 2 takes more memory and time")
def tune(zero: Any) -> None:
    """Spare memory and copies in the optimizer of ZeRO stages 1 and 2; others are left as they are."""
    if not isinstance(zero, DEEPSPEED.resolve("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer")):
        return
    _measure_norms_in_parts(zero)
    _share_masters(zero)
    if dist.get_world_size() == 1:
        _reduce_nothing(zero)


@optional_patch("gradients are converted to fp64 as a whole for their norms, which takes memory")
def _measure_norms_in_parts(zero: Any) -> None:
    """Stages 1 and 2 convert a gradient to fp64 for its norm, as a whole: that of an embedding is the step's peak.

    Instead they get fp32 norms of its parts, of which they take the norm.
    """
    norm = DEEPSPEED.attribute(zero, "get_grad_norm_direct")
    DEEPSPEED.check_parameters(norm, "gradients", "params")

    def norm_in_parts(gradients: Iterable[torch.Tensor], params: Any, *rest: Any, **options: Any) -> torch.Tensor:
        own = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        return norm([norms_of_parts(gradient) for gradient in own], params, *rest, **options)  # type: ignore[no-any-return]

    zero.get_grad_norm_direct = norm_in_parts


def norms_of_parts(gradient: torch.Tensor) -> torch.Tensor:
    """Norms of as many elements as can be added up in fp32, on the CPU one after the other: fp32."""
    parts = gradient.detach().reshape(-1).split(1 << 16 if gradient.device.type == "cpu" else 1 << 20)
    return torch.stack(torch._foreach_norm(parts, dtype=torch.float32))


@optional_patch("weights in fp32 have masters of their own, which takes memory")
def _share_masters(zero: Any) -> None:
    """Let weights in fp32 be their own masters, of which stages 1 and 2 keep a copy and copy it back at each step."""
    masters = DEEPSPEED.attribute(zero, "single_partition_of_fp32_groups")
    partitions = DEEPSPEED.attribute(zero, "parallel_partitioned_bit16_groups")
    link = DEEPSPEED.attribute(zero, "_link_all_hp_params")  # by which parameters find their masters
    if DEEPSPEED.attribute(zero, "cpu_offload") or DEEPSPEED.attribute(zero, "dtype") != torch.float32:
        return
    own = [parts[dist.get_rank()] for parts in partitions]
    if [master.shape for master in masters] != [part.shape for part in own]:
        raise DEEPSPEED.error("masters have other shapes than the weights")
    for master, part in zip(masters, own, strict=True):
        master.data = part
    link()


@optional_patch("gradients are copied into a buffer and back for a reduction of which there is none")
def _reduce_nothing(zero: Any) -> None:
    """For a rank without others: stages 1 and 2 would copy all gradients into a buffer and back."""
    DEEPSPEED.attribute(zero, "buffered_reduce_fallback")
    zero.buffered_reduce_fallback = _nothing


def _nothing(*_: Any, **__: Any) -> None:
    pass


@dataclass(frozen=True)
class Place:
    """Elements [start, start + count) of a parameter are [offset, offset + count) of this rank's flat tensor."""

    flat: torch.Tensor
    offset: int
    start: int
    count: int


class FlatGroups:
    """The flat fp32 tensors that ZeRO gives to the optimizer, and where parameters lie in them.

    DeepSpeed has one a parameter group and rank, in stage 3 one a subgroup. Its own accessors reach only the first
    parameter group in stages 1 and 2, and nothing before the first step.
    """

    def __init__(self, engine: Any) -> None:
        self._zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = DEEPSPEED.attribute(self._zero, "optimizer")
        """torch's own, whose parameters are the flat tensors."""
        self.on_nvme = bool(getattr(self._zero, "swap_optimizer", False))  # in stage 3 alone
        # One optimizer has stages 1 and 2, another bf16 with gradients summed in fp32.
        groups = getattr(self._zero, "bit16_groups", None) or getattr(self._zero, "bf16_groups", [])
        self._group_of = {id(parameter): index for index, group in enumerate(groups) for parameter in group}

    def place(self, parameter: Any) -> Place:
        """Return where the parameter lies on this rank. Raises IncompatibleError."""
        if hasattr(parameter, "ds_id"):
            return self._place_in_stage_3(parameter)
        if id(parameter) not in self._group_of:
            raise DEEPSPEED.error("its optimizer keeps parameters in another way")
        (flat,) = self.optimizer.param_groups[self._group_of[id(parameter)]]["params"]
        mapping = DEEPSPEED.attribute(parameter, "_hp_mapping")
        if mapping is None:  # nothing of it is on this rank
            return Place(flat, 0, 0, 0)
        there = DEEPSPEED.attribute(mapping, "hp_fragment_address")
        here = DEEPSPEED.attribute(mapping, "lp_fragment_address")
        return Place(flat, there.start, here.start, there.numel)

    def _place_in_stage_3(self, parameter: Any) -> Place:
        """Each rank has an equal part of the parameter, of which the last one is padded."""
        number = DEEPSPEED.attribute(self._zero, "get_param_id")(parameter)
        index, offset, size = DEEPSPEED.attribute(self._zero, "grad_position")[number]
        flat = DEEPSPEED.attribute(self._zero, "fp32_partitioned_groups_flat")[index]
        start = dist.get_rank() * size
        count = max(0, min(size, DEEPSPEED.attribute(parameter, "ds_numel") - start))
        return Place(flat, offset, start, count)


def release(engine: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Free the tensors of an engine, its optimizer and the model's `parameters`; none of them can be used any more.

    In stage 3 the classes that DeepSpeed makes for autograd keep engine and model for ever, so that it does not do to
    forget them: they have to let go of their tensors.
    """
    zero, parameters = engine.optimizer, list(parameters)
    optimizer = DEEPSPEED.attribute(zero, "optimizer")
    engine.destroy()
    engine.optimizer = None
    optimizer.state.clear()
    optimizer.param_groups.clear()
    vars(zero).clear()
    for parameter in parameters:
        vars(parameter).clear()
        parameter.data, parameter.grad = parameter.new_empty(0), None
