"""A node's model with the engine that trains it, and how it comes to train other experts."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import nn

from spes_mega.layout.names import expert_of
from spes_mega.model import build
from spes_mega.model.weight_map import WeightMap
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.spool import TensorSpool
from spes_mega.node.zero.deepspeed_patches import release
from spes_mega.node.zero.engine import create_engine
from spes_mega.node.zero.moments import Moments, Steps, assign_moments, collect_moments
from spes_mega.node.zero.weights import NodeWeights
from spes_mega.recipe import Recipe


class LocalModel(NodeWeights):
    """The recipe's model under DeepSpeed, of which some experts are trained.

    Its weights have no values until they are assigned; nor have they after a change of owner.
    """

    def __init__(
        self,
        recipe: Recipe,
        owned: tuple[int, ...],
        ranks: Ranks,
        stop: StopRequest,
        spool_dir: Path,
        steps: Steps | None = None,
    ) -> None:
        """`spool_dir` needs room for the optimizer's moments while experts change hands.

        `steps` are those of moments that will be assigned (`assign_moments`).
        Raises RecipeError, on all ranks.
        """
        self.recipe, self.owned = recipe, owned
        self._spool_dir = spool_dir
        gpt = ranks.agree(lambda: build(recipe, owned, ranks.device))
        super().__init__(gpt, recipe.model, ranks, stop)
        age = self._ages(steps or {})
        self.engine: Any = ranks.agree(lambda: create_engine(recipe, gpt, age))

    @property
    def trained(self) -> list[str]:
        """Canonical names of what is trained here."""
        return [name for entry in self.map.entries if entry.parameter.requires_grad for name in entry.names]

    @property
    def gpt(self) -> GPTModel:
        return self.engine.module  # type: ignore[no-any-return]

    def own(self, owned: tuple[int, ...]) -> bool:
        """Train just these experts from now on; returns whether that is a change.

        If it is, the model is built anew, and all weights have to be assigned. What was trained and still is keeps its
        Adam moments and step count, which wait on the disk meanwhile: there are never two optimizers at once.
        """
        if owned == self.owned:
            return False
        with ExitStack() as stack:
            spool = stack.enter_context(TensorSpool(self._spool_dir)) if self._ranks.leads else None
            steps = self._set_aside(owned, spool)
            self._release()
            self._rebuild(owned, steps)
            assign_moments(self.engine, self.map.entries, self._ranks, steps, lambda name: _moments(spool, name))
        return True

    def _set_aside(self, owned: tuple[int, ...], spool: TensorSpool | None) -> Steps:
        """Spool the moments of what stays trained."""
        kept = [e for e in self.map.entries if (key := expert_of(e.names[0])) is None or key.expert in owned]

        def store(steps: Steps, moments: Iterator[tuple[str, Moments]]) -> None:
            assert spool is not None, "rank 0 has a spool file"
            for name, values in moments:
                for key, value in values._asdict().items():
                    spool.put(f"{name} {key}", value)

        return collect_moments(self.engine, kept, self._ranks, store)

    def _release(self) -> None:
        """Free the memory of model and optimizer."""
        release(self.engine, self.gpt.parameters())
        del self.engine, self.map
        gc.collect()

    def _rebuild(self, owned: tuple[int, ...], steps: Steps) -> None:
        gpt = self._ranks.agree(lambda: build(self.recipe, owned, self._ranks.device))
        self.map = WeightMap(self.recipe.model, gpt)
        age = self._ages(steps)
        self.engine = self._ranks.agree(lambda: create_engine(self.recipe, gpt, age))
        self.owned = owned

    def _ages(self, steps: Steps) -> Callable[[nn.Parameter], int]:
        ages = {id(entry.parameter): steps.get(entry.names[0], 0) for entry in self.map.entries}
        return lambda parameter: ages[id(parameter)]


def _moments(spool: TensorSpool | None, name: str) -> Moments:
    assert spool is not None, "only rank 0 reads"
    return Moments(*(spool.get(f"{name} {key}") for key in Moments._fields))
