"""Synchronization in the background: the node trains on while its push travels and the round closes.

The rule is that of Streaming DiLoCo (arXiv 2501.18512) with a delay of one round. Of everything that a node trains:

    P_r   state that the hub published for round r      L_r   what the node holds after its steps of round r
    d_r   the node's own progress in round r            S_r   what it goes on from, and what it pushes for round r

    d_r = L_r - S_(r-1)         S_r = P_r + d_r

In its first round a node begins with P_r, so that S_r = L_r. From the next one on it trains from S_(r-1) while P_r, the
outcome of all nodes' S_(r-1), is made and sent; at the end of the round P_r has come, and S_r takes the place of L_r.

The base of the push of round r is P_r, which the node has applied just before: in fp32 it carries P_r + d_r, in a lossy
codec S_r - P_r = d_r, and what earlier pushes lost. So the hub counts each d_r once, in its own round, and knows
nothing of the delay: P_(r+1) = P_r + mean of d_r, or what the outer optimizer makes of it. What the node alone trains
is not sent unless a merge changed it, for then P_r is S_(r-1), and S_r = L_r. Experts of others become P_r.

Where P_r equals S_(r-1), S_r is L_r bit for bit, and not off by the rounding of a difference: a lone node is plain
training. The last round ends with a plain exchange, so that hub and nodes end with one state.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch

from spes_mega.layout.names import expert_of
from spes_mega.node.sync.background import Arrived, Flight
from spes_mega.node.sync.hub_node import HubNode
from spes_mega.node.sync.spool import TensorSpool
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.node.zero.weights import Shapes, Tensors
from spes_mega.outer.ownership import pushed_names

T = TypeVar("T")


class OverlappingHubNode(HubNode):
    """A `HubNode` that trains a round while the one before is synchronized.

    `exchange` waits for what the round before gave; errors of that flight are raised there, on all ranks. A push that
    came too late is dropped, as without overlap; what was trained after it is kept. When experts change hands, a node
    drops what it trained meanwhile of those that it gives up, and pushes its new ones as they are published: it has not
    trained them yet.

    A node that is started again begins its round from the hub's state: what it held was the outcome of a round before.
    """

    resumes_rounds = False
    _max_lead = 1

    def __init__(self, *arguments: Any, num_rounds: int, spool_dir: Path, **options: Any) -> None:
        """As a HubNode; `spool_dir` needs room for three copies of what the node trains, in fp32."""
        super().__init__(*arguments, **options)
        self._num_rounds, self._spool_dir = num_rounds, spool_dir
        self._flying = False
        """Known to all ranks; the flight itself is on the first."""
        self._flight: Flight | None = None

    def exchange(self, weights: LocalModel, round_: int, tokens: int) -> int:
        last = self._num_rounds - 1
        with self._timed():
            snapshot = None
            if self._flying:
                round_, snapshot = self._land(weights, round_)
            elif round_ < last:
                snapshot = self._take_snapshot(weights, self._trained(weights), None)
            if round_ < last:
                self._take_off(weights, round_, snapshot, tokens)
                return round_ + 1
            if snapshot is not None:
                snapshot.close()
        # The last round is closed in the plain way, unless others have ended the run without this node.
        return super().exchange(weights, round_, tokens) if round_ == last else round_

    def _take_off(self, weights: LocalModel, round_: int, snapshot: TensorSpool | None, tokens: int) -> None:
        if self._ranks.leads:
            self._flight = Flight(self.client, round_, _here(snapshot), tokens)
        self._flying = True

    def _land(self, weights: LocalModel, round_: int) -> tuple[int, TensorSpool | None]:
        """Wait for the flight and apply what it brought.

        Returns the round that the node's progress now belongs to, and on rank 0 what the model holds of what it trains.
        """
        arrived: Arrived | None = None

        def wait() -> tuple[int, tuple[int, ...], list[str], bool]:
            nonlocal arrived
            arrived = _here(self._flight).wait()
            return arrived.pulled.round, arrived.pulled.absent, list(arrived.pulled.shapes), arrived.in_time

        newest, absent, names, in_time = self._waiting(wait)
        if not in_time:
            self._say(f"too late for round {round_ - 1}: the hub closed it without this node; going on with the newest")
        trained = self._trained(weights)
        self._follow(absent)
        snapshot = self._go_on(weights, arrived, trained, names, everything=not in_time)
        if arrived is not None:
            arrived.close()
        self._flying, self._flight = False, None
        return newest, snapshot

    def _go_on(
        self, weights: LocalModel, arrived: Arrived | None, trained: list[str], names: list[str], *, everything: bool
    ) -> TensorSpool | None:
        """Replace the tensors called `names`, with the node's progress in those that it has `trained` and still owns.

        Returns on rank 0 what the model then holds of what it trains.
        """
        owned = self._trained(weights)
        snapshot = self._take_snapshot(weights, [name for name in owned if name in set(trained)], arrived)

        def adopt() -> None:
            for name in set(owned).difference(trained):
                _here(snapshot).put(name, _here(arrived).pulled.read(name))

        def read(name: str) -> torch.Tensor:
            going_on, came = _here(snapshot), _here(arrived)
            return going_on.get(name) if name in going_on.shapes else came.pulled.read(name)

        self._ranks.first(adopt)
        self._replace(weights, names, read, everything=everything)
        return snapshot

    def _take_snapshot(self, weights: LocalModel, names: list[str], arrived: Arrived | None) -> TensorSpool | None:
        """On rank 0: what the node goes on from, of what it has trained."""
        snapshot: TensorSpool | None = None

        def store(shapes: Shapes, tensors: Tensors) -> None:
            nonlocal snapshot
            snapshot = TensorSpool(self._spool_dir)
            for name, now in tensors:
                snapshot.put(name, arrived.with_progress(name, now) if arrived else now)

        weights.collect(names, store)
        return snapshot

    def _trained(self, weights: LocalModel) -> list[str]:
        return pushed_names(weights.shapes, self._ownership, self._node, expert_of)

    def save_residual(self, path: Path) -> None:
        """It belongs to the push that is under way, of which nobody knows whether the hub will take it."""

    def leave(self) -> None:
        if self._flight is not None:  # before the goodbye: whoever calls the hub after it takes part again
            self._flight.abandon()
            self._flight = None
        super().leave()


def _here(thing: T | None) -> T:
    assert thing is not None, "rank 0 has it"
    return thing
