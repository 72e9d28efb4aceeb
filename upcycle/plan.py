"""What an upcycling will make, known before anything is read or written."""

from dataclasses import dataclass
from typing import Any

import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout import EXPERT_MATRICES, MOE_OF, Checkpoint, dense_name, expected_tensors, expert_of
from spes_mega.layout.counts import count_parameters
from spes_mega.layout.optional_parts import check_holds, optional_part, shared_expert_width
from spes_mega.layout.safetensors_format import byte_count
from spes_mega.recipe import ModelSection, UpcycleSection

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Plan:
    """Models before and after, and the dtype of each tensor of the result.

    Attributes:
        exact_dtypes: no tensor loses precision on its way.
    """

    settings: UpcycleSection
    source: ModelSection
    model: ModelSection
    dtypes: dict[str, torch.dtype]
    exact_dtypes: bool

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


def make_plan(checkpoint: Checkpoint, settings: UpcycleSection) -> Plan:
    """Raises CheckpointError when the source is no dense model that an MoE family can hold."""
    source = checkpoint.model
    if source.is_moe:
        raise CheckpointError(f"{checkpoint.source}: is a Mixture-of-Experts already ({source.family})")
    to = settings.to or MOE_OF[source.family]
    check_holds(source, to)
    model = ModelSection.model_validate(
        source.model_dump(exclude={"ffn_hidden_size"})
        | {
            "family": to,
            "shared_expert_hidden_size": shared_expert_width(source, to),
            "num_experts": settings.num_experts,
            "top_k": settings.top_k,
            "expert_hidden_size": source.ffn_hidden_size,
            "norm_topk_prob": True,
        }
    )
    origins = {name: name if name in checkpoint.names else origin_of(name) for name in expected_tensors(model)}
    wanted = _DTYPES.get(settings.dtype)
    dtypes = {name: wanted or checkpoint.dtype(origin) for name, origin in origins.items()}
    exact = all(dtypes[name] in (checkpoint.dtype(origin), torch.float32) for name, origin in origins.items())
    return Plan(settings, source, model, dtypes, exact)


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
