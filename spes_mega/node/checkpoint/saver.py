"""Writes a node's checkpoints: gathered into files between two steps, made durable while training goes on."""

import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from spes_mega.errors import SpesError
from spes_mega.layout.names import expected_tensors
from spes_mega.layout.storage.checksums import checksum_of
from spes_mega.layout.storage.safetensors_format import Specs
from spes_mega.node.checkpoint.files import Shelf, TensorFileWriter, finish
from spes_mega.node.checkpoint.state import MOMENTS, RESIDUAL, RNG, WEIGHTS, CheckpointState, Identity, random_state
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.sync.weight_source import Position, WeightSource
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.node.zero.moments import KEYS, Moments, Steps, collect_moments
from spes_mega.node.zero.weights import Shapes, Tensors
from spes_mega.recipe import Recipe


class Saver:
    """Saves what a node needs to go on after its process is gone; all ranks take part, and rank 0 writes."""

    def __init__(
        self, recipe: Recipe, identity: Identity | None, samples_per_step: int, ranks: Ranks, folder: Path
    ) -> None:
        """`identity` is None on all ranks but the first."""
        self._samples_per_step = samples_per_step
        self._recipe, self._identity, self._ranks = recipe, identity, ranks
        self._shapes = expected_tensors(recipe.model)
        self._shelf = Shelf(folder)
        self._behind: threading.Thread | None = None
        self._failure: SpesError | None = None
        self._written = Path()
        self._checksums: dict[str, str] = {}

    def save(self, model: LocalModel, at: Position, source: WeightSource, *, keep_all: bool = False) -> None:
        """Write the checkpoint of a step that is done, and delete the oldest, unless `keep_all` is set.

        Raises CheckpointError, on all ranks: the disk does not take this one, or did not take the one before.
        """
        everyone = self._ranks.gather(random_state())
        self._ranks.first(lambda: self._begin(at, everyone))
        steps = collect_moments(model.engine, model.map.entries, self._ranks, self._write_moments)
        model.collect(model.trained, self._write_weights)
        keep_last = None if keep_all else self._recipe.checkpoint.keep_last
        self._ranks.first(lambda: self._finish(model, at, source, steps, keep_last))

    def _begin(self, at: Position, random_states: list[torch.Tensor]) -> None:
        self._wait()
        self._written, self._checksums = self._shelf.begin(at.step), {}
        states = {f"rank-{rank}": state for rank, state in enumerate(random_states)}
        specs = {name: (state.dtype, tuple(state.shape)) for name, state in states.items()}
        self._write(RNG, specs, iter(states.items()))

    def _write_moments(self, steps: Steps, moments: Iterator[tuple[str, Moments]]) -> None:
        specs = {f"{name} {key}": (torch.float32, self._shapes[name]) for name in steps for key in KEYS}
        named = ((f"{name} {key}", getattr(pair, key)) for name, pair in moments for key in KEYS)
        self._write(MOMENTS, specs, named)

    def _write_weights(self, shapes: Shapes, tensors: Tensors) -> None:
        self._write(WEIGHTS, {name: (torch.float32, shape) for name, shape in shapes.items()}, tensors)

    def _write(self, file: str, specs: Specs, tensors: Tensors) -> None:
        with TensorFileWriter(self._written / file, specs) as writer:
            for name, tensor in tensors:
                writer.add(name, tensor)
            self._checksums[file] = writer.checksum()

    def _finish(
        self, model: LocalModel, at: Position, source: WeightSource, steps: Steps, keep_last: int | None
    ) -> None:
        residual_round = source.save_residual(self._written / RESIDUAL)
        if residual_round is not None:
            self._checksums[RESIDUAL] = checksum_of(self._written / RESIDUAL)
        assert self._identity is not None, "rank 0 has it"
        train = self._recipe.train
        state = CheckpointState(
            identity=self._identity,
            position=at,
            owned=model.owned,
            steps=steps,
            residual_round=residual_round,
            ranks=self._ranks.size,
            zero_stage=train.zero_stage,
            dtype=train.dtype,
            samples_per_step=self._samples_per_step,
        )
        finish(self._written, state.model_dump(mode="json"), self._checksums)
        self._behind = threading.Thread(target=self._commit, args=(self._written, keep_last))
        self._behind.start()

    def _commit(self, written: Path, keep_last: int | None) -> None:
        try:
            self._shelf.commit(written, keep_last)
        except SpesError as e:
            self._failure = e

    def _wait(self) -> None:
        """Until the last checkpoint is durable; raises if it could not be made so."""
        if self._behind is not None:
            self._behind.join()
            self._behind = None
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def close(self) -> None:
        """Wait for the last checkpoint. Raises CheckpointError, on all ranks: it could not be written."""
        self._ranks.first(self._wait)

    def discard(self) -> None:
        """Delete a checkpoint that could not be written whole."""
        self._ranks.first(self._shelf.sweep)
