"""Files that hold tensors, opened for reading parts of single tensors: safetensors and torch pickles.

Only names, shapes and places are held in memory. The old torch format (before 1.6, not a zip file) is the one
exception: it can't be read in parts, so such a file is loaded as a whole.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from spes_mega.errors import CheckpointError
from spes_mega.files.git_lfs import refuse_pointer
from spes_mega.layout.storage.safetensors_format import LENGTH_BYTES, byte_count, header_length, parse_header
from spes_mega.layout.storage.tensor_bytes import read_tensor
from spes_mega.layout.storage.torch_archive import ZIP_MAGIC, TorchArchive, load_weights

_NESTED_UNDER = ("state_dict", "model", "module")


class TensorInfo(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFile(Protocol):
    """An open file; `tensors` has names as the file has them."""

    path: Path
    tensors: dict[str, TensorInfo]

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop (along the first axis) as a fresh contiguous tensor."""

    def close(self) -> None: ...


def open_tensor_file(path: Path) -> TensorFile:
    """Open by suffix: .safetensors, or else a torch pickle. Raises CheckpointError."""
    refuse_pointer(path, CheckpointError)
    try:
        return SafetensorsFile(path) if path.suffix == ".safetensors" else _open_torch(path)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot open: {e.strerror or e}") from e


class SafetensorsFile:
    """One safetensors file. Its size must be exactly what its header says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        try:
            length = header_length(os.pread(self._fd, LENGTH_BYTES, 0), str(path))
            size = os.fstat(self._fd).st_size
            if size < LENGTH_BYTES + length:
                raise CheckpointError(f"{path}: truncated: {size} bytes, the header alone has {length}")
            self._header = parse_header(os.pread(self._fd, length, LENGTH_BYTES), str(path))
            if size != self._header.file_bytes:
                state = "truncated" if size < self._header.file_bytes else "damaged"
                raise CheckpointError(
                    f"{path}: {state}: {size} bytes where its header asks for {self._header.file_bytes}"
                )
        except BaseException:
            os.close(self._fd)
            raise
        self.tensors = {name: TensorInfo(spec.dtype, spec.shape) for name, spec in self._header.tensors.items()}

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        spec = self._header.tensors[name]
        offset = self._header.data_start + spec.start
        return _read_rows(self._fd, offset, self.tensors[name], start, stop, f"{self.path}: {name}")

    def close(self) -> None:
        os.close(self._fd)


class TorchZipFile:
    """A torch.save file, of which tensors are read from their place in the zip archive."""

    def __init__(self, archive: TorchArchive) -> None:
        """Takes over `archive`. Raises CheckpointError naming what it holds besides tensors, or a damaged one."""
        self.path = archive.path
        self._archive = archive
        state = state_dict_in(self.path, archive.load())
        self._stored = {name: archive.stored(name, fake) for name, fake in state.items()}
        self.tensors = {name: TensorInfo(fake.dtype, tuple(fake.shape)) for name, fake in state.items()}

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        stored, source = self._stored[name], f"{self.path}: {name}"
        fake, fd = stored.fake, self._archive.fd
        if fake.is_contiguous():
            offset = stored.start + int(fake.storage_offset()) * fake.dtype.itemsize
            rows = _read_rows(fd, offset, self.tensors[name], start, stop, source)
        else:
            whole = read_tensor(fd, stored.start, fake.dtype, (stored.values,), source)
            rows = whole.as_strided(fake.shape, fake.stride(), fake.storage_offset())[start:stop].contiguous()
        return rows.neg() if fake.is_neg() else rows

    def close(self) -> None:
        self._archive.close()


class LoadedFile:
    """Tensors of an old torch file, all in memory."""

    def __init__(self, path: Path, state: dict[str, torch.Tensor]) -> None:
        self.path = path
        self._state = state
        self.tensors = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        rows = self._state[name][start:stop]
        return rows.resolve_neg().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self._state = {}


def _read_rows(fd: int, offset: int, info: TensorInfo, start: int, stop: int, source: str) -> torch.Tensor:
    skipped = byte_count(info.dtype, (start, *info.shape[1:]))
    return read_tensor(fd, offset + skipped, info.dtype, (stop - start, *info.shape[1:]), source)


def _open_torch(path: Path) -> TensorFile:
    with path.open("rb") as file:
        is_archive = file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    if not is_archive:
        return LoadedFile(path, state_dict_in(path, load_weights(path, path)))
    archive = TorchArchive(path)
    try:
        return TorchZipFile(archive)
    except BaseException:
        archive.close()
        raise


def _refuse_several(path: Path, loaded: Any) -> None:
    """Raise CheckpointError if a file holds several models (say, one and its moving average): none is the obvious."""
    states = [loaded.get(key) for key in _NESTED_UNDER] if isinstance(loaded, dict) else []
    of_tensors = [isinstance(s, dict) and any(isinstance(t, torch.Tensor) for t in s.values()) for s in states]
    if sum(of_tensors) > 1:
        found = " and ".join(key for key, is_state in zip(_NESTED_UNDER, of_tensors, strict=True) if is_state)
        raise CheckpointError(f"{path}: holds tensors under {found}: save the state dict that is meant alone")


# What Transformer Engine keeps of its own under the names of modules; not weights.
_NO_WEIGHTS = "_extra_state"


def state_dict_in(path: Path, loaded: Any) -> dict[str, torch.Tensor]:
    """The plain tensors of a loaded torch file, also one level down. Raises CheckpointError on anything else."""
    _refuse_several(path, loaded)
    for key in _NESTED_UNDER:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(f"{path}: a state dict was expected (tensor names -> tensors)")
    loaded = {name: value for name, value in loaded.items() if not str(name).endswith(_NO_WEIGHTS)}
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: {name}: a tensor was expected, found {type(tensor).__name__}")
        plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
        if not plain or tensor.is_complex() or not tensor.dim() or tensor.device.type != "cpu":
            raise CheckpointError(f"{path}: {name}: a plain dense tensor of real numbers with an axis was expected")
    return {name: tensor.detach() for name, tensor in loaded.items()}
