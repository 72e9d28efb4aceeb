"""How many parameters a model has, and how many of them a token or a node uses."""

from dataclasses import dataclass
from math import prod

from spes_mega.layout.names import expected_tensors, expert_of
from spes_mega.recipe import ModelSection


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model; `expert` is one expert of one layer, `moe_layers` the layers that have experts."""

    total: int
    shared: int
    expert: int
    moe_layers: int
    top_k: int

    @property
    def active(self) -> int:
        """Parameters that one token passes through: everything shared, and top-k experts in each MoE layer."""
        return self.shared + self.top_k * self.moe_layers * self.expert

    def trainable(self, owned_experts: int) -> int:
        """Parameters that a node trains when it owns `owned_experts` experts a layer."""
        return self.shared + owned_experts * self.moe_layers * self.expert


def count_parameters(model: ModelSection) -> ParameterCounts:
    """Exact counts, from the shapes of the tensors of a checkpoint (a tied output head counts once)."""
    shared = experts = 0
    for name, shape in expected_tensors(model).items():
        if expert_of(name) is None:
            shared += prod(shape)
        else:
            experts += prod(shape)
    moe_layers = model.num_moe_layers
    expert = experts // (moe_layers * model.num_experts) if moe_layers else 0
    return ParameterCounts(shared + experts, shared, expert, moe_layers, model.top_k)
