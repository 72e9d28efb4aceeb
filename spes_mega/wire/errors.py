"""How an error travels from hub to node: a gRPC status with the message, and its kind in the trailing metadata."""

import errno
from typing import NoReturn

import grpc

from spes_mega.errors import DeadlineError, HubRefusedError, SpesError, StoreError, StoreFullError
from spes_mega.quoting import printable

KIND_KEY = "spes-error-kind"
MAX_MESSAGE = 2000
"""Bytes in UTF-8. gRPC writes some as three, and bounds metadata to 8 KiB."""


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


class ScarceError(SpesError):
    """The hub's machine is short of something that it will have again, such as descriptors: retry later."""


_PASSING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN))


def passing(error: BaseException) -> ScarceError | None:
    """Return what to say of an error that comes from a shortage which passes; None if it does not.

    What reads files may have named it as damage of a file: what was behind that counts.
    """
    if isinstance(error, ScarceError):
        return error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _PASSING:
            return ScarceError(f"the hub's machine is short of something for now: {cause}")
        cause = cause.__cause__
    return None


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
    "scarce": (ScarceError, grpc.StatusCode.UNAVAILABLE),
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


def answer_with(context: grpc.ServicerContext, error: SpesError) -> NoReturn:
    """End a call with `error`, or with the shortage behind it; raises."""
    error = passing(error) or error
    kind, code = next((kind, code) for kind, (cls, code) in _KINDS.items() if isinstance(error, cls))
    context.set_trailing_metadata(((KIND_KEY, kind),))
    context.abort(code, printable(str(error)).encode()[:MAX_MESSAGE].decode(errors="ignore"))
    raise AssertionError("abort raises")


def answered_by_hub(call: grpc.RpcError) -> bool:
    """Whether a failed call got as far as the hub, and this is its word."""
    return KIND_KEY in dict(call.trailing_metadata() or ())


def error_of(call: grpc.RpcError, address: str) -> SpesError:
    """The error that a failed call stands for."""
    kind = dict(call.trailing_metadata() or ()).get(KIND_KEY)
    if kind in _KINDS:
        return _KINDS[kind][0](details_of(call))
    if call.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return HubRefusedError(f"hub at {address}: {details_of(call)}")
    return SpesError(f"hub at {address}: {call.code().name}: {details_of(call)}")


def details_of(call: grpc.RpcError) -> str:
    """What the other side, or gRPC, says of a failed call; safe to show."""
    return printable(str(call.details()))
