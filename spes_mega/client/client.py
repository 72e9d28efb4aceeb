"""The node's side of the hub.

Weights go through a spool file in both directions: a push is gathered once and can then be sent again as often as
the link needs, and a pull is applied only when all of it has come.
"""

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

from torch import Tensor

from spes_mega.client.channel import Channel, Limit, attempt_s
from spes_mega.client.pulled_state import Joined, Pulled
from spes_mega.client.replica import Replica
from spes_mega.client.resumable import ANSWER_S, Delivery
from spes_mega.client.spools import Spools
from spes_mega.errors import DeadlineError, HubRefusedError
from spes_mega.layout.names import expected_tensors
from spes_mega.outer.ownership import with_absent
from spes_mega.recipe import Recipe
from spes_mega.security.access import OPEN, Access
from spes_mega.wire.errors import PayloadError, PushLostError, StaleRoundError
from spes_mega.wire.payload import StoredPayload, write_payload
from spes_mega.wire.policy import WirePolicy
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.protocol import PROTOCOL, TOKENS_KEY, as_dict
from spes_mega.wire.tensor_specs import Bounds, Shape, in_fp32, state_bounds

__all__ = [
    "HubClient",
    "HubRefusedError",
    "Joined",
    "PayloadError",
    "Pulled",
    "PushLostError",
    "StaleRoundError",
]
POLL_S = 20.0


class _Sent(NamedTuple):
    """A push that the hub has taken; `file` is None if an older process of this node sent it."""

    round: int
    file: BinaryIO | None
    size: int


class HubClient:
    """One node's connection to the hub. All calls block, have deadlines, and retry what is transient.

    Every method raises HubRefusedError (another recipe, token, protocol; a faulty push), DeadlineError (no answer in
    time, or the hub gave up on nodes that it names) or StoreError (the hub's disk).
    """

    def __init__(
        self,
        address: str,
        node: int,
        digest: str,
        *,
        access: Access = OPEN,
        rpc_deadline_s: float = 600.0,
        rpc_setting: str = "",
        wait_deadline_s: float = 24 * 3600.0,
        wait_setting: str = "",
        spool_dir: Path | None = None,
        replica: Replica | None = None,
        bounds: Bounds | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`spool_dir` needs room for one state of the model and one push; default: the system's temporary directory.

        `replica` belongs to runs in which weights travel with loss; `for_recipe` makes it.
        `bounds` are of what the hub may send; without them, its word is taken.

        What is transient is tried again for `rpc_deadline_s`, and by `wait_round` for `wait_deadline_s`; the settings
        name these limits in messages. `say` gets a line now and then while the hub does not answer; from any thread.
        """
        self._say = say
        self._channel = Channel(address, access, Limit(rpc_deadline_s, rpc_setting), say)
        self._caller = pb.Caller(protocol=PROTOCOL, node=node, digest=digest, session=uuid.uuid4().hex)
        self._delivery = Delivery(self._channel, self._caller)
        self._wait_limit = Limit(wait_deadline_s, wait_setting)
        self._spools = Spools(spool_dir)
        self._sent: _Sent | None = None
        self._replica = replica
        self._bounds = bounds
        self.address = address
        self.node = node

    @classmethod
    def for_recipe(
        cls,
        recipe: Recipe,
        address: str,
        node: int,
        *,
        access: Access = OPEN,
        spool_dir: Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> Self:
        """A client whose digest and deadlines are the recipe's; it outwaits the deadlines of the hub."""
        spes = recipe.spes
        policy = WirePolicy(spes)
        shapes = expected_tensors(recipe.model)
        everyone = recipe.ownership()

        def private_of(absent: Collection[int]) -> set[str]:
            return policy.private(shapes, with_absent(everyone, absent, spes.capacity), node)

        replica = None if policy.lossless else Replica(shapes, policy, spool_dir, private_of)
        return cls(
            address,
            node,
            recipe.digest(),
            access=access,
            rpc_deadline_s=spes.rpc_deadline_s,
            rpc_setting="spes.rpc_deadline_s",
            wait_deadline_s=spes.join_deadline_s + 2 * spes.round_deadline_s + spes.rpc_deadline_s,
            wait_setting="spes.join_deadline_s + 2 spes.round_deadline_s + spes.rpc_deadline_s",
            spool_dir=spool_dir,
            replica=replica,
            bounds=state_bounds(shapes, policy.down),
            say=say,
        )

    @property
    def bytes_up(self) -> int:
        """Payload bytes sent so far."""
        return self._delivery.bytes_up

    @property
    def bytes_down(self) -> int:
        """Payload bytes received so far."""
        return self._delivery.bytes_down

    def join(self) -> Joined:
        """Tell the hub that this node takes part; waits for a hub that is not up yet."""
        reply = self._channel.call("Join", pb.JoinRequest(caller=self._caller), ANSWER_S)
        if reply.pushed and (self._sent is None or self._sent.round != reply.round):
            self._remember(_Sent(reply.round, None, 0))
        return Joined(reply.round, reply.num_rounds, reply.pushed, tuple(reply.absent))

    def pull(self, have_round: int | None = None) -> Pulled:
        """Download the newest committed state.

        `have_round` is the round whose state the node trained from and still holds, with its own training on top:
        if the hub averaged that training into the newest state, what the node alone owns is not sent again. Without
        it all tensors have to be replaced (where weights travel with loss, the client may know most of them).
        """
        if (replica := self._replica) is None:
            opening, payload, give_back = self._download(have_round)
            return Pulled(opening, payload.shapes, opening.full, payload.read, give_back)
        replica.settle()
        base = replica.round
        opening, payload, give_back = self._download(base)
        try:
            replica.follow(payload, opening.round, opening.full, opening.absent)
        except PayloadError as e:
            give_back()
            if opening.full:
                raise
            # Such as after a push that the hub has lost, and without which it has closed the round.
            self._say(f"hub at {self.address}: {e}; pulling all of the state")
            replica.round = None
            return self.pull()
        except BaseException:
            give_back()
            raise
        knows = not opening.full and have_round == base == replica.pushed_round
        shapes = payload.shapes if knows else replica.shapes
        return Pulled(opening, shapes, not knows, replica.read, lambda: replica.settle_behind(payload, give_back))

    def _download(self, have_round: int | None) -> tuple[pb.PullOpening, StoredPayload, Callable[[], None]]:
        """The payload, and what gives its file back."""
        spool = self._spools.take("down")
        try:
            bounds = self._bounds
            opening = self._delivery.fetch(spool, have_round, bounds.payload if bounds else None)
            payload = StoredPayload(spool, f"state of round {opening.round}", bounds.header if bounds else None)
        except BaseException:
            self._spools.give_back("down", spool)
            raise
        return opening, payload, lambda: self._spools.give_back("down", spool)

    def push(
        self,
        round_: int,
        shapes: Mapping[str, Shape],
        tensors: Iterable[tuple[str, Tensor]],
        tokens: int = 0,
    ) -> None:
        """Send what this node trained in `round_` (the round of the state that it pulled).

        `tensors` are taken once, in the order of `shapes`, in any floating dtype; `tokens` counts what the node trained
        on in this round. In fp32, pushing the same values again is accepted.

        Raises:
            StaleRoundError: the round is closed: `wait_round(round_ + 1)`, pull, and go on.
            HubRefusedError: names, shapes or values are not what the hub expects of this node.
        """
        self._remember(None)
        spool = self._spools.take("up")
        try:
            metadata = {TOKENS_KEY: str(tokens)}
            if self._replica is None:
                size = write_payload(spool, in_fp32(shapes), tensors, metadata)
            else:
                size = self._replica.encode(spool, shapes, tensors, metadata)
            self._delivery.send(spool, pb.PushOpening(round=round_, total_bytes=size))
        except BaseException:
            self._spools.give_back("up", spool)
            raise
        self._remember(_Sent(round_, spool, size))
        if self._replica is not None:
            self._replica.accepted(round_)

    def _remember(self, sent: _Sent | None) -> None:
        """Keep the last push, until another one takes its place: the hub may lose it."""
        if self._sent is not None and self._sent.file is not None:
            self._spools.give_back("up", self._sent.file)
        self._sent = sent

    def _send_again(self, round_: int) -> None:
        """The hub lacks a push for `round_`. Nothing, if it never had one of this node."""
        sent = self._sent
        if sent is None or sent.round != round_:
            return
        if sent.file is None:
            raise PushLostError(f"hub at {self.address}: it has lost the push of node {self.node} for round {round_}")
        self._say(f"hub at {self.address}: it has lost this node's push for round {round_}; sending it again")
        with suppress(StaleRoundError):  # closed meanwhile, which the next answer says
            self._delivery.send(sent.file, pb.PushOpening(round=round_, total_bytes=sent.size))

    def wait_round(self, round_: int) -> int:
        """Wait until the state of `round_` is committed; returns the newest committed round, at least `round_`.

        A hub whose disk has damaged the push for the round before, and that has dropped it when it was started again,
        gets it once more.

        Raises:
            PushLostError: it was an older process of this node that pushed.
        """
        limit = self._wait_limit
        end = time.monotonic() + limit.seconds
        request = pb.WaitRequest(caller=self._caller, round=round_, timeout_s=POLL_S)

        def poll() -> pb.WaitReply:
            reply: pb.WaitReply = self._channel.open("WaitRound", request, attempt_s(POLL_S + ANSWER_S, end))
            return reply

        while (reply := self._channel.retrying(poll, end, limit)).round < round_:
            if time.monotonic() > end:
                raise DeadlineError(f"hub at {self.address}: round {round_} was not closed within {limit}")
            if reply.lacks_push:
                self._send_again(round_ - 1)
        return reply.round

    def leave(self) -> None:
        """Tell the hub that this node takes no more part, so that nobody waits for it."""
        self._channel.call("Leave", pb.LeaveRequest(caller=self._caller), ANSWER_S)

    def interrupt(self, ended: Callable[[], object]) -> None:
        """Make the calls that another thread is in fail, and all that come before `ended` returns."""
        self._channel.close()
        ended()
        self._channel.open_again()

    def status(self) -> dict[str, Any]:
        """What the hub is doing; keys are those of `StatusReply` in hub.proto."""
        return as_dict(self._channel.call("Status", pb.StatusRequest(), ANSWER_S))

    def save_residual(self, path: Path) -> None:
        """Write to a file what this node's pushes have lost so far, for a node that goes on in its place."""
        if self._replica is not None:
            self._replica.save_residual(path)

    def restore_residual(self, path: Path) -> None:
        """Go on from what `save_residual` wrote, before anything is read of the state that was pulled last.

        Raises PayloadError: it is not of this model, or damaged.
        """
        if self._replica is not None:
            self._replica.restore_residual(path)

    def close(self) -> None:
        self._channel.close()
        self._remember(None)
        self._spools.close()
        if self._replica is not None:
            self._replica.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
