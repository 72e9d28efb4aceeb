"""Training with a hub: pull, train, push what this node trains, wait for the others, pull."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from spes_mega.client.client import HubClient, Pulled, PushLostError, StaleRoundError
from spes_mega.errors import CheckpointError, SpesError
from spes_mega.layout.names import expert_of
from spes_mega.node.checkpoint.state import Checkpoint
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.weight_source import Traffic
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.node.zero.weights import Shapes, Tensors
from spes_mega.outer.ownership import Ownership, pushed_names, ranges, with_absent

GOODBYE_S = 10.0  # launchers kill a node 30 s after they asked it to stop
T = TypeVar("T")


class HubNode:
    """A `WeightSource` that synchronizes with a hub; all of it runs on all ranks, and rank 0 does the talking."""

    resumes_rounds = True
    keeps_result = False
    _max_lead = 0
    """Rounds that a node can be ahead of the hub."""

    def __init__(
        self,
        node: int,
        ownership: Ownership,
        ranks: Ranks,
        stop: StopRequest,
        client: HubClient | None,
        say: Callable[[str], None],
        capacity: Sequence[int] | None = None,
    ) -> None:
        """`client` is None on all ranks but the first; `ownership` is that of a run in which nobody is absent."""
        self._node, self._everyone, self._capacity = node, ownership, capacity
        self._ownership = ownership
        self._ranks, self._stop, self._say = ranks, stop, say
        self._client = client
        self._traffic = Traffic()
        self._bytes_before = (0, 0)
        self._here = False
        self._next_push = 0

    def join(self) -> None:
        """Tell the hub that this node is there; it refuses another recipe here, before anything is built."""

        def join() -> list[int]:
            joined = self.client.join()
            self._here = True
            if joined.pushed:  # a restart after the push: what it trained is with the hub already
                self._say(f"the hub has this node's push for round {joined.round}; waiting for the others")
                try:
                    self.client.wait_round(joined.round + 1)
                except PushLostError as e:
                    self._say(f"{e}; training that round again")
                joined = self.client.join()
            return list(joined.absent)

        with self._timed():
            self._follow(self._waiting(join))

    @property
    def owned(self) -> tuple[int, ...]:
        return self._ownership.owned(self._node)

    def _follow(self, absent: Collection[int]) -> None:
        self._ownership = with_absent(self._everyone, absent, self._capacity)

    @property
    def client(self) -> HubClient:
        assert self._client is not None, "only rank 0 talks to the hub"
        return self._client

    def start(self, weights: LocalModel, checkpoint: Checkpoint | None = None) -> int:
        """Raises CheckpointError: the hub is not as far as the checkpoint."""
        with self._timed():
            return self._pull(weights, None, checkpoint)

    def _take_up(self, checkpoint: Checkpoint, round_: int) -> None:
        """What the pushes of the node's earlier process lost, if no later push can have made up for it."""
        its = checkpoint.position.round
        if its > round_ + self._max_lead:
            raise CheckpointError(
                f"{checkpoint.path}: a checkpoint of round {its}, but the hub is at round {round_}: is it another "
                "run's? With --resume never the node begins with a new optimizer state"
            )
        if checkpoint.residual is None:
            return
        if checkpoint.state.residual_round == round_:
            self.client.restore_residual(checkpoint.residual)
        else:
            self._say("what earlier pushes lost by rounding is not known any more, and counts as nothing")

    def save_residual(self, path: Path) -> int | None:
        self.client.save_residual(path)
        return self._next_push if path.exists() else None

    def exchange(self, weights: LocalModel, round_: int, tokens: int) -> int:
        with self._timed():
            if self._push(weights, round_, tokens):
                self._waiting(lambda: self.client.wait_round(round_ + 1))
                return self._pull(weights, round_)
            self._say(f"too late for round {round_}: the hub closed it without this node; going on with the newest")
            return self._pull(weights, None)

    def _push(self, weights: LocalModel, round_: int, tokens: int) -> bool:
        """Send what this node trains; False if the round was closed already."""
        names = pushed_names(weights.shapes, self._ownership, self._node, expert_of)
        stale = False

        def push(shapes: Shapes, tensors: Tensors) -> None:
            nonlocal stale
            try:
                with self._stop.interruptible():
                    self.client.push(round_, shapes, tensors, tokens)
                self._next_push = round_ + 1
            except StaleRoundError:
                stale = True

        weights.collect(names, push)
        return not self._ranks.first(lambda: stale)

    def _pull(self, weights: LocalModel, have_round: int | None, checkpoint: Checkpoint | None = None) -> int:
        """Replace what the hub sends, of which a `checkpoint` has what is lacking; returns the round of the weights."""
        pulled: Pulled | None = None

        def pull() -> tuple[int, tuple[int, ...], list[str]]:
            nonlocal pulled
            pulled = self.client.pull(have_round)
            if checkpoint is not None:
                self._take_up(checkpoint, pulled.round)
            return pulled.round, pulled.absent, list(pulled.shapes)

        try:
            round_, absent, names = self._waiting(pull)
            self._follow(absent)
            self._replace(
                weights,
                names,
                lambda name: pulled.read(name) if pulled else torch.empty(0),
                everything=have_round is None,
            )
        finally:
            if pulled is not None:
                pulled.close()
        self._next_push = round_
        return round_

    def _replace(
        self, weights: LocalModel, names: Collection[str], read: Callable[[str], torch.Tensor], *, everything: bool
    ) -> None:
        """Train from now on what the node owns, and take `names` from `read` on rank 0; is that to be everything?"""
        rebuilt = weights.own(self.owned)
        if rebuilt:
            self._say(f"now owns experts {ranges(self.owned)}")
        if missing := sorted(set(weights.shapes) - set(names)) if everything or rebuilt else []:
            raise CheckpointError(f"the hub sent a state without {missing[0]}")
        weights.assign(names, read)

    def _waiting(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; Ctrl-C and SIGTERM end it at once."""

        def interruptible() -> T:
            with self._stop.interruptible():
                return action()

        return self._ranks.first(interruptible)

    def finish(self, weights: LocalModel) -> None:
        """Nothing: the hub has the weights."""

    @property
    def result(self) -> str:
        return "the hub has the model, in the snapshots of its state directory"

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for this node; a hub that does not answer is left alone soon."""
        if self._here:
            self._here = False
            goodbye = threading.Thread(target=self._goodbye, daemon=True)
            goodbye.start()
            goodbye.join(GOODBYE_S)

    def _goodbye(self) -> None:
        try:
            self.client.leave()
        except SpesError as e:
            self._say(f"could not say goodbye to the hub: {e}")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._traffic.seconds += time.monotonic() - start

    def take_traffic(self) -> Traffic:
        taken, self._traffic = self._traffic, Traffic()
        if self._client is not None:
            before, self._bytes_before = self._bytes_before, (self._client.bytes_up, self._client.bytes_down)
            taken.bytes_up, taken.bytes_down = (now - b for now, b in zip(self._bytes_before, before, strict=True))
        return taken
