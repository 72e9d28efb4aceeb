"""Adam's state by canonical tensor name, through ZeRO 1-3 in fp32 and bf16.

DeepSpeed keeps the moments in flat fp32 tensors, and one step count for each of these.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from spes_mega.errors import RecipeError
from spes_mega.model.weight_map import Entry
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.zero.deepspeed_patches import FlatGroups
from spes_mega.recipe.deepspeed_config import OFFLOAD


class Moments(NamedTuple):
    """First and second moment of one canonical tensor, fp32, of its shape."""

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


Steps = dict[str, int]
"""How often Adam has updated a canonical tensor."""
KEYS = Moments._fields


class AdamState:
    """Reads and sets the optimizer state of single parameters; all ranks take part."""

    def __init__(self, engine: Any) -> None:
        """Raises RecipeError: the state is where it cannot be reached, offloaded to NVMe."""
        self._groups = FlatGroups(engine)
        if self._groups.on_nvme:
            raise RecipeError(
                f"{OFFLOAD}.device is nvme: the optimizer's moments cannot be read from there, so that they can "
                "neither be kept when experts change hands (spes.adopt_after) nor be saved: set device to cpu, or do "
                "without both, with checkpoint.every 0"
            )

    def steps(self, parameter: nn.Parameter) -> int:
        """How often the parameter has been updated; 0 before its first step."""
        state = self._groups.optimizer.state.get(self._groups.place(parameter).flat)
        return int(state["step"]) if state else 0

    @torch.no_grad()
    def read(self, parameter: nn.Parameter, shape: tuple[int, ...], key: str, device: torch.device) -> torch.Tensor:
        """One moment of a parameter that has been updated, gathered over the ranks: fp32 of its full shape."""
        place = self._groups.place(parameter)
        full = torch.zeros(prod(shape), dtype=torch.float32, device=device)
        full[place.start : place.start + place.count] = self._groups.optimizer.state[place.flat][key].narrow(
            0, place.offset, place.count
        )
        if dist.get_world_size() > 1:
            dist.all_reduce(full)
        return full.view(shape)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, steps: int, values: Mapping[str, torch.Tensor]) -> None:
        """Set moments and step count from full tensors that all ranks hold; all of a group have one step count."""
        place = self._groups.place(parameter)
        state = self._groups.optimizer.state[place.flat]
        if not state:  # torch makes it at the first step
            state["step"] = torch.tensor(float(steps), device=place.flat.device)
            state.update({key: torch.zeros_like(place.flat) for key in KEYS})
        assert int(state["step"]) == steps, "parameters of one age share a group"
        for key, value in values.items():
            state[key].narrow(0, place.offset, place.count).copy_(
                value.flatten()[place.start : place.start + place.count]
            )


def collect_moments(
    engine: Any,
    entries: Collection[Entry],
    ranks: Ranks,
    consume: Callable[[Steps, Iterator[tuple[str, Moments]]], None],
) -> Steps:
    """Call `consume(steps, moments)` on rank 0 with the state of the trained `entries`, gathered one by one.

    What has not been updated yet is left out. Returns the steps, on all ranks.
    """
    adam = AdamState(engine)
    known = [(entry, adam.steps(entry.parameter)) for entry in entries if entry.parameter.requires_grad]
    updated = [entry for entry, count in known if count]
    steps = {name: count for entry, count in known if count for name in entry.names}

    def gather(entry: Entry) -> list[torch.Tensor]:
        return [adam.read(entry.parameter, entry.shape, key, ranks.device) for key in KEYS]

    pending = iter(updated)

    def follow() -> None:
        gather(next(pending))

    def lead(step: Callable[[], None]) -> None:
        consume(steps, stream(step))

    def stream(step: Callable[[], None]) -> Iterator[tuple[str, Moments]]:
        for entry in updated:
            step()
            first, second = (entry.split(full.cpu()) for full in gather(entry))
            for name in entry.names:
                yield name, Moments(first[name], second[name])

    ranks.lead(lead, follow)
    return steps


def assign_moments(
    engine: Any, entries: Collection[Entry], ranks: Ranks, steps: Steps, read: Callable[[str], Moments]
) -> None:
    """Set the state of the trained `entries` named in `steps` (the same on all ranks) from `read` on rank 0.

    The engine's parameter groups must be by these steps (`create_engine`). The others keep the state that they have.

    Raises:
        CheckpointError: a moment has another shape than its tensor; on all ranks.
    """
    adam = AdamState(engine)
    for entry in entries:
        if entry.parameter.requires_grad and entry.names[0] in steps:
            values = {
                key: ranks.tensor(
                    lambda e=entry, k=key: e.join({n: getattr(read(n), k) for n in e.names}),  # type: ignore[misc]
                    entry.shape,
                )
                for key in KEYS
            }
            adam.write(entry.parameter, steps[entry.names[0]], values)
