"""The zip archive that torch.save writes: which tensors it holds, and where in the file each of them lies.

torch.load decides what the pickle means, but it is given a copy of the archive without the storages: under
FakeTensorMode it makes tensors without memory, and the place that it notes for each storage tells which entry of the
archive it is. Where that entry's bytes lie is read from the archive itself. (torch's own answer to that question is a
computation that holds only for archives as torch.save writes them.)
"""

import argparse
import io
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spes_mega.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
_MAX_PICKLE_BYTES = 1 << 28
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Without these torch.load takes places from the archive's headers instead of computing them.
_PLACING = (".format_version", ".storage_alignment")
# All else that torch.load looks at besides the storages.
_COPIED = ("data.pkl", "version", ".data/version", "byteorder")
_SAVE_AGAIN = "load it with torch and save it again with torch.save"

# What Megatron-LM leaves beside the tensors: its arguments, and Transformer Engine's state. Neither can run code.
_HARMLESS: list[Any] = [argparse.Namespace, io.BytesIO]


class StoredTensor(NamedTuple):
    """A tensor in an archive: `fake` has its dtype, shape, strides and offset in a storage.

    Attributes:
        start: where the storage begins in the file.
        bytes: of the whole storage.
    """

    fake: torch.Tensor
    start: int
    bytes: int

    @property
    def values(self) -> int:
        """How many values of the tensor's dtype the storage has."""
        return self.bytes // self.fake.dtype.itemsize


class TorchArchive:
    """An open archive; the file stays open for reading by `fd`."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError: not an archive of torch.save, or one with entries that torch cannot read in parts."""
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        try:
            self._entries = self._read_entries()
            self._names: dict[int, str] = {}
            self._check_byte_order()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.fd)

    def load(self) -> Any:
        """What was saved, with tensors that have no memory; `stored` tells where they lie. Raises CheckpointError."""
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import, and few runs need it

        skeleton = self._skeleton()
        with FakeTensorMode():
            return load_weights(skeleton, self.path)

    def stored(self, name: str, fake: torch.Tensor) -> StoredTensor:
        """Find a tensor of what `load` gave. Raises CheckpointError: it lies not, or not wholly, in the archive."""
        storage: Any = fake.untyped_storage()
        entry = self._names.get(getattr(storage, "_checkpoint_offset", -1))
        if entry is None:
            raise CheckpointError(f"{self.path}: {name}: has no values (saved from the meta device?)")
        info = self._entries[entry]
        found = StoredTensor(fake, self._start(info), info.file_size)
        last = fake.storage_offset() + sum((n - 1) * step for n, step in zip(fake.shape, fake.stride(), strict=True))
        # torch makes a storage as large as the pickle says, and FakeTensorMode as large as the tensor needs
        if storage.nbytes() != found.bytes or (fake.numel() and last >= found.values):
            raise CheckpointError(
                f"{self.path}: {name}: its shape and strides reach beyond the {found.bytes} bytes of {entry}: damaged"
            )
        return found

    def _read_entries(self) -> dict[str, zipfile.ZipInfo]:
        """Entries by their name without the folder that all of them are in."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos = archive.infolist()
        except Exception as e:  # zipfile raises whatever the damage leads to
            raise CheckpointError(f"{self.path}: damaged: not a zip archive as torch.save writes it: {e}") from e
        entries: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.partition("/")[2].lower()  # torch takes upper and lower case for the same
            if name in entries:
                raise CheckpointError(f"{self.path}: damaged: has {info.filename} twice")
            entries[name] = info
        return entries

    def _check_byte_order(self) -> None:
        if "byteorder" in self._entries and (order := self._read(self._entries["byteorder"])) != b"little":
            raise CheckpointError(
                f"{self.path}: was written on a {order[:10].decode(errors='replace')}-endian machine: {_SAVE_AGAIN} "
                "on a little-endian one"
            )

    def _skeleton(self) -> io.BytesIO:
        """The archive without the bytes of storages; `_names` gets the place in it of each."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, info in self._entries.items():
                if not info.is_dir() and not name.startswith(_PLACING):
                    archive.writestr(info.filename, self._read(info) if name in _COPIED else b"")
            for info in archive.infolist():
                place = info.header_offset + _LOCAL_HEADER.size + len(info.filename.encode()) + len(info.extra)
                self._names[place] = info.filename.partition("/")[2].lower()
        out.seek(0)
        return out

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        if info.file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(f"{self.path}: {info.filename} has {info.file_size:,} bytes: damaged")
        return os.pread(self.fd, info.file_size, self._start(info))

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Where an entry's bytes begin, from the header in front of them."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise CheckpointError(
                f"{self.path}: {info.filename} is compressed, so that it cannot be read in parts: {_SAVE_AGAIN}"
            )
        header = os.pread(self.fd, _LOCAL_HEADER.size, info.header_offset)
        if len(header) < _LOCAL_HEADER.size or not header.startswith(ZIP_MAGIC):
            raise CheckpointError(f"{self.path}: damaged: {info.filename} is not where the archive says")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if start + info.file_size > os.fstat(self.fd).st_size:
            raise CheckpointError(f"{self.path}: truncated: ends within {info.filename}")
        return int(start)


def load_weights(file: Path | io.BytesIO, path: Path) -> Any:
    """torch.load with weights_only, for the file at `path`. Raises CheckpointError."""
    try:
        with torch.serialization.safe_globals(_HARMLESS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as e:  # torch.load raises whatever the damage leads to
        raise CheckpointError(f"{path}: {_reason(e)}") from None


def _reason(error: Exception) -> str:
    """What is wrong with a torch file. Never torch's own advice, which is to run the code that the file holds."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return f"holds more than tensors ({found[1]}), which is never loaded: save its state dict alone"
    if "TorchScript" in text:
        return "is a TorchScript archive, not a state dict: save the state dict of its model"
    first = next(iter(text.strip().splitlines()), "")
    ours = "" if re.search("weights|torch.load|trust", first, re.IGNORECASE) else f": {first[:200]}"
    return f"damaged, or not a file of torch.save ({type(error).__name__}{ours})"
