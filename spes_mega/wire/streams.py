"""The two methods that carry weights. Their first message is the opening in hub.proto, all others are frames."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.proto.hub_pb2_grpc import HubStub

_SERVICE = "spes_mega.hub.v1.Transfer"


class Transfers(Protocol):
    """What the hub does with them."""

    def Push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushReply: ...

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> Iterator[bytes]: ...


def add_transfers(service: Transfers, server: grpc.Server) -> None:
    """Let a server answer Push and Pull by those of `service`."""
    methods = {
        "Push": grpc.stream_unary_rpc_method_handler(service.Push, response_serializer=pb.PushReply.SerializeToString),
        "Pull": grpc.unary_stream_rpc_method_handler(service.Pull, request_deserializer=pb.PullRequest.FromString),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))


class Stub(HubStub):
    """All methods of the hub, on a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        self.Push: Callable[..., Any] = channel.stream_unary(
            f"/{_SERVICE}/Push", response_deserializer=pb.PushReply.FromString
        )
        self.Pull: Callable[..., Any] = channel.unary_stream(
            f"/{_SERVICE}/Pull", request_serializer=pb.PullRequest.SerializeToString
        )
