"""Which calls are let in.

This is decided before a call takes a thread or anything of it is read: who calls is known by its token, each caller has
few calls of a kind under way, and a message has to come soon. All that is refused, and health checks, which need no
token, have a few threads of their own, so that strangers cannot hold up the nodes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import DecodeError

from spes_mega.hub.rpc.auth import ANYONE, Guard
from spes_mega.hub.rpc.connections import Connections
from spes_mega.hub.rpc.health import CHECK
from spes_mega.hub.rpc.limits import Call, Lanes
from spes_mega.security.access import TOKEN_VARIABLE
from spes_mega.security.keys import WATCH
from spes_mega.wire.errors import BusyError, PayloadError, answer_with

# Of one node at a time: one, and broken ones that gRPC has not noticed yet.
MAX_PUSHES = 4
MAX_DOWNLOADS = 4
MAX_WAITS = 4
MAX_OTHERS = 4
HEALTH_CHECKS = 16
_REFUSALS = 2
_STATUS = "/spes_mega.hub.v1.Hub/Status"
_NO_TOKEN = f"the token is missing or wrong: give the hub's with --keys or --token-file, or set {TOKEN_VARIABLE}"
_WATCH_ONLY = f"the keys in DIR/{WATCH} are for `spes-mega status` alone"


class _Kind(NamedTuple):
    limit: int
    what: str


_KINDS = {
    "/spes_mega.hub.v1.Transfer/Push": _Kind(MAX_PUSHES, "pushes"),
    "/spes_mega.hub.v1.Transfer/Pull": _Kind(MAX_DOWNLOADS, "downloads"),
    "/spes_mega.hub.v1.Hub/WaitRound": _Kind(MAX_WAITS, "waits"),
}
_OTHER = _Kind(MAX_OTHERS, "calls")
_CALLS_PER_NODE = sum(kind.limit for kind in (*_KINDS.values(), _OTHER))


class Threads(ThreadPoolExecutor):
    """A pool that outlives a moment in which the system has no thread for it: what is queued is done by the others."""

    def __init__(self, workers: int, name: str) -> None:
        super().__init__(workers, thread_name_prefix=name)
        super().submit(int).result()  # one is there from the start

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if self._shutdown:
                raise
            return Future()


class Admission(grpc.ServerInterceptor):
    """Lets calls in, and ends those that take too long; see the top of this module."""

    def __init__(self, guard: Guard, num_nodes: int, lanes: Lanes, connections: Connections) -> None:
        self._guard, self._lanes, self._connections = guard, lanes, connections
        self._num_nodes = num_nodes
        self.threads = Threads(_CALLS_PER_NODE * num_nodes + MAX_OTHERS, "rpc")
        """For the server: as many as all callers together can take up."""
        self._health = Threads(HEALTH_CHECKS, "health")
        self._refusals = Threads(_REFUSALS, "refusal")
        self._stranger = self._refusing(lambda context: context.abort(grpc.StatusCode.UNAUTHENTICATED, _NO_TOKEN))
        self._watcher = self._refusing(lambda context: context.abort(grpc.StatusCode.PERMISSION_DENIED, _WATCH_ONLY))

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        if details.method == CHECK:
            return self._let_in(continuation(details), CHECK, _Kind(HEALTH_CHECKS, "health checks"), None)
        caller = self._guard.caller(details.invocation_metadata)
        if caller is None:
            return self._stranger
        if caller == WATCH and details.method != _STATUS:
            return self._watcher
        if (handler := continuation(details)) is None:
            return None  # no such method
        kind = _KINDS.get(details.method, _OTHER)
        # A token that all share does not say whose call it is.
        limit = kind.limit * (self._num_nodes if caller == ANYONE else 1)
        return self._let_in(handler, caller, kind._replace(limit=limit), caller)

    def _let_in(self, handler: Any, who: str, kind: _Kind, caller: str | None) -> Any:
        lane = who, kind.what
        call = self._lanes.enter(lane, kind.limit)
        if call is None:
            busy = BusyError(f"{who} has {kind.limit} {kind.what} under way; retry later")
            return self._refusing(lambda context: answer_with(context, busy))
        admitted = partial(self._admitted, handler, lane, call, caller)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _streaming(handler, admitted), response_serializer=handler.response_serializer
            )
        answer = _single(handler, admitted)
        if caller is None:
            answer.experimental_thread_pool = self._health  # type: ignore[attr-defined]
        return grpc.stream_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)

    @contextmanager
    def _admitted(
        self,
        handler: Any,
        lane: tuple[str, str],
        call: Call,
        caller: str | None,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
    ) -> Iterator[Any]:
        """What the method is given of a call, as soon as its first message is there."""
        try:
            call.begin(context.cancel)
            if caller is not None:
                self._connections.belongs(context.peer(), caller)
            first = next(messages, None)
            self._lanes.arrived(call)
            yield _argument(handler, first, messages, context)
        finally:
            self._lanes.leave(lane, call)

    def _refusing(self, answer: Callable[[grpc.ServicerContext], NoReturn]) -> Any:
        def refuse(messages: Any, context: grpc.ServicerContext) -> NoReturn:
            answer(context)

        refuse.experimental_thread_pool = self._refusals  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(refuse)


def _streaming(handler: Any, admitted: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        with admitted(messages, context) as request:
            yield from handler.unary_stream(request, context)

    return answer


def _single(handler: Any, admitted: Callable[..., Any]) -> Callable[..., Any]:
    method = handler.stream_unary or handler.unary_unary

    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        with admitted(messages, context) as request:
            return method(request, context)

    return answer


def _argument(handler: Any, first: bytes | None, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
    """The request, or all messages of an upload. Ends the call if its bytes are no message of this protocol.

    gRPC would answer that itself, but keep the call's stream and memory for as long as the connection lasts.
    """
    if handler.request_streaming:
        return chain((first or b"",), messages)
    try:
        return handler.request_deserializer(first or b"")
    except DecodeError:
        answer_with(context, PayloadError("malformed request: these bytes are no message of this protocol"))
