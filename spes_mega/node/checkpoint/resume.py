"""How a node that is started again takes up what its checkpoint has."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from spes_mega.data.samples import NodeData
from spes_mega.errors import SpesError
from spes_mega.layout.names import expert_of
from spes_mega.node.checkpoint.files import Shelf, step_of
from spes_mega.node.checkpoint.saver import Saver
from spes_mega.node.checkpoint.state import Checkpoint, CheckpointState, Identity, find_checkpoint, set_random_state
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.options import NodeOptions
from spes_mega.node.stop import Stopped
from spes_mega.node.sync.weight_source import Position, WeightSource
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.node.zero.moments import AdamState, Steps, assign_moments
from spes_mega.outer.ownership import ranges
from spes_mega.recipe import Recipe

ATTEMPT = "SPES_MEGA_ATTEMPT"


class Resume:
    """The checkpoint that a node goes on from, if any, and the checkpoints that it writes; on all ranks."""

    def __init__(
        self, recipe: Recipe, options: NodeOptions, data: NodeData, ranks: Ranks, say: Callable[[str], None]
    ) -> None:
        """Raises CheckpointError, on all ranks: see `find_checkpoint` and `Checkpoint.check`."""
        self._recipe, self._ranks, self._say, self._data = recipe, ranks, say, data
        self._folder = options.out / "checkpoints"
        self._shelf = Shelf(self._folder)
        self._identity: Identity | None = None
        self._checkpoint: Checkpoint | None = None

        def find() -> Any:
            self._identity = Identity.of(recipe, options.node, data)
            resume = "auto" if self._attempt_has_begun() else options.resume
            self._checkpoint = find_checkpoint(resume, self._folder, say)
            if (found := self._checkpoint) is None:
                return None
            found.check(self._identity, recipe.model.num_experts, options.change)
            if found.state.identity.data.contents is None:
                say(f"{found.path} is of an earlier version: whether the dataset has the same contents is not known")
            return str(found.path), found.state.model_dump(mode="json")

        found = ranks.first(find)
        if found is not None and self._checkpoint is None:
            self._checkpoint = Checkpoint(Path(found[0]), CheckpointState.model_validate(found[1]))

    def steps(self, owned: tuple[int, ...]) -> Steps:
        """How often Adam has updated what a model with these experts trains, for `LocalModel`."""
        if self._checkpoint is None:
            return {}
        steps = self._checkpoint.state.steps
        return {name: count for name, count in steps.items() if (k := expert_of(name)) is None or k.expert in owned}

    def take_up(self, model: LocalModel, source: WeightSource) -> Position:
        """Fill the model, made with `steps`, and its optimizer; returns where training begins.

        Raises CheckpointError, and whatever the source raises.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            round_ = source.start(model)
            return self._position(round_)
        assign_moments(model.engine, model.map.entries, self._ranks, self.steps(model.owned), checkpoint.moments)
        self._say_change(model.owned)
        round_ = source.start(model, checkpoint)
        self._restore_random_state()
        at = checkpoint.position
        if round_ != at.round or not source.resumes_rounds:
            self._say(
                f"goes on at round {round_} with the hub's weights, and the optimizer's state after step {at.step} "
                f"({checkpoint.path})"
            )
            return self._position(round_)
        trained = set(model.trained)
        model.assign(self._ranks.first(lambda: [n for n in checkpoint.names if n in trained]), checkpoint.read)
        self._say(f"goes on after step {at.step}, in round {at.round} ({checkpoint.path})")
        return replace(at, samples=self._samples(at.step))

    def _position(self, round_: int) -> Position:
        step = self._recipe.step_at(round_)
        return Position(round_, step, samples=self._samples(step))

    def _samples(self, step: int) -> int:
        """How many samples the node has trained on by `step`.

        Steps since the checkpoint were taken, and pushed, by the process that wrote it: with its batch. So were those
        before it that the hub lacks, whose samples come again.
        """
        here = self._data.samples_per_step
        if self._checkpoint is None:
            return step * here
        state = self._checkpoint.state
        saved, batch = state.position.samples, state.samples_per_step or here
        if saved is None:
            self._say(f"{self._checkpoint.path} does not say how many samples it had seen: taken to be {here} a step")
            return step * here
        return max(0, saved + (step - state.position.step) * batch)

    def _say_change(self, owned: tuple[int, ...]) -> None:
        assert self._checkpoint is not None
        before = set(self._checkpoint.state.owned)
        if new := sorted(set(owned) - before):
            kept = ranges(sorted(before.intersection(owned))) or "none"
            self._say(f"owns other experts than in the checkpoint: moments of {kept} kept, of {ranges(new)} begin at 0")

    def _restore_random_state(self) -> None:
        """Each rank's own, of which only rank 0's machine has the file."""
        checkpoint = self._checkpoint
        assert checkpoint is not None

        def read() -> list[list[int] | None]:
            states = [checkpoint.random_state(rank) for rank in range(self._ranks.size)]
            return [None if state is None else state.tolist() for state in states]

        state = self._ranks.first(read)[self._ranks.rank]

        def restore() -> None:
            if state is not None:
                set_random_state(torch.tensor(state, dtype=torch.uint8))

        self._ranks.agree(restore)

    @contextmanager
    def saver(self, model: LocalModel, begin: Position, source: WeightSource) -> Iterator[Saver | None]:
        """What writes the checkpoints, if the recipe asks for any. At the end, waits until the last is written.

        Until the run has a checkpoint of its own to go on from, nothing is moved or deleted.

        Raises:
            RecipeError: the optimizer's state cannot be saved.
            CheckpointError: the disk does not take a checkpoint, or the others cannot be moved.
        """
        if not self._recipe.checkpoint.every:
            yield None
            return
        self._ranks.agree(lambda: AdamState(model.engine))
        saver = Saver(self._recipe, self._identity, self._data.samples_per_step, self._ranks, self._folder)
        self._ranks.first(self._shelf.sweep)
        used, last = self._checkpoint is not None, self._ranks.first(self._last_of_ours)
        # From elsewhere; or the steps in between come again, and what is known now must not be lost meanwhile.
        if used and (last < 0 or begin.step < last):
            saver.save(model, begin, source, keep_all=last < 0)
            saver.close()
        self._ranks.first(lambda: self._clear(begin, last))
        try:
            yield saver
        except (Stopped, SpesError):  # what all ranks raise
            saver.close()
            raise
        saver.close()

    def _last_of_ours(self) -> int:
        """Step of the last checkpoint in this node's folder that belongs to this run; -1 if none does."""
        used = self._checkpoint
        ours = used is not None and used.path.resolve().parent == self._folder.resolve()
        return used.position.step if used is not None and ours else -1

    def _clear(self, begin: Position, last: int) -> None:
        """Leave only checkpoints that this run has come by, whose newest in this folder was that of step `last`."""
        found = self._shelf.newest_first()
        if last >= 0:
            others = [path for path in found if step_of(path) > last]
            self._shelf.delete(path for path in found if begin.step < step_of(path) <= last)  # a newer one has all
        else:
            own = f"step-{begin.step:06d}" if self._checkpoint is not None else None
            others = [path for path in found if path.name != own]
        if aside := self._shelf.set_aside(others):
            self._say(f"checkpoints that this run does not go on from are now in {aside}")
        self._attempt_begins()

    def _attempt_has_begun(self) -> bool:
        """An earlier process of this attempt has done what its --resume says already, so that it must not come again.

        Launchers that start a node again name the attempt in ATTEMPT, which is the same in all its processes.
        """
        attempt = os.environ.get(ATTEMPT)
        return attempt is not None and self._shelf.attempt() == attempt

    def _attempt_begins(self) -> None:
        if (attempt := os.environ.get(ATTEMPT)) is not None:
            self._shelf.begin_attempt(attempt)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
