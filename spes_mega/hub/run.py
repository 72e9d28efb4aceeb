"""A run as the hub sees it: opened in a state directory, and led from one round to the next."""

from collections.abc import Collection
from pathlib import Path

from spes_mega.errors import StoreError
from spes_mega.hub.close.close_round import Closer
from spes_mega.hub.console import Console
from spes_mega.hub.pull.send import Sender
from spes_mega.hub.push.receive import Receiver
from spes_mega.hub.rounds.members import expected_back
from spes_mega.hub.rounds.rounds import Rounds
from spes_mega.hub.run_state import RunState
from spes_mega.hub.state.closing_note import read_closing
from spes_mega.hub.state.initial import commit_initial
from spes_mega.hub.state.metrics import Metrics
from spes_mega.hub.state.state_folder import naming
from spes_mega.hub.state.store import Store
from spes_mega.recipe import Recipe


class Run:
    """Open a state directory, make the initial state in a new one, and close rounds.

    `receiver` takes pushes, `sender` gives pulls; both work on `state`, as the closing of a round does.
    """

    def __init__(
        self, recipe: Recipe, state: Path, init: Path | None, console: Console, change: Collection[str] = ()
    ) -> None:
        """Raise StoreError (the directory is another run's or in use) or CheckpointError (`init` does not fit)."""
        store = Store(state, recipe, change)
        self.state = RunState(recipe, store, console)
        self.receiver, self.sender, self._closer = Receiver(self.state), Sender(self.state), Closer(self.state)
        try:
            with naming(state):
                self._open(init)
        except BaseException:
            store.close()
            raise

    def close_round(self) -> None:
        """Wait until the open round may close, and commit the state that it gives; see `Closer.close_round`."""
        self._closer.close_round()

    def keep_newest(self) -> None:
        """Make a snapshot of the newest state, also where the recipe asks for none. Raise what `close_round` does."""
        self.state.needed(lambda: self.state.snapshot(always=True))

    def close(self) -> None:
        """Let go of the state directory."""
        self.state.store.close()

    def _open(self, init: Path | None) -> None:
        state = self.state
        round_ = state.needed_at_start(lambda: self._initial_round(init))
        self._load(round_)
        if (note := read_closing(state.store.pushes_dir(round_))) is not None:  # nodes may hold the next state already
            self._closer.close_with(note, resumed=True)
            self._load(round_ + 1)

    def _initial_round(self, init: Path | None) -> int:
        """Return the number of the newest state, which is made if there is none."""
        store, recipe, console = self.state.store, self.state.recipe, self.state.console
        newest = store.newest()
        if newest is None:
            store.check_new()
            store.sweep()
            commit_initial(store, recipe, init)
            source = str(init) if init else f"weights drawn with seed {recipe.train.seed}"
            console.say("initial", f"round 0 is {source}", source=source)
            return 0
        store.check_state(newest)  # what is damaged is better found before nodes train for it
        store.read_members()
        ignored = f"; --init {init} is ignored" if init else ""
        text = f"going on from round {newest}/{recipe.num_rounds} in {store.root}{ignored}"
        console.say("resumed", text, round=newest)
        return newest

    def _load(self, round_: int) -> None:
        """Read what is kept of a round: its ledger, its pushes, and who takes part."""
        state, store = self.state, self.state.store
        state.ledger = state.needed_at_start(lambda: store.read_ledger(round_))
        state.newest = state.ledger.rounds[-1]
        state.staging = state.needed_at_start(state.stage)
        pushed = self._stored_pushes(round_)
        members = store.read_members()
        if not state.finished:
            members = expected_back(members)
        state.rounds = Rounds(state.recipe.spes, round_, pushed, members=members, remember=state.remember)
        state.metrics = state.needed_at_start(lambda: Metrics(store.root / "metrics.jsonl", state.ledger.rounds))
        state.needed_at_start(state.snapshot)  # a crash may have come between the last round and its snapshot

    def _stored_pushes(self, round_: int) -> set[int]:
        """Return the nodes whose push an earlier hub took into the open round, and count them in the ledger."""
        store, staging, ledger = self.state.store, self.state.staging, self.state.ledger
        sizes, damaged = staging.committed()
        self._check_pushes(round_, sizes)
        store.sweep()  # all that the hub needs has been read: from here on something changes
        for node, reason in damaged.items():
            staging.drop(node)
            ledger.reject(node, round_, reason)
        for node, size in sizes.items():
            ledger.count_up(node, size)
            ledger.pushed(node, round_)
        return set(sizes)

    def _check_pushes(self, round_: int, pushed: Collection[int]) -> None:
        """Raise StoreError unless the pushes are those with which an earlier hub began to close the round."""
        directory = self.state.store.pushes_dir(round_)
        if (note := read_closing(directory)) is None:
            return
        if unknown := sorted(set(pushed) - set(note.nodes)):
            raise StoreError(
                f"{directory}: closing.json says with which pushes round {round_} was closed, and "
                f"that of node {unknown[0]} is there but not among them; restore the state directory from a copy"
            )
        if missing := [node for node in note.nodes if node not in pushed]:
            raise StoreError(
                f"{directory}: the push of node {missing[0]} is missing or damaged, and round "
                f"{round_} was closed with it. Restore the state directory from a copy, or remove that directory and "
                "start the hub and all nodes again: the round is trained anew"
            )
