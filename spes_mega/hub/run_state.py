"""What a hub knows of its run: the committed state, the open round, and its pushes."""

import time
from collections.abc import Callable
from typing import TypeVar

from spes_mega.errors import StoreFullError
from spes_mega.hub.console import Console
from spes_mega.hub.push.check import Expected, most_tokens
from spes_mega.hub.push.staging import Staging
from spes_mega.hub.rounds.members import Members
from spes_mega.hub.rounds.rounds import Rounds
from spes_mega.hub.state.disk_full import SHORTAGES, DiskFull, Pause, noticing_shortage
from spes_mega.hub.state.ledger import Ledger, RoundRecord
from spes_mega.hub.state.metrics import Metrics
from spes_mega.hub.state.store import Store
from spes_mega.layout.names import expected_tensors, expert_of
from spes_mega.outer.ownership import Ownership, pushed_names, with_absent
from spes_mega.recipe import Recipe
from spes_mega.wire.errors import FullError, ScarceError
from spes_mega.wire.frames import chunk_bytes
from spes_mega.wire.policy import WirePolicy
from spes_mega.wire.tensor_specs import forms_of

T = TypeVar("T")


class RunState:
    """What receiving, sending and closing share. Only the thread that closes rounds replaces an attribute."""

    ledger: Ledger
    newest: RoundRecord
    """The record of the newest committed state."""
    staging: Staging
    """The pushes of the open round."""
    rounds: Rounds
    metrics: Metrics

    def __init__(self, recipe: Recipe, store: Store, console: Console) -> None:
        self.recipe = recipe
        self.store = store
        self.console = console
        self.shapes = expected_tensors(recipe.model)
        self.policy = WirePolicy(recipe.spes)
        self.disk = DiskFull(recipe.spes.on_full_disk, console)
        self.chunk_bytes = chunk_bytes(recipe.spes.num_nodes)
        self._everyone = recipe.ownership()

    @property
    def finished(self) -> bool:
        """Tell whether all rounds of the recipe are closed."""
        return self.newest.round >= self.recipe.num_rounds

    @property
    def ownership(self) -> Ownership:
        """Return who trains which experts in the open round."""
        return self.ownership_from(self.newest)

    def ownership_from(self, record: RoundRecord) -> Ownership:
        """Return who trains which experts from the state of `record` on, until the next one."""
        return with_absent(self._everyone, record.absent, self.recipe.spes.capacity)

    def stage(self) -> Staging:
        """Return the place for pushes of the open round, whose ownership says what each node has to push."""
        ownership, most = self.ownership, most_tokens(self.recipe)

        def expected(node: int) -> Expected:
            names = pushed_names(self.shapes, ownership, node, expert_of)
            return Expected(node, forms_of({name: self.shapes[name] for name in names}, self.policy.up), most)

        return Staging(self.store.pushes_dir(self.newest.round), expected)

    def remember(self, members: Members) -> None:
        """Keep durably who takes part. Raise what `refusal` does."""
        try:
            self.store.write_members(members)
        except SHORTAGES as e:
            raise self.refusal(e) from e

    def refusal(self, error: StoreFullError | ScarceError) -> FullError | ScarceError:
        """Return what a node is told that has to try again. Raise `error`, and end the run, if it has to stop then."""
        try:
            return self.disk.refusal(error)
        except StoreFullError:
            self.rounds.fail(error)
            raise

    def needed(self, action: Callable[[], T], pause: Pause | None = None) -> T:
        """Do what the run cannot go on without, as soon as there is room for it."""

        def attempt() -> T:
            with noticing_shortage(self.store.root):
                return action()

        return self.disk.needed(attempt, pause or self.rounds.pause)

    def needed_at_start(self, action: Callable[[], T]) -> T:
        """Do the same before anybody is served; a signal ends the process then, which loses nothing."""
        return self.needed(action, lambda seconds, reason: time.sleep(seconds))

    def snapshot(self, always: bool = False) -> None:
        """Keep the newest state if the recipe asks for it, or `always`."""
        if path := self.store.snapshot(self.newest, always):
            self.console.say("snapshot", f"snapshot {path}", path=str(path), round=self.newest.round)
