"""What a running hub is doing, asked without loading anything heavy."""

from typing import Any

from spes_mega.client.channel import Channel, Limit
from spes_mega.security.access import Access
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.protocol import as_dict

ATTEMPT_S = 30.0


def read_status(address: str, access: Access, timeout_s: float) -> dict[str, Any]:
    """The hub's status; keys are those of `StatusReply` in hub.proto.

    Raises:
        HubRefusedError: it does not accept the token or the keys.
        DeadlineError: no answer within `timeout_s`.
    """
    channel = Channel(address, access, Limit(timeout_s))
    try:
        return as_dict(channel.call("Status", pb.StatusRequest(), ATTEMPT_S))
    finally:
        channel.close()
