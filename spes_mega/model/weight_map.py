"""A model's parameters with the canonical tensors that they hold, by the rules of `layout.megatron_names`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn

from spes_mega.errors import CheckpointError
from spes_mega.layout.megatron.fusions import Fusion, copy
from spes_mega.layout.megatron.names import Rule, rule_of
from spes_mega.layout.names import expected_tensors
from spes_mega.model.partitioned_experts import PartitionedExperts
from spes_mega.recipe import ModelSection


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the canonical tensors that it holds."""

    parameter_name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    fusion: Fusion = field(repr=False)
    model: ModelSection = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape of the parameter, also where ZeRO-3 has partitioned it."""
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    def parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views into a tensor of the parameter's shape, by canonical name; may have more axes than `shapes` say."""
        self._check(self.parameter_name, tensor, self.shape)
        return dict(zip(self.names, self.fusion(tensor, self.model), strict=True))

    def fill(self, tensor: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Copy canonical tensor `name` into its place in a tensor of the parameter's shape, converting the dtype."""
        self._check(name, value, self.shapes[self.names.index(name)])
        part = self.parts(tensor)[name]
        part.copy_(value.reshape(part.shape))

    def join(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The parameter's value from its canonical tensors, in their dtype and on their device.

        The value of a parameter that is one tensor is that tensor, not a copy.

        Raises:
            CheckpointError: a tensor is missing or has another shape; names it.
        """
        if missing := [name for name in self.names if name not in tensors]:
            raise CheckpointError(f"{missing[0]}: missing, needed for the parameter {self.parameter_name}")
        if self.fusion is copy:
            (name,) = self.names
            self._check(name, tensors[name], self.shape)
            return tensors[name]
        out = tensors[self.names[0]].new_empty(self.shape)
        for name in self.names:
            self.fill(out, name, tensors[name])
        return out

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The canonical tensors out of a tensor of the parameter's shape; they may share its memory."""
        parts = self.parts(tensor).items()
        return {name: part.reshape(shape) for (name, part), shape in zip(parts, self.shapes, strict=True)}

    @staticmethod
    def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: has shape {tuple(tensor.shape)}, the recipe's model needs {shape}")


class WeightMap:
    """All parameters of a model with their canonical tensors, in canonical order; exactly once each.

    Made of the bare model, and good under every ZeRO stage: names and full shapes come from the model section.

    Raises:
        CheckpointError: a parameter that no rule covers, a tensor that no parameter holds, or one held twice.
    """

    def __init__(self, model: ModelSection, gpt: GPTModel) -> None:
        self.model = model
        self._shapes = expected_tensors(model)
        order = {name: position for position, name in enumerate(self._shapes)}
        entries = [self._entry(gpt, name, parameter) for name, parameter in gpt.named_parameters()]
        self.entries = tuple(sorted(entries, key=lambda entry: order[entry.names[0]]))
        self._check_coverage()

    def _entry(self, gpt: GPTModel, parameter_name: str, parameter: nn.Parameter) -> Entry:
        found = rule_of(parameter_name)
        if found is None:
            raise CheckpointError(f"{parameter_name}: no rule says which tensors of a checkpoint this parameter holds")
        rule, numbers = found
        return self._checked_entry(parameter_name, parameter, _canonical_names(gpt, rule, numbers), rule.fusion)

    def _checked_entry(
        self, parameter_name: str, parameter: nn.Parameter, names: tuple[str, ...], fusion: Fusion
    ) -> Entry:
        if unknown := [name for name in names if name not in self._shapes]:
            raise CheckpointError(f"{unknown[0]}: not a tensor of the recipe's model, but {parameter_name} holds it")
        entry = Entry(parameter_name, parameter, names, tuple(self._shapes[n] for n in names), fusion, self.model)
        if (actual := tuple(parameter.shape)) != entry.shape:
            raise CheckpointError(f"{parameter_name}: has shape {actual}, the recipe's model needs {entry.shape}")
        return entry

    def _check_coverage(self) -> None:
        held: set[str] = set()
        for entry in self.entries:
            if twice := held.intersection(entry.names):
                raise CheckpointError(f"{min(twice)}: held by {entry.parameter_name} and by another parameter")
            held.update(entry.names)
        if missing := [name for name in self._shapes if name not in held]:
            raise CheckpointError(f"{missing[0]}: no parameter of the model holds this tensor")


def _canonical_names(gpt: GPTModel, rule: Rule, numbers: dict[str, int]) -> tuple[str, ...]:
    if "group" in numbers:
        experts = gpt.decoder.layers[numbers["layer"]].mlp.experts
        assert isinstance(experts, PartitionedExperts)
        numbers["expert"] = experts.runs[numbers["group"]].start + numbers["index"]
    return tuple(name.format(**numbers) for name in rule.names)


@torch.no_grad()
def load_weights(gpt: GPTModel, model: ModelSection, read: Callable[[str], torch.Tensor]) -> None:
    """Fill every parameter of a bare model, reading each canonical tensor once and in canonical order.

    Values are converted to the parameter's dtype and copied into place one by one: no second copy of the model, nor
    of a fused parameter, is made. When this returns, every parameter has been filled.

    Args:
        read: gives the tensor of a canonical name, e.g. `Checkpoint.read`.

    Raises:
        CheckpointError: model and section do not agree, or a tensor has another shape; names it.
    """
    for entry in WeightMap(model, gpt).entries:
        for name in entry.names:
            entry.fill(entry.parameter.data, name, read(name))


def export_weights(gpt: GPTModel, model: ModelSection) -> Iterator[tuple[str, torch.Tensor]]:
    """Every canonical tensor of a bare model, in the order of `WeightMap.entries`, bit for bit.

    Tensors may share memory with the parameters: use or copy each before the model changes.
    """
    for entry in WeightMap(model, gpt).entries:
        yield from entry.split(entry.parameter.detach()).items()
