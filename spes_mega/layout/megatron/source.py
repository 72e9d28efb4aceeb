"""A Megatron-Core GPTModel's state dict (dense, tensor parallel 1), read under canonical names.

A canonical tensor is some rows of a fused one; only those are read.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout.megatron.names import Rule, rule_of
from spes_mega.layout.names import EMBEDDING, OUTPUT_HEAD, Shape, expected_tensors
from spes_mega.layout.storage.tensor_files import TensorFile, TensorInfo
from spes_mega.recipe import ModelSection

_WRAPPERS = re.compile(r"^(module\.)+")
_OURS = re.compile(r"(module\.)*(decoder\.layers\.|embedding\.word_embeddings\.)")
_DERIVED = "rotary_pos_emb.inv_freq"


class _Place(NamedTuple):
    """Canonical tensor number `part` of the rule's, in the file's tensor `key`."""

    key: str
    rule: Rule
    part: int


class MegatronFile:
    """An open file with Megatron's names, seen as one with canonical names."""

    def __init__(self, inner: TensorFile, model: ModelSection) -> None:
        """Takes over `inner`. Raises CheckpointError naming a tensor that is unexpected or misshapen."""
        self.path: Path = inner.path
        self._inner = inner
        self._model = model
        if model.is_moe:
            raise CheckpointError(
                f"{self.path}: a Megatron-Core state dict is read as a dense model, but config.json describes a "
                f"Mixture-of-Experts ({model.family})"
            )
        # A tied checkpoint may repeat its output head.
        self._shapes = expected_tensors(model) | {OUTPUT_HEAD: (model.vocab_size, model.hidden_size)}
        self._places: dict[str, _Place] = {}
        for key in inner.tensors:
            self._add(key)
        self.tensors = {
            name: TensorInfo(inner.tensors[place.key].dtype, self._shapes[name]) for name, place in self._places.items()
        }

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        key, rule, part = self._places[name]
        numbers = torch.arange(self._inner.tensors[key].shape[0])
        wanted = rule.fusion(numbers, self._model)[part].reshape(-1)[start:stop]
        runs = wanted.tensor_split((wanted.diff() != 1).nonzero().flatten() + 1)
        bounds = [(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)] or [(0, 0)]
        rows = [self._inner.read_rows(key, first, last) for first, last in bounds]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def close(self) -> None:
        self._inner.close()

    def _add(self, key: str) -> None:
        name = _WRAPPERS.sub("", key)
        if name == _DERIVED:
            return
        found = rule_of(name)
        if found is None:
            kind = "experts are not read from Megatron-Core" if ".experts." in name else "no rule knows it"
            raise CheckpointError(f"{self.path}: unexpected tensor {key} in a dense Megatron-Core model: {kind}")
        rule, numbers = found
        names = tuple(canonical.format(**numbers) for canonical in rule.names)
        if unknown := [canonical for canonical in names if canonical not in self._shapes]:
            raise CheckpointError(
                f"{self.path}: unexpected tensor {key}: a {self._model.family} model of {self._model.num_layers} "
                f"layers, as config.json describes it, has no {unknown[0]}"
            )
        self._check_shape(key, names)
        if twice := [self._places[canonical].key for canonical in names if canonical in self._places]:
            raise CheckpointError(f"{self.path}: {twice[0]} and {key} are the same tensor")
        for part, canonical in enumerate(names):
            self._places[canonical] = _Place(key, rule, part)

    def _check_shape(self, key: str, names: tuple[str, ...]) -> None:
        shape = self._inner.tensors[key].shape
        expected: Shape = (sum(self._shapes[name][0] for name in names), *self._shapes[names[0]][1:])
        # Megatron pads the vocabulary; the rows past vocab_size are no tokens.
        padded = names[0] in (EMBEDDING, OUTPUT_HEAD) and shape[0] > expected[0]
        if shape[1:] != expected[1:] or (shape[0] != expected[0] and not padded):
            raise CheckpointError(
                f"{self.path}: {key}: shape {list(shape)}, but config.json asks for {list(expected)} "
                "(only tensor parallel 1 can be read)"
            )


def has_megatron_names(file: TensorFile) -> bool:
    """Whether an open file's names are those of a Megatron-Core GPTModel."""
    return any(_OURS.match(name) for name in file.tensors)
