"""Merging similar experts of one layer, by rows of all of them.

Axes: E experts of a layer, R rows of a slice, C columns.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_mega.hub.close.round_average import RoundAverage
from spes_mega.hub.state.round_state import Publisher
from spes_mega.layout.names import EXPERT_MATRICES, expert_name
from spes_mega.layout.storage.rows import row_slices
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
from spes_mega.recipe import ModelSection, Recipe
from spes_mega.wire.tensor_specs import Shape

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


class Scratch:
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


class LayerMerge:
    """Merge the experts of layers one after the other, with memory of its own."""

    def __init__(self, out: Publisher, average: RoundAverage, model: ModelSection, merge: Merge) -> None:
        self._out = out
        self._average = average
        self._model = model
        self._merge = merge
        self._scratch = Scratch()

    def write(self, layer: int) -> Similarity:
        """Write the merged experts of a layer; return how alike they were before."""
        similarity_EE = self._similarity(layer)
        donors = choose_donors(similarity_EE, self._merge.num_donors)
        for matrix in EXPERT_MATRICES:
            names = self._names(layer, matrix)
            lossless = self._average.policy.down(names[0]).lossless
            for start, stop in self._slices(names):
                if lossless:
                    self._write_values(names, start, stop, donors)
                else:
                    self._write_changes(names, start, stop, donors)
        return similarity_of(similarity_EE)

    def _write_values(self, names: list[str], start: int, stop: int, donors: Donors) -> None:
        shape = self._shape(names, start, stop)
        rows_ERC, merged_ERC = self._scratch.rows("rows", shape), self._scratch.rows("merged", shape)
        for name, rows in zip(names, rows_ERC, strict=True):
            rows.copy_(self._average.values(name, start, stop, self._out))
        for name, merged in zip(names, merge_rows(rows_ERC, donors, self._merge.alpha, merged_ERC), strict=True):
            self._out.values(name, start, merged)

    def _write_changes(self, names: list[str], start: int, stop: int, donors: Donors) -> None:
        shape = self._shape(names, start, stop)
        before_ERC, change_ERC, rows_ERC = (self._scratch.rows(use, shape) for use in ("before", "change", "rows"))
        for name, before, change, rows in zip(names, before_ERC, change_ERC, rows_ERC, strict=True):
            before.copy_(self._average.previous.rows(name, start, stop))
            change.copy_(self._average.change(name, start, stop, before, self._out))
            torch.add(before, change, out=rows)
        merge_ERC = merge_changes(rows_ERC, donors, self._merge.alpha, self._scratch.rows("merged", shape))
        for name, before, change, merge in zip(names, before_ERC, change_ERC, merge_ERC, strict=True):
            self._out.merged(name, start, before, change, merge)

    def _similarity(self, layer: int) -> Tensor:
        gram_EE, names = new_gram(self._model.num_experts), self._names(layer, SIMILARITY_MATRIX)
        for start, stop in self._slices(names):
            rows_ERC = self._scratch.rows("rows", self._shape(names, start, stop))
            for name, rows in zip(names, rows_ERC, strict=True):
                rows.copy_(self._average.exact(name, start, stop))
            add_to_gram(gram_EE, rows_ERC)
        return cosine_similarity(gram_EE)

    def _names(self, layer: int, matrix: str) -> list[str]:
        return [expert_name(layer, expert, matrix) for expert in range(self._model.num_experts)]

    def _slices(self, names: list[str]) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the rows of one matrix that are taken of all experts at once."""
        return row_slices(self._average.shape(names[0]), row_bytes_factor=len(names), budget=_MERGED_BYTES)

    def _shape(self, names: list[str], start: int, stop: int) -> Shape:
        """Return [E, R, C] of such rows."""
        return len(names), stop - start, *self._average.shape(names[0])[1:]
