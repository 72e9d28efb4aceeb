"""Who may speak to the hub: one shared token, and no open port without it."""

import hmac
import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc

from spes_mega.errors import HubRefusedError

TOKEN_VARIABLE = "SPES_MEGA_TOKEN"
_HEALTH = "/grpc.health.v1.Health/"


def read_token(token_file: Path | None) -> str | None:
    """The token in `token_file`, or else in the environment variable SPES_MEGA_TOKEN; None without either.

    Raises:
        HubRefusedError: the file cannot be read, or the token is empty or not plain printable ASCII.
    """
    if token_file is None:
        token, source = os.environ.get(TOKEN_VARIABLE), f"environment variable {TOKEN_VARIABLE}"
        if token is None:
            return None
    else:
        source = str(token_file)
        try:
            token = token_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise HubRefusedError(f"{source}: cannot read the token: {e}") from e
    token = token.strip()
    if not (token and token.isascii() and token.isprintable()) or " " in token:
        raise HubRefusedError(f"{source}: a token is one word of printable ASCII characters")
    return token


def check_listen(address: str, token: str | None) -> None:
    """Raises HubRefusedError if `address` can be reached from other machines and there is no token."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise HubRefusedError(f"--listen {address}: expected HOST:PORT")
    if token is None and not _is_loopback(host.strip("[]")):
        raise HubRefusedError(
            f"--listen {address} can be reached by other machines, so a token is needed: "
            f"give --token-file, or set {TOKEN_VARIABLE}"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TokenInterceptor(grpc.ServerInterceptor):
    """Refuses calls without the token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        given = dict(call.invocation_metadata).get("authorization", "")
        given = given.encode() if isinstance(given, str) else given
        if call.method.startswith(_HEALTH) or hmac.compare_digest(given, self._expected):
            return continuation(call)
        return self._refusal


def _refuse(requests: Any, context: grpc.ServicerContext) -> NoReturn:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        f"the token is missing or wrong: give the hub's with --token-file or {TOKEN_VARIABLE}",
    )
    raise AssertionError("abort raises")
