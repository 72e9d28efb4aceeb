"""The node's line to the hub: channel options, TLS, token, retries with backoff, errors."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from spes_mega.client.retry_notice import RetryNotice
from spes_mega.client.tls_probe import check_handshake
from spes_mega.errors import DeadlineError
from spes_mega.quoting import printable
from spes_mega.security.access import Access
from spes_mega.security.keys import CallerTls
from spes_mega.wire.errors import TRANSIENT, OversizedError, PayloadError, answered_by_hub, details_of, error_of
from spes_mega.wire.streams import Stub

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


MIN_ATTEMPT_S = 1.0


@dataclass(frozen=True)
class Limit:
    """How long something is tried, and the setting that says so, for messages."""

    seconds: float
    setting: str = ""

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (f" ({self.setting})" if self.setting else "")


class Channel:
    """Calls the hub's methods; what is transient is tried again until `limit` is over."""

    def __init__(
        self, address: str, access: Access, limit: Limit, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """`say` gets a line now and then while a call keeps failing."""
        self.address = address
        self._say = say
        self.limit = limit
        self._tls = access.tls
        self._metadata = (("authorization", f"Bearer {access.token}"),) if access.token else ()
        self.open_again()

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """A unary call that may be repeated. Raises the SpesError that the hub answered, or DeadlineError.

        An attempt is given up after `timeout_s`, all of them together after the channel's limit.
        """
        end = time.monotonic() + self.limit.seconds
        return self.retrying(lambda: self.open(method, request, attempt_s(timeout_s, end)), end)

    def open(self, method: str, request: Any, timeout_s: float) -> Any:
        """One attempt at any call, streaming or not; gRPC's own errors."""
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)

    def retrying(self, attempt: Callable[[], T], end: float, limit: Limit | None = None) -> T:
        """Run `attempt` until it succeeds, fails for good, or it is `end` (of time.monotonic).

        `limit` (default: the channel's) is what the end follows from.
        """
        limit = limit or self.limit
        notice = RetryNotice(f"hub at {self.address}", end, limit.setting, self._say)
        policy = Retrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            stop=lambda state: time.monotonic() >= end,
            before_sleep=lambda state: notice.failed(_reason(state)),
            retry_error_callback=lambda state: self._give_up(state, limit),
        )
        try:
            return policy(self._checked, attempt)
        except grpc.RpcError as e:
            raise error_of(e, self.address) from e

    def _checked(self, attempt: Callable[[], T]) -> T:
        try:
            return attempt()
        except grpc.RpcError as e:
            if e.code() == grpc.StatusCode.UNAVAILABLE and not answered_by_hub(e):
                check_handshake(self.address, self._tls)
            raise

    def _give_up(self, state: RetryCallState, limit: Limit) -> Any:
        raise DeadlineError(
            f"hub at {self.address}: no success within {limit} (last: {_reason(state)}); "
            "is it running, and can this machine reach it?"
        ) from _failure(state)

    def close(self) -> None:
        """End all calls that are under way, and refuse others."""
        self._channel.close()

    def open_again(self) -> None:
        self._channel = _open(self.address, self._tls)
        self._stub = Stub(self._channel)


def _open(address: str, tls: CallerTls | None) -> Any:
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def attempt_s(timeout_s: float, end: float) -> float:
    """Seconds for one attempt, when all of them together have to be done at `end` (of time.monotonic)."""
    return max(min(timeout_s, end - time.monotonic()), MIN_ATTEMPT_S)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, grpc.RpcError):
        return error.code() in TRANSIENT
    # a download that was damaged on its way
    return isinstance(error, PayloadError) and not isinstance(error, OversizedError)


def _failure(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _reason(state: RetryCallState) -> str:
    failure = _failure(state)
    return details_of(failure) if isinstance(failure, grpc.RpcError) else printable(str(failure))
