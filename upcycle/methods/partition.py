"""The dense FFN's own units divided among experts (MoEfication, arXiv 2110.01786; LLaMA-MoE, arXiv 2406.16554)."""

import torch

from spes_mega.errors import RecipeError
from spes_mega.layout import ExpertKey, dense_name, generator
from spes_mega.recipe import UpcycleSection
from upcycle.methods.method import Method, Read, Shared
from upcycle.methods.scaling import is_power_of_two, scaled
from upcycle.router.kmeans import spherical_kmeans


class Partition(Method):
    """The F units are divided into E = num_experts experts of width F/E: the model does not grow.

    Units are dealt at random (LLaMA-MoE, Zhu et al., arXiv 2406.16554), or clustered by the directions of their rows
    of gate_proj, so that units which react to the same inputs lie together (MoEfication, Zhang et al., arXiv
    2110.01786).

    With equal router logits each of the k = top_k chosen experts gets the weight 1/k. Every expert's output is scaled
    by E, so that the layer gives (E/k) * the sum of the chosen parts: LLaMA-MoE's factor, which keeps the expected
    size of the output. For k = E it is the sum of all parts, which is the dense FFN: exact. The constant is E for any
    k, so top_k may be lowered later without touching weights.
    """

    def expert_width(self, ffn_width: int, settings: UpcycleSection) -> int:
        if ffn_width % settings.num_experts:
            raise RecipeError(
                f"num_experts {settings.num_experts}: the FFN of width {ffn_width} cannot be divided into as many "
                f"equal parts; choose a divisor of {ffn_width}"
            )
        return ffn_width // settings.num_experts

    def parts(self, settings: UpcycleSection) -> int:
        return settings.num_experts

    def changes_model(self, settings: UpcycleSection) -> str | None:
        if settings.top_k < settings.num_experts:
            return f"a token passes through {settings.top_k} of the {settings.num_experts} parts of the FFN"
        if settings.router_init != "zeros":
            return f"router_init {settings.router_init} weighs the parts unequally (zeros would be exact)"
        return None

    def keeps_bits(self, settings: UpcycleSection) -> bool:
        return is_power_of_two(settings.num_experts)

    def prepare(self, layer: int, read: Read, settings: UpcycleSection) -> Shared:
        """`units`: int64 [E, F/E], the units of each expert in rising order."""
        gate = read(dense_name(layer, "gate_proj"))
        count, width = settings.num_experts, gate.shape[0] // settings.num_experts
        rng = generator(settings.seed, f"partition/{layer}")
        if settings.partition_by == "kmeans":
            expert_of_unit = spherical_kmeans(gate, count, rng, balanced=True).assignment
            units = expert_of_unit.sort(stable=True).indices.view(count, width)
        else:
            units = torch.randperm(gate.shape[0], generator=rng).view(count, width)
        return {"units": units.sort(dim=1).values}

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        axis = 1 if key.matrix == "down_proj" else 0
        part = dense.index_select(axis, shared["units"][key.expert])
        return scaled(part, key.matrix, settings.num_experts)
