"""How a round closes: from the last push until the next state is on the disk."""

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from spes_mega.errors import SpesError, StoreError
from spes_mega.hub.close.merge_layer import Merge, merge_of
from spes_mega.hub.close.next_state import write_next_state
from spes_mega.hub.close.round_average import RoundAverage
from spes_mega.hub.push.check import tokens_of
from spes_mega.hub.push.staging import DamagedPushError
from spes_mega.hub.rounds.members import Presence
from spes_mega.hub.run_state import RunState
from spes_mega.hub.state.closing_note import ClosingNote, forget_closing, note_closing
from spes_mega.hub.state.disk_full import SHORTAGES
from spes_mega.hub.state.ledger import Ledger, RoundRecord
from spes_mega.hub.state.round_state import publishing
from spes_mega.hub.state.store import Template
from spes_mega.outer.merging import Similarity, mean_similarity
from spes_mega.outer.ownership import next_absent, ranges
from spes_mega.wire.errors import ScarceError
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.policy import bytes_beside, changed_names, merged_names


@dataclass(frozen=True)
class _Changes:
    """What a round changes."""

    changed: list[str]
    """Tensors that are published anew."""
    merged: list[str]
    """Experts of which the state keeps, for their owners, what a merge changed."""


class Closer:
    """Close rounds; one thread does that."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._aggregation_s = 0.0

    def close_round(self) -> None:
        """Wait until the open round may close, and commit the state that it gives.

        A push that the disk has damaged meanwhile is dropped, and the round stays open: its node, which waits, sends it
        again.

        Nodes are given the state before it is durable: which pushes it is made of is, and so are these, so that a hub
        that is started again makes the same state of them.

        Raises:
            DeadlineError: nodes missed their deadline.
            StoreFullError: the disk is full, and spes.on_full_disk is stop.
            StoreError, CheckpointError: the state directory cannot be read or written.
            Stopped: the hub was asked to stop; nothing is left of the new state.
        """
        round_ = self._state.newest.round
        while self._state.newest.round == round_:
            nodes = self._state.needed(self._state.rounds.await_close)
            note = ClosingNote(nodes, self._next_absent(round_, nodes))
            self._state.needed(partial(note_closing, self._state.store.pushes_dir(round_), note))
            try:
                self.close_with(note)
            except DamagedPushError as e:
                self._reopen(round_, e)

    def close_with(self, note: ClosingNote, resumed: bool = False) -> None:
        """Commit the state that the pushes in `note` give; `resumed`: for a hub that died while it did that."""
        state, began = self._state, time.monotonic()
        before, staged = state.newest, state.staging
        staged.close()
        similarity = state.needed(lambda: self._write(note, began))
        if not (resumed or state.finished):
            state.needed(lambda: state.staging.take_over(staged))
        recipe = state.recipe
        state.console.round(state.newest, recipe.num_rounds, recipe.spes.num_nodes, self._aggregation_s)
        if before.absent != state.newest.absent:
            self._say_ownership()
        state.needed(lambda: state.store.prune(state.newest.round, state.finished))
        state.needed(lambda: state.metrics.append(state.newest, similarity))
        state.needed(state.snapshot)

    def _reopen(self, round_: int, error: DamagedPushError) -> None:
        """Let a round stay open without a damaged push; no node has been given a state that it is part of."""
        state, node = self._state, error.node
        forget_closing(state.store.pushes_dir(round_))
        state.staging.drop(node)
        state.ledger.dropped(node, round_, str(error))
        text = f"{error}; the push of node {node} for round {round_} is dropped: the node has to send it again"
        state.console.say("damaged", text, node=node, round=round_)
        state.rounds.reopen(node)

    def _write(self, note: ClosingNote, began: float) -> dict[int, Similarity]:
        """Write the next state, open it to nodes, then make it durable; return how alike merged experts were."""
        state, store, staged = self._state, self._state.store, self._state.staging
        round_, ledger = state.newest.round, state.ledger.copy()
        try:
            with ExitStack() as stack:
                previous = stack.enter_context(closing(store.open_state(round_)))
                pushes = {node: stack.enter_context(closing(staged.open(node))) for node in note.nodes}
                tokens = {node: tokens_of(push) for node, push in pushes.items()}
                weights = tokens if state.recipe.spes.weight_by_tokens else None
                average = RoundAverage(previous, pushes, state.ownership, state.policy, weights)
                merge = merge_of(state.recipe, round_)
                changes = self._changes(pushes, merge)
                beside = bytes_beside(state.shapes, state.policy, changes.changed, changes.merged)
                template = Template(previous.weights.config, store.round_dir(round_))
                draft = stack.enter_context(store.committing(round_ + 1, template, beside))
                with (
                    publishing(draft.writer, state.policy, changes.changed, changes.merged) as out,
                    staged.checking(pushes),
                ):
                    similarity = write_next_state(
                        out, average, state.recipe.model, merge, state.rounds.shutdown.check_running
                    )
                ledger.close_round(self._record(note, sum(tokens.values()), merge, similarity))
                draft.complete(ledger)
                self._publish(ledger, began)
        except SHORTAGES as e:
            if state.newest.round == round_:
                raise
            # Nodes have the state: it cannot be made a second time by this process.
            if isinstance(e, ScarceError):
                raise SpesError(f"{e}; start the hub again: nothing is lost") from None
            raise StoreError(f"{e}; make room and start the hub again: nothing is lost") from e
        return similarity

    def _record(
        self, note: ClosingNote, tokens: int, merge: Merge | None, similarity: Mapping[int, Similarity]
    ) -> RoundRecord:
        state = self._state
        round_ = state.newest.round + 1
        return RoundRecord(
            round=round_,
            step=state.recipe.step_at(round_),
            nodes=tuple(sorted(note.nodes)),
            seconds=state.rounds.clock.seconds_open(),
            tokens=tokens,
            merge_alpha=merge.alpha if merge else None,
            absent=note.absent,
            similarity=mean_similarity(similarity),
        )

    def _publish(self, ledger: Ledger, began: float) -> None:
        """Open the next round."""
        state = self._state
        state.ledger.follow(ledger)
        state.newest = state.ledger.rounds[-1]
        state.staging = state.needed(state.stage)
        self._aggregation_s = time.monotonic() - began
        state.rounds.committed(state.newest.round)

    def _changes(self, pushes: Mapping[int, StoredPayload], merge: Merge | None) -> _Changes:
        state, nodes = self._state, tuple(pushes)
        changed = changed_names(state.shapes, state.ownership, nodes, merge is not None)
        if merge is None:
            return _Changes(changed, [])
        return _Changes(changed, merged_names(state.shapes, state.ownership, nodes, state.policy))

    def _next_absent(self, round_: int, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the nodes whose experts others train from the next state on."""
        state, spes = self._state, self._state.recipe.spes
        return next_absent(
            spes.num_nodes,
            state.newest.absent,
            nodes,
            state.rounds.attendance.with_presence(Presence.LEFT),
            lambda node: state.ledger.missed(node, round_),
            spes.adopt_after,
        )

    def _say_ownership(self) -> None:
        state = self._state
        owned = state.ownership.nodes
        shares = "; ".join(f"node {node} {ranges(experts)}" for node, experts in enumerate(owned))
        away = ", ".join(map(str, state.newest.absent)) or "none"
        text = f"absent nodes: {away}; experts from now on: {shares}"
        state.console.say("ownership", text, absent=state.newest.absent, nodes=owned)
