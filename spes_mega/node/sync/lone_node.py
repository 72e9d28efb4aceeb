"""Training without a hub: from a checkpoint directory or the seed, to a checkpoint directory."""

import math
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from spes_mega.errors import CheckpointError, NoSpaceError, SpesError
from spes_mega.layout import CheckpointWriter, differences, initial_tensor, open_checkpoint
from spes_mega.layout.names import expected_tensors
from spes_mega.layout.storage.rows import is_finite
from spes_mega.node.checkpoint.state import WEIGHTS, Checkpoint
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.sync.weight_source import Traffic
from spes_mega.node.zero.weights import NodeWeights, Shapes, Tensors
from spes_mega.recipe import Recipe


class LoneNode:
    """A `WeightSource` for one node alone; its rounds are the points where a hub would have synchronized."""

    def __init__(self, recipe: Recipe, ranks: Ranks, out: Path, init: Path | None) -> None:
        self._recipe, self._ranks, self._out, self._init = recipe, ranks, out, init

    resumes_rounds = True
    keeps_result = True

    @property
    def result(self) -> str:
        return f"the model is {self._out / 'final'}"

    @property
    def owned(self) -> tuple[int, ...]:
        return tuple(range(self._recipe.model.num_experts))

    def start(self, weights: NodeWeights, checkpoint: Checkpoint | None = None) -> int:
        """Raises CheckpointError: OUT holds a result or has no room, or `init` or a checkpoint does not fit."""
        self._ranks.first(self._check_out)
        if (init := self._init) is not None:
            self._ranks.first(lambda: check_checkpoint(init, self._recipe))
        if checkpoint is not None:
            self._ranks.first(lambda: _check_complete(checkpoint, weights.shapes))
            return checkpoint.position.round
        model, seed = self._recipe.model, self._recipe.train.seed
        if self._init is None:
            weights.assign(weights.shapes, lambda name: initial_tensor(model, name, weights.shapes[name], seed))
            return 0
        with ExitStack() as stack:
            weights.assign(weights.shapes, self._open(self._init, stack))
        return 0

    def _open(self, init: Path, stack: ExitStack) -> Callable[[str], torch.Tensor]:
        """What reads the tensors of `init` on rank 0; machines of other ranks need not have it."""
        read: Callable[[str], torch.Tensor] = _read_elsewhere

        def open_here() -> None:
            nonlocal read
            read = stack.enter_context(open_checkpoint(init)).read

        self._ranks.first(open_here)
        return read

    def _check_out(self) -> None:
        if os.path.lexists(final := self._out / "final"):
            raise CheckpointError(f"{final}: an earlier run's result is there: choose another --out, or remove it")
        needed = sum(4 * math.prod(shape) for shape in expected_tensors(self._recipe.model).values())
        existing = next(path for path in final.absolute().parents if path.exists())
        if (free := shutil.disk_usage(existing).free) < needed:
            raise NoSpaceError(
                f"{final}: the model that training ends with needs {needed:,} bytes of disk space, {free:,} are free: "
                "make room, or choose another --out"
            )

    def save_residual(self, path: Path) -> None:
        """Nothing is pushed, and nothing lost."""

    def exchange(self, weights: NodeWeights, round_: int, tokens: int) -> int:
        return round_ + 1

    def finish(self, weights: NodeWeights) -> None:
        """Write OUT/final in fp32: the exact masters, as a hub's snapshot has them."""

        def write(shapes: Shapes, tensors: Tensors) -> None:
            config = None
            if self._init is not None:
                with open_checkpoint(self._init) as checkpoint:
                    config = checkpoint.config
            with CheckpointWriter(
                self._out / "final",
                self._recipe.model,
                torch.float32,
                base_config=config,
                copy_from=self._init,
                cached=False,
            ) as writer:
                for name, tensor in tensors:
                    if not is_finite(tensor):
                        raise SpesError(
                            f"{name} has NaN or infinite values after the last step: training has diverged, and "
                            "nothing was written. Lower train.lr, or lengthen train.warmup_steps"
                        )
                    writer.write(name, tensor)

        weights.collect(weights.shapes, write)

    def leave(self) -> None:
        pass

    def take_traffic(self) -> Traffic:
        return Traffic()


def _check_complete(checkpoint: Checkpoint, shapes: Shapes) -> None:
    """A weight that the checkpoint lacks would stay what the memory of a new model happened to hold."""
    if missing := sorted(set(shapes).difference(checkpoint.names)):
        raise CheckpointError(
            f"{checkpoint.path / WEIGHTS}: has no {missing[0]}, which a lone node needs: resume from another "
            "checkpoint, or begin anew with --resume never"
        )


def _read_elsewhere(name: str) -> torch.Tensor:
    raise AssertionError(f"only rank 0 reads {name}")


def check_checkpoint(path: Path, recipe: Recipe) -> None:
    """Raise CheckpointError unless the checkpoint at `path` holds the recipe's model."""
    with open_checkpoint(path) as checkpoint:
        if lines := differences(recipe.model, checkpoint.model):
            raise CheckpointError(f"{path}: not the recipe's model: {'; '.join(lines)}")
