"""The next global state out of the last one and the pushes of a round, streamed so that memory stays bounded.

Axes: E experts of a layer, R rows of a slice, C columns.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from spes_mega.hub.state.round_state import Published, Publisher
from spes_mega.layout.names import EXPERT_MATRICES, expert_name, expert_of
from spes_mega.outer.average import average
from spes_mega.outer.merging import (
    SIMILARITY_MATRIX,
    Donors,
    Similarity,
    add_to_gram,
    choose_donors,
    cosine_similarity,
    merge_alpha,
    merge_changes,
    merge_due,
    merge_rows,
    new_gram,
    similarity_of,
)
from spes_mega.outer.optimizer import nesterov_step, sgd_step
from spes_mega.outer.ownership import Ownership
from spes_mega.recipe import ModelSection, Recipe
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.policy import WirePolicy, contributors
from spes_mega.wire.tensor_specs import Shape, row_slices

THREADS = 2
"""They work on tensors of their own: most of the time goes to the kernel and to torch, which need no GIL."""
_MERGED_BYTES = 16 << 20
"""Of the rows of all experts that are merged at once."""


@dataclass(frozen=True)
class Merge:
    """An expert merge that is due in a round."""

    alpha: float
    num_donors: int


def merge_of(recipe: Recipe, round_: int) -> Merge | None:
    """The merge that belongs to the closing of `round_`; None if none is due."""
    spes, model = recipe.spes, recipe.model
    before, after = recipe.step_at(round_), recipe.step_at(round_ + 1)
    if model.num_experts < 2:
        return None
    if not merge_due(before, after, interval=spes.merge_interval, merge_steps=spes.merge_steps):
        return None
    alpha = merge_alpha(after, alpha=spes.merge_alpha, merge_steps=spes.merge_steps)
    return Merge(alpha, spes.merge_donors)


class Mixture:
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


def write_next_state(
    out: Publisher,
    mixture: Mixture,
    model: ModelSection,
    merge: Merge | None,
    still_wanted: Callable[[], None],
) -> dict[int, Similarity]:
    """Write every tensor of the next state; `still_wanted` is called between tensors and raises to abandon it.

    Returns how alike the experts of each layer were before the merge; nothing without one.
    """

    def write(name: str) -> None:
        still_wanted()
        _write_tensor(out, mixture, name)

    spaces = SimpleQueue[_Space]()
    for _ in range(THREADS):
        spaces.put(_Space())

    def merged(layer: int) -> tuple[int, Similarity]:
        assert merge is not None, "it is due"
        still_wanted()
        space = spaces.get()
        try:
            return layer, _write_merged_layer(out, mixture, model, layer, merge, space)
        finally:
            spaces.put(space)

    layers = [] if merge is None else list(filter(model.is_moe_layer, range(model.num_layers)))
    # No two threads write to one tensor, and each is written as one thread alone would.
    pool = ThreadPoolExecutor(THREADS)
    try:
        list(pool.map(write, [name for name in mixture.names if merge is None or expert_of(name) is None]))
        return dict(pool.map(merged, layers))
    finally:
        pool.shutdown(cancel_futures=True)


def _write_tensor(out: Publisher, mixture: Mixture, name: str) -> None:
    lossless, changes = mixture.policy.down(name).lossless, bool(mixture.contributors(name))
    for start, stop in row_slices(mixture.shape(name)):
        if lossless:
            out.values(name, start, mixture.values(name, start, stop, out))
            continue
        before = mixture.previous.rows(name, start, stop)
        change = mixture.change(name, start, stop, before, out)
        if changes:
            out.change(name, start, before, change)
        else:
            out.unchanged(name, start, before, change)


class _Space:
    """Memory for rows of all experts, which is used again for every slice: what is freed would be cut up for smaller
    blocks, and the hub's memory grow."""

    def __init__(self) -> None:
        self._blocks: dict[str, Tensor] = {}

    def rows(self, use: str, shape: Shape) -> Tensor:
        """fp32, with any values; the memory of the last rows for that use."""
        size = math.prod(shape)
        if use not in self._blocks or self._blocks[use].numel() < size:
            self._blocks[use] = torch.empty(size)
        return self._blocks[use][:size].view(shape)


def _write_merged_layer(
    out: Publisher, mixture: Mixture, model: ModelSection, layer: int, merge: Merge, space: _Space
) -> Similarity:
    similarity_EE = _similarity(mixture, model, layer, space)
    donors: Donors = choose_donors(similarity_EE, merge.num_donors)
    for matrix in EXPERT_MATRICES:
        names = _expert_names(model, layer, matrix)
        write = _write_merged_values if mixture.policy.down(names[0]).lossless else _write_merged_changes
        for start, stop in _expert_slices(mixture, names):
            write(out, mixture, names, start, stop, donors, merge.alpha, space)
    return similarity_of(similarity_EE)


def _write_merged_values(
    out: Publisher,
    mixture: Mixture,
    names: list[str],
    start: int,
    stop: int,
    donors: Donors,
    alpha: float,
    space: _Space,
) -> None:
    shape = _shape(mixture, names, start, stop)
    rows_ERC = space.rows("rows", shape)
    for name, rows in zip(names, rows_ERC, strict=True):
        rows.copy_(mixture.values(name, start, stop, out))
    for name, merged in zip(names, merge_rows(rows_ERC, donors, alpha, space.rows("merged", shape)), strict=True):
        out.values(name, start, merged)


def _write_merged_changes(
    out: Publisher,
    mixture: Mixture,
    names: list[str],
    start: int,
    stop: int,
    donors: Donors,
    alpha: float,
    space: _Space,
) -> None:
    shape = _shape(mixture, names, start, stop)
    before_ERC, change_ERC, rows_ERC = (space.rows(use, shape) for use in ("before", "change", "rows"))
    for name, before, change, rows in zip(names, before_ERC, change_ERC, rows_ERC, strict=True):
        before.copy_(mixture.previous.rows(name, start, stop))
        change.copy_(mixture.change(name, start, stop, before, out))
        torch.add(before, change, out=rows)
    merge_ERC = merge_changes(rows_ERC, donors, alpha, space.rows("merged", shape))
    for name, before, change, merge in zip(names, before_ERC, change_ERC, merge_ERC, strict=True):
        out.merged(name, start, before, change, merge)


def _similarity(mixture: Mixture, model: ModelSection, layer: int, space: _Space) -> Tensor:
    gram_EE, names = new_gram(model.num_experts), _expert_names(model, layer, SIMILARITY_MATRIX)
    for start, stop in _expert_slices(mixture, names):
        rows_ERC = space.rows("rows", _shape(mixture, names, start, stop))
        for name, rows in zip(names, rows_ERC, strict=True):
            rows.copy_(mixture.exact(name, start, stop))
        add_to_gram(gram_EE, rows_ERC)
    return cosine_similarity(gram_EE)


def _expert_names(model: ModelSection, layer: int, matrix: str) -> list[str]:
    return [expert_name(layer, expert, matrix) for expert in range(model.num_experts)]


def _expert_slices(mixture: Mixture, names: list[str]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows of one matrix that are taken of all experts at once."""
    return row_slices(mixture.shape(names[0]), row_bytes_factor=len(names), budget=_MERGED_BYTES)


def _shape(mixture: Mixture, names: list[str], start: int, stop: int) -> Shape:
    """[E, R, C] of such rows."""
    return len(names), stop - start, *mixture.shape(names[0])[1:]
