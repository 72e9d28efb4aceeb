"""The average of a round's pushes, by rows: what they make of the last state, before any merge."""

from collections.abc import Mapping

from torch import Tensor

from spes_mega.hub.state.round_state import Published, Publisher
from spes_mega.layout.names import expert_of
from spes_mega.outer.average import average
from spes_mega.outer.optimizer import nesterov_step, sgd_step
from spes_mega.outer.ownership import Ownership
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.policy import WirePolicy, contributors
from spes_mega.wire.tensor_specs import Shape


class RoundAverage:
    """What the pushes of a round make of the last state, before any merge, by rows.

    The change of a shared tensor is the mean over the nodes that pushed, that of an expert the mean over those of its
    owners that pushed (one in the plain case), each taken through the outer optimizer; what nobody pushed stays.
    """

    def __init__(
        self,
        previous: Published,
        pushes: Mapping[int, StoredPayload],
        ownership: Ownership,
        policy: WirePolicy,
        tokens: Mapping[int, int] | None = None,
    ) -> None:
        """`tokens` are the weights of the nodes in means; None: all alike."""
        self.previous = previous
        self.policy = policy
        self._pushes = pushes
        self._ownership = ownership
        self._tokens = tokens
        self._contributors: dict[str, list[int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return self.previous.names

    def shape(self, name: str) -> Shape:
        return self.previous.shape(name)

    def contributors(self, name: str) -> list[int]:
        if name not in self._contributors:
            self._contributors[name] = contributors(name, self._ownership, self._pushes)
        return self._contributors[name]

    def values(self, name: str, start: int, stop: int, out: Publisher | None = None) -> Tensor:
        """New rows of a tensor that is published without loss, fp32; `out` gets the momentum."""
        if self._pushes_are_the_state(name):
            return self._mean(name, start, stop)
        before = self.previous.rows(name, start, stop)
        if (step := self._step(name, start, stop, before, out)) is not None:
            before.add_(step)
        return before

    def change(self, name: str, start: int, stop: int, before: Tensor, out: Publisher | None = None) -> Tensor:
        """What is to be published of a lossy tensor: new exact rows - `before` (those of P), fp32."""
        if self._pushes_are_the_state(name) and self._is_private(name):
            return self._mean(name, start, stop).sub_(before)
        residual = self.previous.residual(name, start, stop)
        if self._adds_up(name):
            self._pushes[self.contributors(name)[0]].add_rows(name, start, stop, residual)
        elif (step := self._step(name, start, stop, before, out)) is not None:
            residual.add_(step)
        return residual

    def exact(self, name: str, start: int, stop: int) -> Tensor:
        """New exact rows of any tensor, fp32."""
        if self.policy.down(name).lossless:
            return self.values(name, start, stop)
        before = self.previous.rows(name, start, stop)
        return before.add_(self.change(name, start, stop, before))

    def _pushes_are_the_state(self, name: str) -> bool:
        averages = self.policy.optimizer(name).averages and self.policy.up(name).lossless
        return averages and bool(self.contributors(name))

    def _adds_up(self, name: str) -> bool:
        """Whether one node's change is the whole step."""
        return (
            self.policy.optimizer(name).averages
            and not self.policy.up(name).lossless
            and len(self.contributors(name)) == 1
        )

    def _is_private(self, name: str) -> bool:
        """Whether its node began the round with P + R, and not with P: see `WirePolicy.private`."""
        key = expert_of(name)
        return key is not None and self._ownership.sole_owner(key.expert) is not None

    def _mean(self, name: str, start: int, stop: int) -> Tensor:
        nodes = self.contributors(name)
        weights = None if self._tokens is None else [self._tokens[node] for node in nodes]
        return average((self._pushes[node].read_rows(name, start, stop) for node in nodes), weights)

    def _step(self, name: str, start: int, stop: int, before: Tensor, out: Publisher | None) -> Tensor | None:
        """The outer optimizer's step; None if nobody contributes."""
        optimizer = self.policy.optimizer(name)
        velocity = self.previous.velocity(name, start, stop) if optimizer.momentum else None
        step = None
        if self.contributors(name):
            change = self._mean(name, start, stop)
            if self.policy.up(name).lossless:
                change.sub_(before)
            if velocity is None:
                step = sgd_step(change, optimizer.lr)
            else:
                step = nesterov_step(change, velocity, lr=optimizer.lr, momentum=optimizer.momentum)
        if velocity is not None and out is not None:
            out.velocity(name, start, velocity)
        return step
