"""The RPCs: who calls is checked here, and errors become answers; the work is done by `Run`."""

import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from spes_mega.errors import HubRefusedError, SpesError, StoreError
from spes_mega.hub.rounds.members import Presence
from spes_mega.hub.rounds.shutdown import Stopped
from spes_mega.hub.rpc.auth import Guard
from spes_mega.hub.run import Run
from spes_mega.quoting import quoted
from spes_mega.wire.errors import BrokenTransferError, BusyError, PayloadError, answer_with, passing
from spes_mega.wire.frames import PREFIX_BYTES
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.proto.hub_pb2_grpc import HubServicer
from spes_mega.wire.protocol import PROTOCOL

MAX_WAIT_S = 60.0
CUT_S = 0.5
NOT_BACK = "not back yet"
"""In place of "never joined", of a node that has taken part before."""
_SESSION = re.compile(r"[\x21-\x7e]{1,64}")
Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def _errors_answered(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except SpesError as e:
        answer_with(context, e)
    except OSError as e:
        answer_with(context, passing(e) or StoreError(f"the hub cannot use its state directory: {e}"))
    except Stopped:
        context.abort(grpc.StatusCode.UNAVAILABLE, "the hub is stopping")


def _answering(method: Method) -> Method:
    """Turn errors of a unary RPC into its answer."""

    @wraps(method)
    def answer(self: "HubService", request: Any, context: grpc.ServicerContext) -> Any:
        with _errors_answered(context):
            return method(self, request, context)

    return answer  # type: ignore[return-value]


class HubService(HubServicer):
    """Serves one run."""

    def __init__(self, run: Run, guard: Guard) -> None:
        self._run = run
        self._guard = guard
        self._digest = run.state.recipe.digest()

    @_answering
    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        node = self._identify(request.caller, context)
        rounds = self._run.state.rounds
        rounds.attendance.join(node, request.caller.session)
        newest = self._run.state.newest
        return pb.JoinReply(
            round=newest.round,
            num_rounds=self._run.state.recipe.num_rounds,
            pushed=rounds.has_pushed(node, newest.round),
            absent=newest.absent,
        )

    @_answering
    def Offer(self, request: pb.OfferRequest, context: grpc.ServicerContext) -> pb.OfferReply:
        with self._listing(request, context):
            return self._run.receiver.offered(self._check(request.caller, context), request)

    @_answering
    def Push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushReply:
        opening = _opening(next(messages, b""))
        with self._listing(opening, context):
            node = self._check(opening.caller, context)
            frames = _frames(messages, opening, context)
            return pb.PushReply(repeated=self._run.receiver.receive(node, opening, frames, context.cancel))

    @contextmanager
    def _listing(self, push: pb.OfferRequest | pb.PushOpening, context: grpc.ServicerContext) -> Iterator[None]:
        """List a push that is refused, or breaks off, if it is really of the node that it names."""
        self._guard.check_node(push.caller.node, context)
        try:
            yield
        except (BusyError, BrokenTransferError):
            raise
        except HubRefusedError as e:
            self._run.state.ledger.reject(push.caller.node, push.round, str(e))
            raise
        except grpc.RpcError:
            self._run.state.ledger.reject(push.caller.node, push.round, "the upload broke off")
            raise

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        with _errors_answered(context):
            yield from self._run.sender.send(self._check(request.caller, context), request)

    @_answering
    def WaitRound(self, request: pb.WaitRequest, context: grpc.ServicerContext) -> pb.WaitReply:
        node = self._check(request.caller, context)
        self._run.state.rounds.wait_round(request.round, _wait_s(request))
        newest = self._run.state.newest
        lacks_push = self._run.state.rounds.lacks_push(node, request.round - 1)
        return pb.WaitReply(round=newest.round, absent=newest.absent, lacks_push=lacks_push)

    @_answering
    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveReply:
        self._run.state.rounds.attendance.leave(self._identify(request.caller, context), request.caller.session)
        return pb.LeaveReply()

    @_answering
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        state, rounds = self._run.state, self._run.state.rounds
        kept = state.ledger.as_json()
        presence, newest = rounds.attendance.presence(), state.newest
        owned = state.ownership
        return pb.StatusReply(
            name=state.recipe.name,
            digest=self._digest,
            round=state.newest.round,
            num_rounds=state.recipe.num_rounds,
            step=state.newest.step,
            steps=state.recipe.train.steps,
            merges=kept["merges"],
            waiting_for=[] if state.finished else rounds.waiting_for(),
            round_seconds=rounds.clock.seconds_open(),
            nodes=[
                pb.NodeStatus(
                    node=node,
                    state=_state(presence[node], traffic["last_pushed_round"]),
                    absent=node in newest.absent,
                    experts=owned.owned(node),
                    **traffic,
                )
                for node, traffic in enumerate(kept["nodes"])
            ],
            rounds=[pb.RoundStatus(**record) for record in kept["rounds"]],
            trouble=state.disk.trouble,
            rejected=[pb.RejectionStatus(**rejection) for rejection in kept["rejected"]],
        )

    def _identify(self, caller: pb.Caller, context: grpc.ServicerContext) -> int:
        """The node that calls. Raises HubRefusedError unless it is that node, and speaks of the same run."""
        num_nodes = self._run.state.recipe.spes.num_nodes
        if caller.protocol != PROTOCOL:
            raise HubRefusedError(
                f"node {caller.node} speaks protocol {caller.protocol}, the hub {PROTOCOL}: install the same version "
                "of spes-mega on both"
            )
        if caller.digest != self._digest:
            raise HubRefusedError(
                f"node {caller.node} has another recipe (digest {quoted(caller.digest[:12])}, the hub's is "
                f"{self._digest[:12]}): model, spes and train must be the same, but for fields marked local; compare "
                "what `spes-mega recipe RECIPE` prints on both machines"
            )
        if caller.node >= num_nodes:
            raise HubRefusedError(f"there is no node {caller.node}: spes.num_nodes is {num_nodes} (0..{num_nodes - 1})")
        if not _SESSION.fullmatch(caller.session):  # it is kept on the disk
            raise HubRefusedError(f"node {caller.node} names no session: 1 to 64 printable ASCII characters are needed")
        self._guard.check_node(caller.node, context)
        return int(caller.node)

    def _check(self, caller: pb.Caller, context: grpc.ServicerContext) -> int:
        node = self._identify(caller, context)
        self._run.state.rounds.attendance.heard(node, caller.session)
        return node


def _state(presence: Presence, last_pushed_round: int | None) -> str:
    """A node that had left, or whose membership was forgotten, has to join anew after a restart of the hub."""
    back = presence is not Presence.NEVER_JOINED or last_pushed_round is None
    return presence.value if back else NOT_BACK


def _frames(messages: Iterator[bytes], opening: pb.PushOpening, context: grpc.ServicerContext) -> Iterator[bytes]:
    """The frames of a push. Raises grpc.RpcError if the call was cut.

    gRPC may show the end of the stream just before it shows that the call was cut: then the bytes that came have to
    stay for the next attempt, which those of a node that says it has sent all do not.
    """
    missing = opening.total_bytes - opening.offset
    for frame in messages:
        missing -= len(frame) - PREFIX_BYTES
        yield frame
    over = threading.Event()
    if missing > 0 and (not context.add_callback(over.set) or over.wait(CUT_S)):
        raise grpc.RpcError


def _wait_s(request: pb.WaitRequest) -> float:
    """How long a node may wait. Raises PayloadError unless it says a number of seconds."""
    if not 0 <= request.timeout_s < math.inf:
        raise PayloadError(f"timeout_s is {request.timeout_s}: a number of seconds, 0 or more, is expected")
    return min(request.timeout_s, MAX_WAIT_S)


def _opening(message: bytes) -> pb.PushOpening:
    try:
        opening = pb.PushOpening.FromString(message)
    except DecodeError as e:
        raise PayloadError("a push begins with its opening") from e
    if not opening.HasField("caller"):
        raise PayloadError("a push begins with its opening")
    return opening
