"""What a method of upcycling is: how many experts it makes of a dense feed-forward part (FFN), and what is in each.

The result's layer is y = sum over the chosen experts of w_e * FFN_e(x), with weights w that sum to 1 (the top-k
router weights are renormalized). F is the width of the dense FFN, H the hidden size; gate_proj and up_proj are
[F, H], down_proj is [H, F], and unit j of the FFN is row j of the first two with column j of the third.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from spes_mega.layout import ExpertKey
from spes_mega.recipe import UpcycleSection

Read = Callable[[str], torch.Tensor]
Shared = Mapping[str, torch.Tensor]


class Method:
    """The base of all methods: num_experts experts of the dense FFN's own width.

    A method is stateless. What it makes depends on the dense matrix, the expert's key and the settings alone;
    random numbers are keyed by (seed, canonical name), or by (seed, layer, expert) where the matrices of an expert
    must agree. So the result depends neither on order, nor on threads, nor on how files are cut.
    """

    takes_several_sources = False

    def num_experts(self, settings: UpcycleSection) -> int:
        """Experts of one layer of the result."""
        return settings.num_experts

    def top_k(self, settings: UpcycleSection) -> int:
        """Experts that a token of the result is sent to."""
        return settings.top_k

    def expert_width(self, ffn_width: int, settings: UpcycleSection) -> int:
        """FFN width of one expert. Raises RecipeError where the dense width cannot be cut so."""
        return ffn_width

    def parts(self, settings: UpcycleSection) -> int:
        """How many consecutive experts make up one dense FFN: its output is the mean of theirs."""
        return 1

    def router_repeats(self, settings: UpcycleSection) -> int:
        """How many consecutive rows of the router start equal."""
        return 1

    def changes_experts(self, settings: UpcycleSection) -> str | None:
        """Why the mean of `parts` experts is not the FFN that they were made from; None where it is."""
        return None

    def changes_model(self, settings: UpcycleSection) -> str | None:
        """Why the result does not compute what its source does; None where it does, up to rounding."""
        return self.changes_experts(settings)

    def keeps_bits(self, settings: UpcycleSection) -> bool:
        """Whether every entry can be held in the source's dtype without rounding."""
        return True

    def prepare(self, layer: int, read: Read, settings: UpcycleSection) -> Shared:
        """What the experts of one layer share and is expensive; made once a layer and given to `make`."""
        return {}

    def make(self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared) -> torch.Tensor:
        """One matrix of one expert, from the dense matrix of the same kind. Never changes `dense`."""
        raise NotImplementedError

    def make_rows(
        self, dense: torch.Tensor, key: ExpertKey, settings: UpcycleSection, shared: Shared
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """What `make` gives, as (first row, some rows), each valid until the next. Runs in several threads."""
        yield 0, self.make(dense, key, settings, shared)
