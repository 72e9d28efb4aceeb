"""Bytes that are no message of this protocol.

gRPC answers them itself, but then keeps the call's stream and its memory for as long as the connection lasts. So they
are parsed here: what cannot be parsed comes to the service as MALFORMED, and is refused there as other faults are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest

from spes_mega.hub.faults import PayloadError

MALFORMED = object()
HEALTH = "/grpc.health.v1.Health/"


class MessageInterceptor(grpc.ServerInterceptor):
    """Lets requests that cannot be parsed through as MALFORMED; in the health service as the general question."""

    def intercept_service(self, continuation: Callable[[Any], Any], call: Any) -> Any:
        handler = continuation(call)
        if handler is None or handler.request_deserializer is None:
            return handler
        otherwise = HealthCheckRequest() if call.method.startswith(HEALTH) else MALFORMED
        return handler._replace(request_deserializer=partial(_parse, handler.request_deserializer, otherwise))


def _parse(parse: Callable[[bytes], Any], otherwise: Any, data: bytes) -> Any:
    try:
        return parse(data)
    except DecodeError:
        return otherwise


def parsed(request: Any) -> Any:
    """The request. Raises PayloadError if it could not be parsed."""
    if request is MALFORMED:
        raise PayloadError("these bytes are no message of this protocol")
    return request
