"""The node's line to the hub: channel options, token, retries with backoff, errors."""

from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from spes_mega.errors import DeadlineError
from spes_mega.hub.faults import TRANSIENT, PayloadError, error_of
from spes_mega.hub.proto.hub_pb2_grpc import HubStub

T = TypeVar("T")
# Pings keep idle connections through NATs alive during an hour of local training, and find dead ones.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
)


class Channel:
    """Calls the hub's methods; what is transient is tried again until `deadline_s` is over."""

    def __init__(self, address: str, token: str | None, deadline_s: float) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = HubStub(self._channel)

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """A unary call with retries. Raises the SpesError that the hub answered, or DeadlineError."""
        return self.retrying(lambda: self.open(method, request, timeout_s))

    def open(self, method: str, request: Any, timeout_s: float) -> Any:
        """One attempt at any call, streaming or not; gRPC's own errors."""
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)

    def retrying(self, attempt: Callable[[], T]) -> T:
        """Run `attempt` until it succeeds, fails for good, or the deadline is over."""
        policy = Retrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            stop=stop_after_delay(self.deadline_s),
            retry_error_callback=self._give_up,
        )
        try:
            return policy(attempt)
        except grpc.RpcError as e:
            raise error_of(e, self.address) from e

    def _give_up(self, state: RetryCallState) -> Any:
        last = state.outcome.exception() if state.outcome else None
        text = last.details() if isinstance(last, grpc.RpcError) else str(last)
        raise DeadlineError(
            f"hub at {self.address}: no success within {self.deadline_s:g} s (last: {text}); "
            "is it running, and can this machine reach it?"
        ) from last

    def close(self) -> None:
        self._channel.close()


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, grpc.RpcError):
        return error.code() in TRANSIENT
    return isinstance(error, PayloadError)  # a download that was damaged on its way
