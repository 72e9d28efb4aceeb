"""A push from its first byte until it is part of the round."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from spes_mega.errors import StoreError
from spes_mega.hub.push.check import check_size, well_formed
from spes_mega.hub.push.update_norm import update_norm, update_rows
from spes_mega.hub.run_state import RunState
from spes_mega.hub.state.disk_full import SHORTAGES, noticing_shortage
from spes_mega.wire.errors import BrokenTransferError, PayloadError, StaleRoundError
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.proto import hub_pb2 as pb


class Receiver:
    """Take pushes into the open round. All methods may be called from any thread.

    `_take` is the whole way of a push: receive the file, check it, commit it by a rename.

    Locks, in the order in which they are taken:
    1. `Upload.lock` protects one payload's file, so that two attempts never write to it at once.
    2. `_checking` lets one push be checked at a time, so that memory does not grow with the nodes.
    3. `Staging.lock` protects the names of committed pushes.
    4. The lock of `Rounds` protects which round is open, and who has pushed for it.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._checking = threading.Lock()

    def offered(self, node: int, request: pb.OfferRequest) -> pb.OfferReply:
        """Return from where on a payload for the open round is wanted. Raise StaleRoundError."""
        try:
            self._state.rounds.check_open(request.round)
        except StaleRoundError:
            if not self._counted(node, request.round):
                raise
            return pb.OfferReply(complete=True)
        offset, complete = self._state.staging.uploads.held(node, request.payload)
        return pb.OfferReply(offset=offset, complete=complete, chunk_bytes=self._state.chunk_bytes)

    def receive(self, node: int, opening: pb.PushOpening, frames: Iterable[bytes], cancel: Callable[[], None]) -> bool:
        """Take one push, from where an earlier attempt broke off; return whether it was there already.

        `cancel` ends this attempt when another one at the same payload begins.

        Raises:
            StaleRoundError: the round was closed without this node.
            PayloadError: the payload is malformed; nothing is left of it.
            DamagedError, BrokenTransferError: the transfer has to be resumed by another attempt.
            HubRefusedError: another payload of this node was committed in this round.
            FullError, ScarceError: there is no room, or too little of something else; the node has to try again.
            StoreFullError: there is no room, and spes.on_full_disk is stop.
            StoreError: the push cannot be written.
        """
        rounds, round_ = self._state.rounds, opening.round
        try:
            rounds.check_open(round_)
            try:
                repeated = self._take(node, opening, frames, cancel)
            except (PayloadError, BrokenTransferError):
                rounds.check_open(round_)  # closed meanwhile: the next one may ask this node for other experts
                raise
            self._state.disk.found()
        except SHORTAGES as e:
            raise self._state.refusal(e) from e
        except StaleRoundError:
            if not self._counted(node, round_):
                raise
            repeated = True  # the node did not get the answer to its first attempt
        if not repeated:
            self._state.ledger.pushed(node, round_)
        return repeated

    def _take(self, node: int, opening: pb.PushOpening, frames: Iterable[bytes], cancel: Callable[[], None]) -> bool:
        state, round_, staging = self._state, opening.round, self._state.staging
        expected = staging.expected(node)
        check_size(opening.total_bytes, expected)
        with (
            self._storing(staging.directory, round_),
            staging.uploads.attempt(node, opening, expected.max_header, cancel) as attempt,
        ):
            for frame in frames:
                state.ledger.count_up(node, attempt.take(frame))
                state.rounds.check_open(round_)
            with attempt.complete() as file:
                if file is None:
                    return True
                with self._checking, well_formed(file.path, expected) as payload:
                    payload.check_finite()
                    self._check_update(round_, node, payload)
                with staging.lock:
                    checksum = file.checksum()
                    if staging.has(node, file.path, checksum):
                        return True
                    with state.rounds.committing(node, opening.caller.session, round_):
                        staging.commit(node, file.path, checksum)
                    staging.sync()
        return False

    @contextmanager
    def _storing(self, directory: Path, round_: int) -> Iterator[None]:
        try:
            with noticing_shortage(directory):
                yield
        except OSError as e:
            self._state.rounds.check_open(round_)  # the directory of a closed round is removed under a late push
            raise StoreError(f"the hub cannot store this push: {e.strerror or e}") from e

    def _check_update(self, round_: int, node: int, payload: StoredPayload) -> None:
        """Raise PayloadError if a push leads further away from the round's state than spes.max_update_norm."""
        limit = self._state.recipe.spes.max_update_norm
        if limit is None:
            return
        with closing(self._state.store.open_state(round_)) as base:
            norm = update_norm(update_rows(payload, base.weights))
        self._state.ledger.measured(node, norm)
        if not norm <= limit:
            raise PayloadError(
                f"push of node {node}: its update has the norm {norm:.6g}, and spes.max_update_norm is {limit:g}"
            )

    def _counted(self, node: int, round_: int) -> bool:
        """Tell whether a closed round, or the one that is being closed, has a push of this node.

        Then it is the push of the process that now has the node's number, and that sends one payload a round: an older
        process's is not taken once a newer one has joined, and one that joins after the push is told of it.
        """
        return self._state.rounds.has_pushed(node, round_) or self._state.ledger.includes(node, round_)
