"""Tensors set aside on the disk for a while."""

import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from spes_mega.layout.storage.tensor_bytes import read_tensor, write_tensor


class TensorSpool:
    """Named tensors in a file without a name, which is gone with the process at the latest."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, prefix="spes-mega-")  # noqa: SIM115 - closed at exit
        self._where: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._end = 0
        self._source = f"spool file in {folder}"

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Raises CheckpointError, e.g. on a full disk."""
        tensor = tensor.detach().cpu().contiguous()
        write_tensor(self._file.fileno(), self._end, tensor, self._source)
        self._where[name] = (self._end, tensor.dtype, tuple(tensor.shape))
        self._end += tensor.nbytes

    def get(self, name: str) -> torch.Tensor:
        """Raises KeyError if it was not put in."""
        offset, dtype, shape = self._where[name]
        return read_tensor(self._file.fileno(), offset, dtype, shape, self._source)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that was put in, in that order."""
        return {name: shape for name, (_, _, shape) in self._where.items()}

    def close(self) -> None:
        """Free the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
