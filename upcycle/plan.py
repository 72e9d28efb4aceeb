"""What an upcycling will make, known before anything is read or written."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from spes_mega.errors import CheckpointError, RecipeError
from spes_mega.layout import EXPERT_MATRICES, FAMILIES, MOE_OF, dense_name, expected_tensors, expert_of
from spes_mega.layout.counts import count_parameters
from spes_mega.layout.families.optional_parts import check_holds, optional_part, shared_expert_width
from spes_mega.layout.storage.safetensors_format import byte_count
from spes_mega.recipe import ModelSection, UpcycleSection
from spes_mega.validation import explain
from upcycle.layers import moe_layers
from upcycle.methods import METHODS, Method
from upcycle.sources import Sources

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Plan:
    """Models before and after, and the dtype of each tensor of the result.

    Attributes:
        experts_per_source: how many consecutive experts of a layer come from one source.
        rounds: why entries lose precision on their way; None where none does.
    """

    settings: UpcycleSection
    source: ModelSection
    model: ModelSection
    dtypes: dict[str, torch.dtype]
    experts_per_source: int
    rounds: str | None

    @property
    def method(self) -> Method:
        return METHODS[self.settings.method]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.model.num_layers) if self.model.is_moe_layer(layer))

    def difference(self) -> str | None:
        """Why the result does not compute what its source does; None where it does, up to rounding in fp32."""
        return self.method.changes_model(self.settings) or self.rounds

    @property
    def bytes_out(self) -> int:
        return sum(byte_count(self.dtypes[name], shape) for name, shape in expected_tensors(self.model).items())

    def summary(self) -> dict[str, Any]:
        """The figures of the result, for people and for --json."""
        before, after = count_parameters(self.source), count_parameters(self.model)
        return {
            "family": self.model.family,
            "num_experts": self.model.num_experts,
            "top_k": self.model.top_k,
            "method": self.settings.method,
            "params_source": before.total,
            "params_total": after.total,
            "params_active": after.active,
            "bytes": self.bytes_out,
            "dtypes": sorted({str(dtype).removeprefix("torch.") for dtype in self.dtypes.values()}),
        }

    def tensors(self) -> list[dict[str, Any]]:
        """Name, shape and dtype of every tensor of the result, in canonical order."""
        return [
            {"name": name, "shape": list(shape), "dtype": str(self.dtypes[name]).removeprefix("torch.")}
            for name, shape in expected_tensors(self.model).items()
        ]


def make_plan(sources: Sources, settings: UpcycleSection) -> Plan:
    """What `settings` make of `sources`.

    Raises:
        CheckpointError: the source is no dense model, or the MoE family cannot hold what it becomes.
        RecipeError: the settings do not fit the sources' number, layers or widths.
    """
    source = sources.model
    if source.is_moe:
        raise CheckpointError(f"{sources.path}: is a Mixture-of-Experts already ({source.family})")
    experts_per_source = _experts_per_source(sources, settings)
    to = settings.to or MOE_OF[source.family]
    check_holds(source, to)
    model = _result(source, to, settings)
    origins = {name: name if name in sources.names else origin_of(name) for name in expected_tensors(model)}
    wanted = _DTYPES.get(settings.dtype)
    dtypes = {name: wanted or sources.dtype(origin) for name, origin in origins.items()}
    rounds = _rounding(sources, settings, dtypes, origins)
    return Plan(settings, source, model, dtypes, experts_per_source, rounds)


def _experts_per_source(sources: Sources, settings: UpcycleSection) -> int:
    count, experts = len(sources.all), settings.num_experts
    several = METHODS[settings.method].takes_several_sources
    if several and count < 2:
        raise RecipeError(f"method {settings.method} needs at least two source checkpoints, one was given")
    if not several and count > 1:
        raise RecipeError(
            f"method {settings.method} takes one source checkpoint, {count} were given (mix takes several)"
        )
    if experts % count:
        raise RecipeError(f"num_experts {experts} is not a multiple of the number of sources, {count}")
    return METHODS[settings.method].num_experts(settings) // count


def _result(source: ModelSection, to: str, settings: UpcycleSection) -> ModelSection:
    method, layers = METHODS[settings.method], moe_layers(settings.moe_layers, source.num_layers)
    dense_layers = tuple(layer for layer in range(source.num_layers) if layer not in layers)
    if dense_layers and not FAMILIES[to].can_mix_dense:
        able = [name for name, family in FAMILIES.items() if family.can_mix_dense]
        able = [name for name in able if not FAMILIES[name].refuses(source, FAMILIES[source.family])]
        raise CheckpointError(
            f"moe_layers {settings.moe_layers}: {to} has experts in every layer, its config.json cannot say that some "
            f"are dense; use moe_layers all{', or to ' + ' or '.join(able) if able else ''}"
        )
    assert source.ffn_hidden_size is not None, "a dense model has that width"
    fields = source.model_dump(exclude={"ffn_hidden_size"}) | {
        "family": to,
        "shared_expert_hidden_size": shared_expert_width(source, to),
        "num_experts": method.num_experts(settings),
        "top_k": method.top_k(settings),
        "expert_hidden_size": method.expert_width(source.ffn_hidden_size, settings),
        "norm_topk_prob": True,
        "dense_layers": dense_layers,
        "ffn_hidden_size": source.ffn_hidden_size if dense_layers else None,
    }
    try:
        return ModelSection.model_validate(fields)
    except ValidationError as e:
        raise RecipeError("\n".join(explain("the model that these settings make", e, ModelSection))) from e


def _rounding(
    sources: Sources, settings: UpcycleSection, dtypes: dict[str, torch.dtype], origins: dict[str, str]
) -> str | None:
    for name, origin in origins.items():
        short = str(dtypes[name]).removeprefix("torch.")
        if dtypes[name] not in (sources.dtype(origin), torch.float32):
            return f"weights were rounded to {short}"
        scaled = expert_of(name) and not METHODS[settings.method].keeps_bits(settings)
        if scaled and dtypes[name] != torch.float32:
            return f"scaled weights were rounded to {short}"
    return None


def origin_of(name: str) -> str:
    """The dense tensor that a tensor of the result is made from, or (router, unused parts) takes its dtype from."""
    key = expert_of(name)
    if key is not None:
        return dense_name(key.layer, key.matrix)
    if name.endswith((".mlp.gate.weight", ".mlp.shared_expert_gate.weight")):
        return f"{name.partition('.mlp.')[0]}.mlp.{EXPERT_MATRICES[0]}.weight"
    if optional_part(name) is not None:
        return name.replace(".shared_expert.", ".").replace(".bias", ".weight")
    return name
