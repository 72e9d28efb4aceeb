"""Fine-grained experts in virtual groups (He et al., 2024, arXiv 2410.07524)."""

import torch

from spes_mega.errors import RecipeError
from spes_mega.layout import ExpertKey
from spes_mega.recipe import UpcycleSection
from upcycle.methods.method import Method, Shared
from upcycle.methods.scaling import is_power_of_two, scaled


class Split(Method):
    """num_experts copies of the dense FFN (virtual groups), each cut into G = granularity experts (arXiv 2410.07524).

    Expert v*G + g holds units g*F/G .. (g+1)*F/G of group v, so that the G experts of a group add up to the dense FFN.
    A token goes to top_k * G of the num_experts * G experts. The router's rows of a group start equal, so their
    logits are equal, and the top_k * G largest logits are those of the top_k best groups, whole: exact.
    Each group's weight p_v (these sum to 1) is shared by its G experts, p_v / G each, so the layer gives 1/G of the
    dense output; the factor G that makes up for it is put on up_proj and down_proj (see `scaling`).

    This needs groups whose logits differ: with router_init zeros all experts tie, and torch.topk breaks ties in no
    promised order, so that parts of different groups would be taken (the recipe refuses that combination).
    """

    def num_experts(self, settings: UpcycleSection) -> int:
        return settings.num_experts * settings.granularity

    def top_k(self, settings: UpcycleSection) -> int:
        return settings.top_k * settings.granularity

    def expert_width(self, ffn_width: int, settings: UpcycleSection) -> int:
        if ffn_width % settings.granularity:
            raise RecipeError(
                f"granularity {settings.granularity}: the FFN of width {ffn_width} cannot be cut into as many equal "
                f"experts; choose a divisor of {ffn_width}"
            )
        return ffn_width // settings.granularity

    def parts(self, settings: UpcycleSection) -> int:
        return settings.granularity

    def router_repeats(self, settings: UpcycleSection) -> int:
        return settings.granularity

    def keeps_bits(self, settings: UpcycleSection) -> bool:
        return is_power_of_two(settings.granularity)

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        axis = 1 if key.matrix == "down_proj" else 0
        width = dense.shape[axis] // settings.granularity
        part = dense.narrow(axis, key.expert % settings.granularity * width, width)
        return scaled(part, key.matrix, settings.granularity)
