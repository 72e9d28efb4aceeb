"""Reading and replacing a node's weights by canonical name, through every ZeRO stage, fp32 masters included."""

from collections.abc import Callable, Collection, Iterator

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn

from spes_mega.errors import SpesError
from spes_mega.layout.names import expected_tensors
from spes_mega.model.weight_map import Entry, WeightMap
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.stop import StopRequest
from spes_mega.recipe import ModelSection

Shapes = dict[str, tuple[int, ...]]
Tensors = Iterator[tuple[str, torch.Tensor]]


class NodeWeights:
    """The weights of a model that DeepSpeed has wrapped (after `deepspeed.initialize`)."""

    def __init__(self, gpt: GPTModel, model: ModelSection, ranks: Ranks, stop: StopRequest) -> None:
        self.map = WeightMap(model, gpt)
        self.shapes: Shapes = expected_tensors(model)
        self._ranks, self._stop = ranks, stop

    def assign(self, names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
        """Replace the tensors called `names` (the same on all ranks) by what `read` gives on rank 0.

        Trainable parameters get the exact fp32 values as masters, and their rounding to the train dtype.

        Raises:
            CheckpointError: a tensor is missing, or has another shape; on all ranks.
        """
        for entry in self._entries(names):
            value = self._ranks.tensor(lambda e=entry: e.join({n: read(n) for n in e.names}), entry.shape)  # type: ignore[misc]
            set_full(entry.parameter, value)

    def collect(
        self, names: Collection[str], consume: Callable[[Shapes, Tensors], None], *, rounded: bool = False
    ) -> None:
        """Call `consume(shapes, tensors)` on rank 0 with the fp32 values of `names`, gathered one by one.

        `tensors` come once, in the order of `shapes`. An error of `consume` is raised on all ranks.

        Raises:
            SpesError: a tensor is not trained here, so that there is only a copy rounded to `model.frozen_dtype`, which
                must never pass for the run's weights; `rounded` asks for it all the same.
        """
        entries = self._entries(names)
        if not rounded:
            _check_trained(entries, set(names))
        pending = iter(entries)

        def follow() -> None:
            get_full(next(pending).parameter)

        def lead(step: Callable[[], None]) -> None:
            shapes = {name: self.shapes[name] for entry in entries for name in entry.names}
            consume(shapes, self._gather(entries, step))

        self._ranks.lead(lead, follow)

    def _gather(self, entries: list[Entry], step: Callable[[], None]) -> Tensors:
        for entry in entries:
            with self._stop.deferred():  # a signal between the two lines would leave the other ranks waiting
                step()
                value = get_full(entry.parameter)
            yield from entry.split(value.cpu()).items()

    def _entries(self, names: Collection[str]) -> list[Entry]:
        wanted = set(names)
        return [entry for entry in self.map.entries if wanted.intersection(entry.names)]


def _check_trained(entries: list[Entry], wanted: set[str]) -> None:
    for entry in entries:
        if not entry.parameter.requires_grad:
            name = next(name for name in entry.names if name in wanted)
            raise SpesError(
                f"{name}: this node does not train it, and has only a copy in {entry.parameter.dtype}, which must not "
                "be sent or saved in its place. That is a fault of the program: please report it"
            )


@torch.no_grad()
def get_full(parameter: nn.Parameter) -> torch.Tensor:
    """The whole parameter in fp32, of trainable ones the master. All ranks take part."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        value = safe_get_full_fp32_param(parameter)
        assert value is not None, "trainable parameters have an fp32 master in ZeRO stages 1-3"
        return value
    with deepspeed.zero.GatheredParameters(parameter):
        return parameter.detach().to(torch.float32, copy=True)


@torch.no_grad()
def set_full(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole parameter, and the master of a trainable one, to an fp32 value that all ranks hold."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    if parameter.requires_grad:
        safe_set_full_fp32_param(parameter, value)
    with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
        parameter.data.copy_(value)
