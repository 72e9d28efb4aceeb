"""The node's side of a transfer: a payload goes from a file to the hub, or comes from there to a file.

What broke goes on where it stopped.
"""

import time
import uuid
from collections.abc import Iterator
from typing import BinaryIO

from google.protobuf.message import DecodeError

from spes_mega.client.channel import Channel, attempt_s
from spes_mega.wire.errors import OversizedError, PayloadError
from spes_mega.wire.frames import MAX_CHUNK_BYTES, PREFIX_BYTES, Arrival, file_pieces, frames
from spes_mega.wire.proto import hub_pb2 as pb

ANSWER_S = 30.0
"""Seconds for an answer that the hub gives at once; then the same is asked again."""


class Delivery:
    """Sends and fetches payloads, and counts their bytes: all that went over the line, be it more than once."""

    def __init__(self, channel: Channel, caller: pb.Caller) -> None:
        self._channel = channel
        self._caller = caller
        self.bytes_up = 0
        self.bytes_down = 0

    def send(self, file: BinaryIO, opening: pb.PushOpening) -> None:
        """Push a complete payload. Raises what the hub answers, or DeadlineError."""
        opening.caller.CopyFrom(self._caller)
        opening.payload = uuid.uuid4().hex
        offer = pb.OfferRequest(
            caller=self._caller, round=opening.round, payload=opening.payload, total_bytes=opening.total_bytes
        )
        end = time.monotonic() + self._channel.limit.seconds

        def attempt() -> None:
            reply = self._channel.open("Offer", offer, attempt_s(ANSWER_S, end))
            if not reply.complete:
                if reply.offset > opening.total_bytes or not reply.chunk_bytes:
                    raise OversizedError(
                        f"the hub wants byte {reply.offset} of {opening.total_bytes} in chunks of {reply.chunk_bytes}"
                    )
                opening.offset = reply.offset
                messages = self._messages(file, opening, min(reply.chunk_bytes, MAX_CHUNK_BYTES))
                self._channel.open("Push", messages, attempt_s(self._channel.limit.seconds, end))

        self._channel.retrying(attempt, end)

    def _messages(self, file: BinaryIO, opening: pb.PushOpening, chunk: int) -> Iterator[bytes]:
        yield opening.SerializeToString()
        pieces = file_pieces(file.fileno(), opening.total_bytes, chunk)
        for frame in frames(pieces, chunk, opening.offset):
            count = len(frame) - PREFIX_BYTES
            yield frame
            self.bytes_up += count

    def fetch(self, file: BinaryIO, have_round: int | None, most: int | None) -> pb.PullOpening:
        """Fill a file with the newest state, of `most` bytes at the most; returns what the hub says of it.

        Raises what `send` raises; OversizedError before anything is written.
        """
        request = pb.PullRequest(caller=self._caller, have_round=have_round)
        end = time.monotonic() + self._channel.limit.seconds
        return self._channel.retrying(lambda: self._fetch(file, request, end, most), end)

    def _fetch(self, file: BinaryIO, request: pb.PullRequest, end: float, most: int | None) -> pb.PullOpening:
        messages = self._channel.open("Pull", request, attempt_s(self._channel.limit.seconds, end))
        opening = _opening(next(messages, b""))
        if most is not None and opening.total_bytes > most:
            messages.cancel()
            raise OversizedError(f"the hub announces a state of {opening.total_bytes} bytes: expected at most {most}")
        if opening.offset not in (0, request.part_bytes):
            raise PayloadError(f"the hub goes on from byte {opening.offset}, which nobody asked for")
        arrival = Arrival(file.fileno(), opening.total_bytes, opening.offset)
        request.part = opening.payload
        try:
            for frame in messages:
                self.bytes_down += arrival.take(frame)
            arrival.finish()
        finally:
            request.part_bytes = arrival.received
        file.truncate(opening.total_bytes)
        return opening


def _opening(message: bytes) -> pb.PullOpening:
    try:
        return pb.PullOpening.FromString(message)
    except DecodeError as e:
        raise PayloadError("the hub's answer does not begin with an opening") from e
