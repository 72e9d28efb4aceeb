"""What the hub remembers of a run beside the weights; stored with each committed state.

A hub that is started again goes on from the ledger of the last commit, and counts the pushes that are stored for the
open round anew. Lost is what came in between and left nothing on the disk: bytes sent to nodes (`bytes_down`), bytes of
uploads that were refused or broke off, and rejections.
"""

import threading
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from spes_mega.quoting import printable

KEPT = 20
"""Rounds that are remembered."""
KEPT_REJECTIONS = 100
MAX_REASON = 500


@dataclass(frozen=True)
class RoundRecord:
    """One closed round; `round` is the number of the state that it gave, and round 0 is the initial state."""

    round: int
    step: int
    nodes: tuple[int, ...] = ()
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    tokens: int = 0
    merge_alpha: float | None = None
    absent: tuple[int, ...] = ()
    """Nodes whose experts others train from this state on, until the next one."""
    similarity: float | None = None
    """How alike the experts were when they were merged: the mean cosine similarity of different ones of a layer."""

    @property
    def merged(self) -> bool:
        return self.merge_alpha is not None


@dataclass(frozen=True)
class Rejection:
    """A push that was refused or broke off."""

    node: int
    round: int
    reason: str


@dataclass
class NodeTraffic:
    """Payload bytes of one node since the run began, but for those lost with a hub (see the top of this module)."""

    last_pushed_round: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    update_norm: float | None = None
    """L2 norm of its last update, where spes.max_update_norm is set."""


@dataclass
class Ledger:
    """Traffic of each node, the last rounds and rejections, merges so far. Safe to use from several threads."""

    nodes: dict[int, NodeTraffic]
    rounds: deque[RoundRecord] = field(default_factory=lambda: deque(maxlen=KEPT))
    rejected: deque[Rejection] = field(default_factory=lambda: deque(maxlen=KEPT_REJECTIONS))
    merges: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _round_up: int = 0
    _round_down: int = 0

    @classmethod
    def empty(cls, num_nodes: int) -> Self:
        """The ledger of a run that has only its initial state."""
        ledger = cls({node: NodeTraffic() for node in range(num_nodes)})
        ledger.rounds.append(RoundRecord(round=0, step=0))
        return ledger

    def count_up(self, node: int, count: int) -> None:
        with self._lock:
            self.nodes[node].bytes_up += count
            self._round_up += count

    def count_down(self, node: int, count: int) -> None:
        with self._lock:
            self.nodes[node].bytes_down += count
            self._round_down += count

    def pushed(self, node: int, round_: int) -> None:
        with self._lock:
            self.nodes[node].last_pushed_round = round_

    def measured(self, node: int, update_norm: float) -> None:
        with self._lock:
            self.nodes[node].update_norm = update_norm

    def includes(self, node: int, round_: int) -> bool:
        """Whether a push of the node was averaged when `round_` was closed; False if that is too long ago to tell."""
        with self._lock:
            return any(record.round == round_ + 1 and node in record.nodes for record in self.rounds)

    def record(self, round_: int) -> RoundRecord | None:
        """The record of a round; None if it is too old."""
        with self._lock:
            return next((record for record in self.rounds if record.round == round_), None)

    def missed(self, node: int, round_: int) -> int:
        """For how many rounds in a row, up to `round_`, the node has not contributed."""
        with self._lock:
            last = self.nodes[node].last_pushed_round
            return round_ - (-1 if last is None else last)

    def reject(self, node: int, round_: int, reason: str) -> None:
        with self._lock:
            self.rejected.append(Rejection(node, round_, printable(reason, MAX_REASON)))

    def close_round(self, record: RoundRecord) -> None:
        """Append the record of a round, with the bytes moved since the last one."""
        with self._lock:
            self._append(replace(record, bytes_up=self._round_up, bytes_down=self._round_down))

    def dropped(self, node: int, round_: int, reason: str) -> None:
        """The push of a node that was taken into the open round is not to be used."""
        self.reject(node, round_, reason)
        with self._lock:
            counted = [record.round - 1 for record in self.rounds if node in record.nodes]
            self.nodes[node].last_pushed_round = max(counted, default=None)

    def _append(self, record: RoundRecord) -> None:
        self._round_up -= record.bytes_up
        self._round_down -= record.bytes_down
        self.rounds.append(record)
        self.merges += record.merged
        for node in record.nodes:  # who received a push notes it only after the close could have taken it
            self.nodes[node].last_pushed_round = record.round - 1

    def copy(self) -> Self:
        """One to be written with a state that may fail to be committed."""
        copy = type(self).from_json(self.as_json())
        copy._round_up, copy._round_down = self._round_up, self._round_down
        return copy

    def follow(self, copy: Self) -> None:
        """The round that was closed in a copy is committed."""
        with self._lock:
            self._append(copy.rounds[-1])

    def as_json(self) -> dict[str, Any]:
        with self._lock:
            return {
                "nodes": [asdict(traffic) for _, traffic in sorted(self.nodes.items())],
                "rounds": [asdict(record) for record in self.rounds],
                "rejected": [asdict(rejection) for rejection in self.rejected],
                "merges": self.merges,
            }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError on anything that `as_json` did not write."""
        ledger = cls({node: NodeTraffic(**traffic) for node, traffic in enumerate(raw["nodes"])})
        ledger.rounds.extend(_record(record) for record in raw["rounds"])
        ledger.rejected.extend(Rejection(**rejection) for rejection in raw["rejected"])
        ledger.merges = int(raw["merges"])
        return ledger


def _record(raw: dict[str, Any]) -> RoundRecord:
    return RoundRecord(**{**raw, "nodes": tuple(raw["nodes"]), "absent": tuple(raw.get("absent", ()))})
