"""The one map between Megatron-Core's parameters and the canonical tensor names.

`RULES` is the whole map, for the local and the Transformer Engine modules alike. Experts have their global numbers
in canonical names, and a group and a number within it in Megatron's; every other rule is one name to a few.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn

from spes_mega.errors import CheckpointError
from spes_mega.layout.names import expected_tensors
from spes_mega.model import fused
from spes_mega.model.partitioned_experts import PartitionedExperts
from spes_mega.recipe import ModelSection


class Rule(NamedTuple):
    """A parameter (alternative spellings of its name; `{layer}`, `{group}`, `{index}` are numbers), its tensors."""

    parameters: tuple[str, ...]
    names: tuple[str, ...]
    fusion: fused.Fusion = fused.copy


_MEGATRON = "decoder.layers.{layer}."
_CANONICAL = "model.layers.{layer}."
_GROUP = _MEGATRON + "mlp.experts.groups.{group}."
_EXPERT = _CANONICAL + "mlp.experts.{expert}."


def _layer_rule(parameters: tuple[str, ...], names: tuple[str, ...], fusion: fused.Fusion = fused.copy) -> Rule:
    return Rule(tuple(_MEGATRON + p for p in parameters), tuple(_CANONICAL + n for n in names), fusion)


def _qkv_rule(kind: str) -> Rule:
    names = tuple(f"self_attn.{matrix}_proj.{kind}" for matrix in "qkv")
    return _layer_rule((f"self_attention.linear_qkv.{kind}",), names, fused.qkv)


def _expert_rule(linear: str, matrices: tuple[str, ...], fusion: fused.Fusion = fused.copy) -> Rule:
    spellings = (
        _GROUP + "local_experts.{index}." + linear + ".weight",  # SequentialMLP
        _GROUP + linear + ".weight{index}",  # TEGroupedMLP
    )
    return Rule(spellings, tuple(_EXPERT + matrix + ".weight" for matrix in matrices), fusion)


RULES = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",)),
    _layer_rule(("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), ("input_layernorm.weight",)),
    _qkv_rule("weight"),
    _qkv_rule("bias"),
    _layer_rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    _layer_rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    _layer_rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",)),
    _layer_rule(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), ("post_attention_layernorm.weight",)),
    _layer_rule(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), fused.gated),
    _layer_rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",)),
    _layer_rule(("mlp.router.weight",), ("mlp.gate.weight",)),
    _expert_rule("linear_fc1", ("gate_proj", "up_proj"), fused.gated),
    _expert_rule("linear_fc2", ("down_proj",)),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), ("lm_head.weight",)),
)


def _pattern(parameter: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(parameter)))


_PATTERNS = tuple((_pattern(parameter), rule) for rule in RULES for parameter in rule.parameters)


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the canonical tensors that it holds."""

    parameter_name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    fusion: fused.Fusion = field(repr=False)
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

        Raises:
            CheckpointError: a tensor is missing or has another shape; names it.
        """
        if missing := [name for name in self.names if name not in tensors]:
            raise CheckpointError(f"{missing[0]}: missing, needed for the parameter {self.parameter_name}")
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

    Works on the bare model and under every ZeRO stage: names and full shapes come from the model section.

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
        for pattern, rule in _PATTERNS:
            if match := pattern.fullmatch(parameter_name):
                names = _canonical_names(gpt, rule, {key: int(value) for key, value in match.groupdict().items()})
                return self._checked_entry(parameter_name, parameter, names, rule.fusion)
        raise CheckpointError(f"{parameter_name}: no rule says which tensors of a checkpoint this parameter holds")

    def _checked_entry(
        self, parameter_name: str, parameter: nn.Parameter, names: tuple[str, ...], fusion: fused.Fusion
    ) -> Entry:
        if unknown := [name for name in names if name not in self._shapes]:
            raise CheckpointError(f"{unknown[0]}: not a tensor of the recipe's model, but {parameter_name} holds it")
        entry = Entry(parameter_name, parameter, names, tuple(self._shapes[n] for n in names), fusion, self.model)
        actual = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 keeps the full shape there
        if actual != entry.shape:
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
