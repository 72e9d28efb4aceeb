"""The next global state out of the last one and the pushes of a round, streamed so that memory stays bounded.

Axes: E experts of a layer, R rows of a slice, C columns.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_mega.hub.forms import row_slices
from spes_mega.hub.payload import StoredPayload
from spes_mega.layout.names import EXPERT_MATRICES, expert_name, expert_of
from spes_mega.layout.reader import Checkpoint
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.outer.average import average
from spes_mega.outer.merging import (
    SIMILARITY_MATRIX,
    Donors,
    add_to_gram,
    choose_donors,
    cosine_similarity,
    merge_alpha,
    merge_due,
    merge_rows,
    new_gram,
)
from spes_mega.outer.ownership import Ownership
from spes_mega.recipe import ModelSection, Recipe


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
    """The state that a round gives before any merge, read by rows.

    Shared tensors are the mean over the nodes that pushed; an expert is the mean over those of its owners that
    pushed (one in the plain case), and stays as it was if none did.
    """

    def __init__(self, previous: Checkpoint, pushes: Mapping[int, StoredPayload], ownership: Ownership) -> None:
        self.names = previous.names
        self.shape = previous.shape
        self._previous = previous
        self._pushes = pushes
        self._ownership = ownership

    def contributors(self, name: str) -> list[int]:
        """Nodes whose values go into a tensor, in ascending order."""
        key = expert_of(name)
        nodes = sorted(self._pushes)
        return nodes if key is None else [node for node in nodes if key.expert in self._ownership.owned(node)]

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor of the next state, fp32."""
        if nodes := self.contributors(name):
            return average(self._pushes[node].read_rows(name, start, stop) for node in nodes)
        return self._previous.read_rows(name, start, stop)


def write_next_state(
    writer: CheckpointWriter,
    mixture: Mixture,
    model: ModelSection,
    merge: Merge | None,
    still_wanted: Callable[[], None],
) -> None:
    """Write every tensor of the next state; `still_wanted` is called between tensors and raises to abandon it."""
    for name in mixture.names:
        if merge is None or expert_of(name) is None:
            still_wanted()
            for start, stop in row_slices(mixture.shape(name)):
                writer.write_rows(name, start, mixture.read_rows(name, start, stop))
    if merge is not None:
        for layer in filter(model.is_moe_layer, range(model.num_layers)):
            still_wanted()
            _write_merged_layer(writer, mixture, model, layer, merge)


def _write_merged_layer(
    writer: CheckpointWriter, mixture: Mixture, model: ModelSection, layer: int, merge: Merge
) -> None:
    donors = _donors(mixture, model, layer, merge.num_donors)
    for matrix in EXPERT_MATRICES:
        for start, rows_ERC in _expert_rows(mixture, model, layer, matrix):
            merged_ERC = merge_rows(rows_ERC, donors, merge.alpha)
            for expert in range(model.num_experts):
                writer.write_rows(expert_name(layer, expert, matrix), start, merged_ERC[expert])


def _donors(mixture: Mixture, model: ModelSection, layer: int, count: int) -> Donors:
    gram_EE = new_gram(model.num_experts)
    for _, rows_ERC in _expert_rows(mixture, model, layer, SIMILARITY_MATRIX):
        add_to_gram(gram_EE, rows_ERC)
    return choose_donors(cosine_similarity(gram_EE), count)


def _expert_rows(mixture: Mixture, model: ModelSection, layer: int, matrix: str) -> Iterator[tuple[int, Tensor]]:
    """(start, rows [E, R, C]) of one matrix of all experts of a layer, slice by slice."""
    names = [expert_name(layer, expert, matrix) for expert in range(model.num_experts)]
    for start, stop in row_slices(mixture.shape(names[0]), row_bytes_factor=model.num_experts):
        yield start, torch.stack([mixture.read_rows(name, start, stop) for name in names])
