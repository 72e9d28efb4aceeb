"""A pull: the newest state for a node, without what it has already."""

from collections.abc import Iterator
from contextlib import closing

import xxhash

from spes_mega.hub.pull.contents import pull_contents
from spes_mega.hub.pull.pull_payload import PullPayload
from spes_mega.hub.run_state import RunState
from spes_mega.wire.frames import PREFIX_BYTES, frames
from spes_mega.wire.proto import hub_pb2 as pb


class Sender:
    """Send states to nodes. Takes no lock while it sends: the files of a state do not change."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    def send(self, node: int, request: pb.PullRequest) -> Iterator[bytes]:
        """Yield an opening, then frames, from where an earlier attempt broke off if that was of the same payload.

        Raises:
            Stopped, SpesError: see `Rounds.settle`.
            CheckpointError, StoreError: a file of the state is missing or damaged.
        """
        have_round = request.have_round if request.HasField("have_round") else None
        self._state.rounds.settle()
        record, at_once = self._state.newest, self._state.chunk_bytes
        contents = pull_contents(self._state, node, have_round, record)
        with closing(self._state.store.open_state(record.round)) as published:
            payload = PullPayload(published, contents.parts, self._state.policy)
            total, payload_id = payload.total_bytes, f"{record.round}-{xxhash.xxh3_64_hexdigest(payload.header)}"
            begin = request.part_bytes if request.part == payload_id and request.part_bytes <= total else 0
            yield pb.PullOpening(
                round=record.round,
                total_bytes=total,
                full=contents.full,
                absent=record.absent,
                payload=payload_id,
                offset=begin,
            ).SerializeToString()
            for frame in frames(payload.pieces(at_once), at_once, begin):
                count = len(frame) - PREFIX_BYTES
                yield frame
                self._state.ledger.count_down(node, count)
        self._state.rounds.served(node, record.round)
