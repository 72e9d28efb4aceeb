"""How an error travels from hub to node: a gRPC status with the message, and its kind in the trailing metadata."""

from typing import NoReturn

import grpc

from spes_mega.errors import DeadlineError, HubRefusedError, SpesError, StoreError, StoreFullError

KIND_KEY = "spes-error-kind"
MAX_MESSAGE = 2000  # gRPC bounds metadata to 8 KiB


class StaleRoundError(HubRefusedError):
    """A push came for a round that is closed: pull the newest one and go on from there."""


class PushLostError(HubRefusedError):
    """The hub has lost a push that it had taken, and this process does not have it any more: train the round again."""


class PayloadError(HubRefusedError):
    """Weights arrived malformed: a bad checksum, a gap, or a size, name, shape or dtype that was not expected."""


class OversizedError(PayloadError):
    """A payload is announced that is larger than any that can be meant; trying again gives the same."""


class DamagedError(PayloadError):
    """A chunk was damaged on its way; what came before it stands, and the transfer can go on from there."""


class BrokenTransferError(HubRefusedError):
    """A transfer wants to go on from what the hub does not hold, or was overtaken: ask, and begin again."""


class BusyError(HubRefusedError):
    """Too much is under way for this node: later."""


class FullError(StoreFullError):
    """There is no room for it on the hub's disk yet: later."""


# The first class that an error is an instance of decides.
_KINDS: dict[str, tuple[type[SpesError], grpc.StatusCode]] = {
    "damaged": (DamagedError, grpc.StatusCode.DATA_LOSS),
    "broken": (BrokenTransferError, grpc.StatusCode.UNAVAILABLE),
    "busy": (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "stale": (StaleRoundError, grpc.StatusCode.FAILED_PRECONDITION),
    "payload": (PayloadError, grpc.StatusCode.INVALID_ARGUMENT),
    "refused": (HubRefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    "deadline": (DeadlineError, grpc.StatusCode.ABORTED),
    "full": (FullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "store": (StoreError, grpc.StatusCode.ABORTED),
    "error": (SpesError, grpc.StatusCode.ABORTED),
}
# All calls may be repeated, so that a line that fell silent in the middle of one is as good as one that broke.
TRANSIENT = {
    grpc.StatusCode.CANCELLED,  # a hub that stops ends what is under way so
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}


def printable(text: str) -> str:
    """Text that quotes a peer, safe to encode and to show on a terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def answer_with(context: grpc.ServicerContext, error: SpesError) -> NoReturn:
    """End a call with `error`; raises."""
    kind, code = next((kind, code) for kind, (cls, code) in _KINDS.items() if isinstance(error, cls))
    context.set_trailing_metadata(((KIND_KEY, kind),))
    context.abort(code, printable(str(error)[:MAX_MESSAGE]))
    raise AssertionError("abort raises")


def answered_by_hub(call: grpc.RpcError) -> bool:
    """Whether a failed call got as far as the hub, and this is its word."""
    return KIND_KEY in dict(call.trailing_metadata() or ())


def error_of(call: grpc.RpcError, address: str) -> SpesError:
    """The error that a failed call stands for."""
    kind = dict(call.trailing_metadata() or ()).get(KIND_KEY)
    if kind in _KINDS:
        return _KINDS[kind][0](call.details())
    if call.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return HubRefusedError(f"hub at {address}: {call.details()}")
    return SpesError(f"hub at {address}: {call.code().name}: {call.details()}")
