"""What an upcycling starts from: one dense checkpoint, or several of one shape (method mix)."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from spes_mega.errors import CheckpointError
from spes_mega.layout import Checkpoint, differences, open_checkpoint
from spes_mega.layout.storage.rows import is_finite, row_slices
from spes_mega.recipe import ModelSection
from upcycle.digest import TensorDigest
from upcycle.tokenizers import tokenizer_difference

# Rows are read in pieces of so many values at most, so that memory does not grow with the vocabulary.
_PIECE_BYTES = 1 << 24


class Sources:
    """Open dense checkpoints that agree in shape, config and tokenizer; a context manager that closes them."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Takes over `checkpoints`. Raises CheckpointError naming the one that differs from the first, and in what."""
        self.all = tuple(checkpoints)
        first = self.all[0]
        self.model: ModelSection = first.model
        self.config: dict[str, Any] = first.config
        self.names = first.names
        self._digests = [TensorDigest() for _ in self.all]
        for other in self.all[1:]:
            if wrong := differences(first.model, other.model):
                raise CheckpointError(f"{other.source}: does not match {first.source}: {'; '.join(wrong)}")
            if wrong_file := tokenizer_difference(_folder(first), _folder(other)):
                raise CheckpointError(f"{other.source}: its tokenizer is not that of {first.source}: {wrong_file}")

    @property
    def path(self) -> Path:
        """Of the first source."""
        return self.all[0].source

    @property
    def folder(self) -> Path:
        """The first source's folder, with its tokenizer."""
        return _folder(self.all[0])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.all[0].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The smallest dtype that holds this tensor of all sources."""
        dtype = self.all[0].dtype(name)
        for other in self.all[1:]:
            dtype = torch.promote_types(dtype, other.dtype(name))
        return dtype

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor: of the one source, or the average of all."""
        return torch.cat([rows for _, rows in self.pieces(name)])

    def pieces(self, name: str, *, digest: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """The same as (first row, rows) in bounded pieces; `digest`: note them for `digests`.

        Raises:
            CheckpointError: a value is NaN or infinite.
        """
        for start, stop in row_slices(self.shape(name), budget=_PIECE_BYTES):
            yield start, self._average([self._rows(i, name, start, stop, digest) for i in range(len(self.all))])

    def read_one(self, index: int, name: str, *, digest: bool = False) -> torch.Tensor:
        """A whole tensor of one source. Raises CheckpointError: a value is NaN or infinite."""
        return self._rows(index, name, 0, self.shape(name)[0], digest)

    def digests(self) -> list[str]:
        """The fingerprint of each source, when all its tensors were read once with `digest`."""
        return [digest.hexdigest(self.names) for digest in self._digests]

    def close(self) -> None:
        for checkpoint in self.all:
            checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _rows(self, index: int, name: str, start: int, stop: int, digest: bool) -> torch.Tensor:
        source = self.all[index]
        rows = source.read_rows(name, start, stop)
        if not is_finite(rows):
            raise CheckpointError(f"{source.source}: {name}: has NaN or infinite values; the source is damaged")
        if digest:
            self._digests[index].add(name, source.shape(name), rows)
        return rows

    def _average(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The mean in fp64: equal sources give their own bits."""
        if len(parts) == 1:
            return parts[0]
        total = parts[0].double()
        for part in parts[1:]:
            total += part.double()
        return total / len(parts)


def open_sources(paths: Sequence[Path], config: Path | None = None) -> Sources:
    """Open all of `paths` (see `open_checkpoint`). Raises CheckpointError."""
    with ExitStack() as stack:
        sources = Sources([stack.enter_context(open_checkpoint(path, config)) for path in paths])
        stack.pop_all()
        return sources


def _folder(checkpoint: Checkpoint) -> Path:
    return checkpoint.source if checkpoint.source.is_dir() else checkpoint.source.parent
