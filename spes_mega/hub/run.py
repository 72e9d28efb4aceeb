"""A run as the hub sees it: the global state, the open round, and how one leads to the next."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import xxhash

from spes_mega.errors import SpesError, StoreError, StoreFullError
from spes_mega.hub.close.aggregate import Mixture, merge_of, write_next_state
from spes_mega.hub.console import Console
from spes_mega.hub.pull.pull_payload import Outgoing, Part, full_parts, partial_parts
from spes_mega.hub.push.staging import DamagedPushError, Staging, most_tokens, tokens_of
from spes_mega.hub.push.update_norm import update_norm, update_rows
from spes_mega.hub.state.disk_full import SHORTAGES, Pause, Room, noticing_shortage
from spes_mega.hub.state.initial import commit_initial
from spes_mega.hub.state.ledger import Ledger, RoundRecord
from spes_mega.hub.state.members import Members, Presence, expected_back
from spes_mega.hub.state.metrics import Metrics
from spes_mega.hub.state.round_state import Publisher, publishing
from spes_mega.hub.state.rounds import Rounds
from spes_mega.hub.state.state_folder import naming
from spes_mega.hub.state.store import Closing, Store
from spes_mega.layout.names import expected_tensors, expert_of
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.outer.merging import Similarity, mean_similarity
from spes_mega.outer.ownership import (
    Ownership,
    next_absent,
    ownership_of,
    pushed_names,
    ranges,
    with_absent,
)
from spes_mega.recipe import Recipe
from spes_mega.wire.errors import BrokenTransferError, FullError, PayloadError, ScarceError, StaleRoundError
from spes_mega.wire.frames import PREFIX_BYTES, chunk_bytes, frames
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.policy import WirePolicy, bytes_beside, changed_names, merged_names
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.tensor_specs import Form, forms_of

T = TypeVar("T")


class Run:
    """Opens a state directory, makes the initial state in a new one, and closes rounds."""

    def __init__(
        self, recipe: Recipe, state: Path, init: Path | None, console: Console, change: Collection[str] = ()
    ) -> None:
        """Raises StoreError (the directory is another run's or in use) or CheckpointError (`init` does not fit)."""
        self.recipe = recipe
        self.shapes = expected_tensors(recipe.model)
        self._policy = WirePolicy(recipe.spes)
        self._everyone = ownership_of(
            recipe.model.num_experts, recipe.spes.num_nodes, recipe.spes.ownership, recipe.spes.capacity
        )
        self._chunk_bytes = chunk_bytes(recipe.spes.num_nodes)
        self._console = console
        self._room = Room(recipe.spes.on_full_disk, console)
        self._store = Store(state, recipe, change)
        try:
            with naming(state):
                self._open(init)
        except BaseException:
            self._store.close()
            raise

    def _open(self, init: Path | None) -> None:
        round_ = self._at_start(lambda: self._initial_round(init))
        self._load(round_)
        if (decided := self._store.closing(round_)) is not None:  # nodes may hold the next state already
            self._close(round_, decided, goes_on=False)
            self._load(round_ + 1)

    def _load(self, round_: int) -> None:
        self.ledger: Ledger = self._at_start(lambda: self._store.read_ledger(round_))
        self.newest: RoundRecord = self.ledger.rounds[-1]
        self.staging = self._at_start(self._stage)
        self.rounds = self._rounds(round_, self._stored_pushes(round_))
        self._metrics = self._at_start(lambda: Metrics(self._store.root / "metrics.jsonl", self.ledger.rounds))
        self._at_start(self._snapshot)  # a crash may have come between the last round and its snapshot

    @property
    def trouble(self) -> str:
        """What keeps the hub from going on; empty if nothing does."""
        return self._room.trouble

    @property
    def finished(self) -> bool:
        return self.newest.round >= self.recipe.num_rounds

    @property
    def ownership(self) -> Ownership:
        """Who trains which experts in the open round."""
        return self._ownership(self.newest)

    def _ownership(self, record: RoundRecord) -> Ownership:
        return with_absent(self._everyone, record.absent, self.recipe.spes.capacity)

    def close(self) -> None:
        """Let go of the state directory."""
        self._store.close()

    def _initial_round(self, init: Path | None) -> int:
        newest = self._store.newest()
        if newest is None:
            self._store.check_new()
            self._store.sweep()
            commit_initial(self._store, self.recipe, init)
            source = str(init) if init else f"weights drawn with seed {self.recipe.train.seed}"
            self._console.say("initial", f"round 0 is {source}", source=source)
            return 0
        self._store.check_state(newest)  # what is damaged is better found before nodes train for it
        self._store.read_members()
        ignored = f"; --init {init} is ignored" if init else ""
        text = f"going on from round {newest}/{self.recipe.num_rounds} in {self._store.root}{ignored}"
        self._console.say("resumed", text, round=newest)
        return newest

    def _stored_pushes(self, round_: int) -> set[int]:
        """Nodes whose push an earlier hub took into the open round; the ledger lacks them, being of the last commit."""
        sizes, damaged = self.staging.committed()
        if (decided := self._store.closing(round_)) is not None:
            self._check_pushes(round_, decided, sizes)
        self._store.sweep()  # all that the hub needs has been read: from here on something changes
        for node, reason in damaged.items():
            self.staging.drop(node)
            self.ledger.reject(node, round_, reason)
        for node, size in sizes.items():
            self.ledger.count_up(node, size)
            self.ledger.pushed(node, round_)
        return set(sizes)

    def _check_pushes(self, round_: int, decided: Closing, pushed: Collection[int]) -> None:
        if unknown := sorted(set(pushed) - set(decided.nodes)):
            raise StoreError(
                f"{self._store.pushes_dir(round_)}: closing.json says with which pushes round {round_} was closed, and "
                f"that of node {unknown[0]} is there but not among them; restore the state directory from a copy"
            )
        if missing := [node for node in decided.nodes if node not in pushed]:
            raise StoreError(
                f"{self._store.pushes_dir(round_)}: the push of node {missing[0]} is missing or damaged, and round "
                f"{round_} was closed with it. Restore the state directory from a copy, or remove that directory and "
                "start the hub and all nodes again: the round is trained anew"
            )

    def _rounds(self, round_: int, pushed: set[int]) -> Rounds:
        members = self._store.read_members()
        if not self.finished:
            members = expected_back(members)
        return Rounds(
            self.recipe.spes,
            round_,
            pushed,
            members=members,
            remember=self._remember,
        )

    def _remember(self, members: Members) -> None:
        try:
            self._store.write_members(members)
        except SHORTAGES as e:
            raise self._refusal(e) from e

    def _refusal(self, error: StoreFullError | ScarceError) -> FullError | ScarceError:
        """What a node is told that has to try again. Raises `error`, and ends the run, if it has to stop then."""
        try:
            return self._room.refusal(error)
        except StoreFullError:
            self.rounds.fail(error)
            raise

    def _needed(self, action: Callable[[], T], pause: Pause | None = None) -> T:
        """Do what the run cannot go on without, as soon as there is room for it."""

        def attempt() -> T:
            with noticing_shortage(self._store.root):
                return action()

        return self._room.needed(attempt, pause or self.rounds.pause)

    def _at_start(self, action: Callable[[], T]) -> T:
        """The same before anybody is served; a signal ends the process then, which loses nothing."""
        return self._needed(action, lambda seconds, reason: time.sleep(seconds))

    def _stage(self) -> Staging:
        """For the pushes of the open round, whose ownership says what each node has to push."""
        ownership = self.ownership

        def pushed(node: int) -> dict[str, Form]:
            names = pushed_names(self.shapes, ownership, node, expert_of)
            return forms_of({name: self.shapes[name] for name in names}, self._policy.up)

        round_ = self.newest.round
        return Staging(
            self._store.pushes_dir(round_),
            pushed,
            lambda node, payload: self._check_update(round_, node, payload),
            most_tokens(self.recipe),
        )

    def _check_update(self, round_: int, node: int, payload: StoredPayload) -> None:
        """Raises PayloadError if a push leads further away from the round's state than spes.max_update_norm."""
        limit = self.recipe.spes.max_update_norm
        if limit is None:
            return
        with closing(self._store.open_state(round_)) as base:
            norm = update_norm(update_rows(payload, base.weights))
        self.ledger.measured(node, norm)
        if not norm <= limit:
            raise PayloadError(
                f"push of node {node}: its update has the norm {norm:.6g}, and spes.max_update_norm is {limit:g}"
            )

    def offered(self, node: int, request: pb.OfferRequest) -> pb.OfferReply:
        """From where on a payload for the open round is wanted. Raises StaleRoundError."""
        try:
            self.rounds.check_open(request.round)
        except StaleRoundError:
            if not self._counted(node, request.round):
                raise
            return pb.OfferReply(complete=True)
        offset, complete = self.staging.offered(node, request.payload)
        return pb.OfferReply(offset=offset, complete=complete, chunk_bytes=self._chunk_bytes)

    def receive(self, node: int, opening: pb.PushOpening, frames: Iterable[bytes], end: Callable[[], None]) -> bool:
        """Take one push into the open round; returns whether it was there already.

        Raises:
            StaleRoundError: the round was closed without this node.
            PayloadError, HubRefusedError, StoreError: see `Staging.receive`.
        """
        try:
            repeated = self._receive(node, opening, frames, end)
        except StaleRoundError:
            if not self._counted(node, opening.round):
                raise
            repeated = True  # the node did not get the answer to its first attempt
        if not repeated:
            self.ledger.pushed(node, opening.round)
        return repeated

    def _counted(self, node: int, round_: int) -> bool:
        """Whether a closed round, or the one that is being closed, has a push of this node.

        Then it is the push of the process that now has the node's number, and that sends one payload a round: an older
        process's is not taken once a newer one has joined, and one that joins after the push is told of it.
        """
        return self.rounds.has_pushed(node, round_) or self.ledger.includes(node, round_)

    def _receive(self, node: int, opening: pb.PushOpening, frames: Iterable[bytes], end: Callable[[], None]) -> bool:
        session = opening.caller.session
        self.rounds.check_open(opening.round)

        def progress(count: int) -> None:
            self.ledger.count_up(node, count)
            self.rounds.check_open(opening.round)

        def commit(rename: Callable[[], object]) -> None:
            self.rounds.commit_push(node, session, opening.round, rename)

        try:
            repeated = self.staging.receive(node, opening, frames, progress, commit, end)
            self._room.found()
            return repeated
        except SHORTAGES as e:
            raise self._refusal(e) from e
        except (PayloadError, BrokenTransferError):
            self.rounds.check_open(opening.round)  # closed meanwhile: the next one may ask this node for other experts
            raise

    def send(self, node: int, request: pb.PullRequest) -> Iterator[bytes]:
        """The newest state for a node, without what it alone owns if it already has just that.

        An opening, then frames, from where an earlier attempt broke off if that was of the same payload.
        """
        have_round = request.have_round if request.HasField("have_round") else None
        self.rounds.settle()
        record = self.newest
        parts, full = self._parts(node, have_round, record)
        with closing(self._store.open_state(record.round)) as state:
            outgoing = Outgoing(state, parts, self._policy)
            total, payload = outgoing.total_bytes, f"{record.round}-{xxhash.xxh3_64_hexdigest(outgoing.header)}"
            begin = request.part_bytes if request.part == payload and request.part_bytes <= total else 0
            yield pb.PullOpening(
                round=record.round, total_bytes=total, full=full, absent=record.absent, payload=payload, offset=begin
            ).SerializeToString()
            for frame in frames(outgoing.pieces(self._chunk_bytes), self._chunk_bytes, begin):
                count = len(frame) - PREFIX_BYTES
                yield frame
                self.ledger.count_down(node, count)
        self.rounds.served(node, record.round)

    def answer_drain(self) -> None:
        """Tell who asked for it that the hub is alive."""
        self._store.answer_drain()

    def drain_requested(self) -> bool:
        """Whether somebody asked this run's hub to end after the open round."""
        return self._store.drain_requested()

    def _parts(self, node: int, have_round: int | None, record: RoundRecord) -> tuple[dict[str, Part], bool]:
        """What to send, and whether that is everything.

        Only where weights travel with loss does a node know the last state for sure, and not just its own training.
        """
        trained, counted = self._trained(record), node in record.nodes
        ownership, lossless = self._ownership(record), self._policy.lossless
        private = self._policy.private(self.shapes, ownership, node)
        # With other experts than before it rebuilds its model, and needs all of it.
        rebuilds = trained.owned(node) != ownership.owned(node)
        if have_round != record.round - 1 or rebuilds or (lossless and not counted):
            return full_parts(self.shapes, private), True
        changed = changed_names(self.shapes, trained, record.nodes, record.merged)
        before = self._policy.private(self.shapes, trained, node)
        held = before if counted else set()
        # Without loss, what a node holds is exact, whoever else trains it from now on.
        begins = before if lossless else private
        return partial_parts(changed, before, begins, held, record.merged, self._policy), False

    def _trained(self, record: RoundRecord) -> Ownership:
        """The ownership of the round that gave a state; the one after it if that is too long ago to tell."""
        return self._ownership(self.ledger.record(record.round - 1) or record)

    def close_round(self) -> None:
        """Wait until the open round may close, and commit the state that it gives.

        A push that the disk has damaged meanwhile is dropped, and the round stays open: its node, which waits, sends it
        again.

        Nodes are given the state before it is durable: which pushes it is made of is, and so are these, so that a hub
        that is started again makes the same state of them.

        Raises:
            DeadlineError: nodes did not come in time.
            StoreFullError: the disk is full, and spes.on_full_disk is stop.
            StoreError, CheckpointError: the state directory cannot be read or written.
            Stopped: the hub was asked to stop; nothing is left of the new state.
        """
        round_, nodes = self._needed(self.rounds.await_close)
        decided = Closing(nodes, self._next_absent(round_, nodes))
        self._needed(lambda: self._store.note_closing(round_, decided))
        try:
            self._close(round_, decided)
        except DamagedPushError as e:
            self._reopen(round_, e)
            self.close_round()

    def _reopen(self, round_: int, error: DamagedPushError) -> None:
        """No node has been given a state that the damaged push is part of."""
        self._store.forget_closing(round_)
        self.staging.drop(error.node)
        self.ledger.dropped(error.node, round_, str(error))
        text = f"{error}; the push of node {error.node} for round {round_} is dropped: the node has to send it again"
        self._console.say("damaged", text, node=error.node, round=round_)
        self.rounds.reopen(error.node)

    def _close(self, round_: int, decided: Closing, goes_on: bool = True) -> None:
        began, before, staged = time.monotonic(), self.newest, self.staging
        staged.close()
        similarity = self._needed(lambda: self._commit(round_, decided, began))
        if goes_on and not self.finished:
            self._needed(lambda: self.staging.take_over(staged))
        self._console.round(self.newest, self.recipe.num_rounds, self.recipe.spes.num_nodes, self._aggregation_s)
        if before.absent != self.newest.absent:
            self._say_ownership()
        self._needed(lambda: self._store.prune(self.newest.round, self.finished))
        self._needed(lambda: self._metrics.append(self.newest, similarity))
        self._needed(self._snapshot)

    def _commit(self, round_: int, decided: Closing, began: float) -> dict[int, Similarity]:
        closed, similarity = self.ledger.copy(), dict[int, Similarity]()
        try:
            with ExitStack() as stack:
                previous = stack.enter_context(closing(self._store.open_state(round_)))
                pushes = {node: stack.enter_context(closing(self.staging.open(node))) for node in decided.nodes}
                tokens = {node: tokens_of(push) for node, push in pushes.items()}
                weights = tokens if self.recipe.spes.weight_by_tokens else None
                mixture = Mixture(previous, pushes, self.ownership, self._policy, weights)
                staged = self.staging

                def write(out: Publisher) -> dict[int, Similarity]:
                    with staged.checking(pushes):
                        merge = merge_of(self.recipe, round_)
                        return write_next_state(out, mixture, self.recipe.model, merge, self.rounds.check_running)

                changed = self._changed(round_, decided.nodes)
                self._store.commit(
                    round_ + 1,
                    lambda writer: self._fill(
                        writer, closed, write, changed, round_, tokens, decided.absent, similarity
                    ),
                    base_config=previous.weights.config,
                    copy_from=self._store.round_dir(round_),
                    beside=bytes_beside(self.shapes, self._policy, *changed),
                    publish=lambda: self._publish(closed, began),
                )
        except SHORTAGES as e:
            if self.newest.round == round_:
                raise
            # Nodes have the state: it cannot be made a second time by this process.
            if isinstance(e, ScarceError):
                raise SpesError(f"{e}; start the hub again: nothing is lost") from None
            raise StoreError(f"{e}; make room and start the hub again: nothing is lost") from e
        return similarity

    def _publish(self, closed: Ledger, began: float) -> None:
        """Open the next round."""
        self.ledger.follow(closed)
        self.newest = self.ledger.rounds[-1]
        self.staging = self._needed(self._stage)
        self._aggregation_s = time.monotonic() - began
        self.rounds.committed(self.newest.round)

    def _changed(self, round_: int, nodes: tuple[int, ...]) -> tuple[list[str], list[str]]:
        """What a round changes, and those experts of which it keeps for their owners what a merge changed."""
        merging = merge_of(self.recipe, round_) is not None
        changed = changed_names(self.shapes, self.ownership, nodes, merging)
        return changed, merged_names(self.shapes, self.ownership, nodes, self._policy) if merging else []

    def _fill(
        self,
        writer: CheckpointWriter,
        closed: Ledger,
        write: Callable[[Publisher], dict[int, Similarity]],
        changed: tuple[list[str], list[str]],
        round_: int,
        tokens: dict[int, int],
        absent: tuple[int, ...],
        similarity: dict[int, Similarity],
    ) -> Ledger:
        merge = merge_of(self.recipe, round_)
        nodes = tuple(sorted(tokens))
        with publishing(writer, self._policy, *changed) as out:
            similarity.update(write(out))
        closed.close_round(
            round_ + 1,
            self.recipe.step_at(round_ + 1),
            nodes,
            self.rounds.open_seconds(),
            sum(tokens.values()),
            merge.alpha if merge else None,
            absent,
            mean_similarity(similarity),
        )
        return closed

    def _next_absent(self, round_: int, nodes: tuple[int, ...]) -> tuple[int, ...]:
        presence = self.rounds.presence()
        left = [node for node in presence if presence[node] is Presence.LEFT]
        spes = self.recipe.spes
        return next_absent(
            spes.num_nodes,
            self.newest.absent,
            nodes,
            left,
            lambda node: self.ledger.missed(node, round_),
            spes.adopt_after,
        )

    def _say_ownership(self) -> None:
        owned = self.ownership.nodes
        shares = "; ".join(f"node {node} {ranges(experts)}" for node, experts in enumerate(owned))
        away = ", ".join(map(str, self.newest.absent)) or "none"
        text = f"absent nodes: {away}; experts from now on: {shares}"
        self._console.say("ownership", text, absent=self.newest.absent, nodes=owned)

    def keep_newest(self) -> None:
        """Make a snapshot of the newest state, also where the recipe asks for none. Raises what `close_round` does."""
        self._needed(lambda: self._snapshot(always=True))

    def _snapshot(self, always: bool = False) -> None:
        if path := self._store.snapshot(self.newest, always):
            self._console.say("snapshot", f"snapshot {path}", path=str(path), round=self.newest.round)
