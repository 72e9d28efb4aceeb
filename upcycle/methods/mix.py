"""Branch-Train-MiX (Sukhbaatar et al., 2024, arXiv 2403.07816)."""

import torch

from spes_mega.layout import ExpertKey
from spes_mega.recipe import UpcycleSection
from upcycle.methods.method import Method, Shared


class Mix(Method):
    """Each expert is the FFN of one of several fine-tuned checkpoints; all else is their average (arXiv 2403.07816).

    With S sources, the first num_experts / S experts come from the first source, and so on. Which source that is, the
    pipeline knows: `dense` is that source's matrix. Not exact in any sense: no source computes what the mix does,
    but every expert computes what its source's FFN does.
    """

    takes_several_sources = True

    def changes_model(self, settings: UpcycleSection) -> str | None:
        return "experts come from different checkpoints, and all else is their average"

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        return dense
