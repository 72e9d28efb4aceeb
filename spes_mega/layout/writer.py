"""Write a checkpoint directory: tensors or rows in any order, all or nothing."""

import bisect
import json
import math
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self, cast

import torch

from spes_mega.errors import CheckpointError, NoSpaceError
from spes_mega.files.durable import sync_path
from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.layout.families.config_json import make_config
from spes_mega.layout.names import expected_tensors
from spes_mega.layout.storage.checksums import CHECKSUMS, TensorChecksums, checksum_of
from spes_mega.layout.storage.rows import is_finite
from spes_mega.layout.storage.safetensors_format import byte_count, pack_header
from spes_mega.layout.storage.tensor_bytes import bytes_of, write_error, write_tensor
from spes_mega.layout.storage.write_behind import WriteBehind
from spes_mega.layout.tokenizer_files import copy_files, settle_tokenizer
from spes_mega.recipe import ModelSection

MAX_SHARD_BYTES = 4 * 2**30
_CAST_AT_ONCE = 1 << 20
_OF_FILE_SYSTEM = "lost+found"  # in the root of an otherwise empty disk
DtypeOf = torch.dtype | Callable[[str], torch.dtype]


class _Place(NamedTuple):
    fd: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class CheckpointWriter:
    """A context manager that fills a checkpoint under a temporary name beside `out` and renames it at the end.

    An empty directory that is there already may be one that cannot be replaced, such as a mounted volume: then the
    checkpoint is filled inside of it, and its files are moved up at the end, config.json last.

    Attributes:
        tokenizer_note: what a user should know about the tokenizer of the result; None if nothing.

    Leaving the `with` block normally checks that every tensor was filled, writes config.json and the index,
    and commits; leaving it by an exception removes everything. Writes of different rows may come from several
    threads. Memory does not grow with the size of the model.
    """

    def __init__(
        self,
        out: Path,
        model: ModelSection,
        dtype: DtypeOf,
        *,
        base_config: dict[str, Any] | None = None,
        copy_from: Path | None = None,
        metadata: Mapping[str, str] | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        fsync: bool = True,
        cached: bool = True,
        checksums: bool = False,
        beside: int = 0,
        spares: Mapping[str, Path] | None = None,
    ) -> None:
        """
        Args:
            out: the directory to make; it may exist if it is empty.
            dtype: of all tensors at rest, or of each by its canonical name.
            base_config: config.json of the model this one comes from (see `make_config`).
            copy_from: a directory whose tokenizer and generation files are copied along; the tokenizer only if
                transformers reads it alike from both (see `settle_tokenizer`).
            metadata: for the header of each safetensors file.
            max_shard_bytes: a shard takes at most these, except for a single larger tensor.
            fsync: make the result durable before it gets its name.
            cached: leave the result in the page cache, because it is read soon; else this is faster, and leaves the
                cache to others.
            checksums: add a file with the checksums of all others, for `check_files`.
            beside: bytes of other files that the caller will add, and that there has to be room for too.
            spares: files on the same disk that nobody needs any more, by the names of those that take their place:
                overwriting them is several times as fast as writing new ones, whose pages have to be made first.

        Raises:
            CheckpointError: `out` exists with something in it, or there is not enough space for it.
        """
        self._out = out.resolve() if out.is_symlink() else out  # a rename would replace the link itself
        self._shapes = expected_tensors(model)
        self._dtypes = {name: dtype(name) if callable(dtype) else dtype for name in self._shapes}
        self._config = make_config(model, base_config, self._main_dtype())
        self._to_disk = FAMILIES[model.family].to_disk
        self._copy_from = copy_from
        self._changes_family = base_config is not None and base_config.get("model_type") != self._config["model_type"]
        self.tokenizer_note: str | None = None
        self._inside = self._out.is_dir()
        self._metadata = {"format": "pt", **(metadata or {})}
        self._fsync = fsync
        self._write_behind = None if cached else WriteBehind(drop=True)
        self._shards = self._split(max_shard_bytes)
        self._texts: dict[str, str] = {}
        self._fds: list[int] = []
        self._header_bytes: list[int] = []
        self._places: dict[str, _Place] = {}
        self._filled: dict[str, list[tuple[int, int]]] = {name: [] for name in self._shapes}
        self._lock = threading.Lock()
        self._checksums = TensorChecksums() if checksums else None
        self._checksums_beside: dict[str, str] = {}
        self._spares = dict(spares or {})
        self._completed = False
        self._check_room(self.total_bytes + beside)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors at rest."""
        return sum(self._bytes(name) for name in self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        """What `name` is stored as."""
        return self._dtypes[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names in canonical order."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def open_beside(self, file: str) -> BinaryIO:
        """Another file that appears together with the checkpoint; fill all of it, and close it before the end."""
        return cast(BinaryIO, os.fdopen(self._open(file), "r+b", buffering=0))

    def _open(self, file: str) -> int:
        path = self._partial / file
        if (spare := self._spares.pop(file, None)) is not None:
            spare.rename(path)
            return os.open(path, os.O_RDWR)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

    def __enter__(self) -> Self:
        self._partial = (
            self._out if self._inside else self._out.parent
        ) / f".{self._out.name}.partial-{secrets.token_hex(4)}"
        try:
            self._partial.mkdir(parents=True)
            for file, names in self._shards.items():
                self._open_shard(file, names)
        except BaseException as e:
            self._discard()
            if isinstance(e, OSError):
                raise write_error(self._out, e) from e
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self._commit()
        except OSError as e:
            raise write_error(self._out, e) from e
        finally:
            self._discard()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Store a whole tensor. Raises CheckpointError on a wrong name or shape, or an overflow in fp16 or bf16."""
        if name in self._shapes and tuple(tensor.shape) != self._shapes[name]:
            raise CheckpointError(f"{name}: shape {list(tensor.shape)}, expected {list(self._shapes[name])}")
        self.write_rows(name, 0, tensor)

    def write_rows(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Store rows start.. of a tensor (along its first axis), cast to its dtype at rest."""
        if name not in self._places:
            raise CheckpointError(f"{name}: not a tensor of this model")
        place, stop = self._places[name], start + tensor.shape[0]
        if start < 0 or stop > place.shape[0] or tuple(tensor.shape[1:]) != place.shape[1:]:
            raise CheckpointError(
                f"{name}: rows {start}..{stop} of shape {list(tensor.shape)} do not fit into {list(place.shape)}"
            )
        offset = place.offset + byte_count(place.dtype, (start, *place.shape[1:]))
        for part in _pieces(tensor.detach(), place.dtype):
            stored = part.to(device="cpu", dtype=place.dtype).contiguous()
            if place.dtype not in (part.dtype, torch.float32):
                _check_holds(stored, name)
            write_tensor(place.fd, offset, stored, name)
            if self._checksums is not None:
                self._checksums.wrote(self._to_disk(name), offset - place.offset, bytes_of(stored))
            offset += stored.nbytes
        with self._lock:
            filled = self._filled[name] = _merged(self._filled[name], (start, stop))
        if self._write_behind and self._fsync and filled == [(0, place.shape[0])]:
            self._write_behind.wrote(place.fd, place.offset, self._bytes(name))

    def set_metadata(self, metadata: Mapping[str, str]) -> None:
        """Other metadata for the headers, of the same length as JSON (such as a digest instead of a placeholder)."""
        self._metadata = {"format": "pt", **metadata}

    def write_text(self, file: str, text: str) -> None:
        """Add a text file that appears together with the checkpoint."""
        self._texts[file] = text

    def add_checksum(self, file: str, checksum: str) -> None:
        """The checksum of a file beside the checkpoint, so that it need not be read again."""
        self._checksums_beside[file] = checksum

    def complete(self) -> Path:
        """All has been written: returns the directory that can be read from now on, which is not durable yet.

        Raises CheckpointError if a tensor was not filled.
        """
        if self._completed:
            return self._partial
        for name, filled in self._filled.items():
            if filled != [(0, self._shapes[name][0])]:
                raise CheckpointError(f"{self._out}: {name} was not filled completely (rows {filled or 'none'})")
        self._write_headers()
        self._write_companions()
        if self._checksums is not None:
            self._write_checksums(self._checksums)
        self._completed = True
        return self._partial

    def _bytes(self, name: str) -> int:
        return byte_count(self._dtypes[name], self._shapes[name])

    def _main_dtype(self) -> torch.dtype:
        sizes: dict[torch.dtype, int] = {}
        for name, dtype in self._dtypes.items():
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(self._shapes[name])
        return max(sizes, key=lambda dtype: sizes[dtype])

    def _split(self, max_shard_bytes: int) -> dict[str, list[str]]:
        shards: list[list[str]] = [[]]
        size = 0
        for name in self._shapes:
            if shards[-1] and size + self._bytes(name) > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += self._bytes(name)
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, 1)}

    def _check_room(self, needed: int) -> None:
        if self._inside:
            if found := [path.name for path in self._out.iterdir() if path.name != _OF_FILE_SYSTEM]:
                raise CheckpointError(f"{self._out}: exists already, with {found[0]} in it: choose another name")
        elif self._out.exists():
            raise CheckpointError(f"{self._out}: exists already: remove it, or choose another name")
        folder = self._out.resolve()
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free + sum(spare.stat().st_size for spare in self._spares.values())
        if free < needed:
            raise NoSpaceError(f"{self._out}: needs {needed:,} bytes of disk space, {free:,} are free")

    def _header(self, names: list[str]) -> bytes:
        return pack_header({self._to_disk(n): (self._dtypes[n], self._shapes[n]) for n in names}, self._metadata)

    def _open_shard(self, file: str, names: list[str]) -> None:
        header = self._header(names)
        fd = self._open(file)
        self._fds.append(fd)
        offset = len(header)
        self._header_bytes.append(offset)
        for name in names:
            self._places[name] = _Place(fd, offset, self._dtypes[name], self._shapes[name])
            offset += self._bytes(name)
        os.truncate(fd, offset)

    def _write_headers(self) -> None:
        for fd, length, names in zip(self._fds, self._header_bytes, self._shards.values(), strict=True):
            header = self._header(names)
            if len(header) != length:
                raise ValueError(f"the metadata changed the header's length from {length} to {len(header)} bytes")
            os.pwrite(fd, header, 0)

    def _commit(self) -> None:
        self.complete()
        if self._fsync:
            for fd in self._fds:
                os.fsync(fd)
            for path in (*self._partial.rglob("*"), self._partial):
                sync_path(path)
        self._close_shards()
        if self._inside:
            self._move_up()
        else:
            self._partial.rename(self._out)
        if self._fsync:
            sync_path(self._out if self._inside else self._out.parent)

    def _move_up(self) -> None:
        """All files or none: without config.json, which comes last, nobody takes the directory for a checkpoint."""
        moved: list[Path] = []
        try:
            for path in sorted(self._partial.iterdir(), key=lambda path: path.name == "config.json"):
                if (self._out / path.name).exists():
                    raise CheckpointError(f"{self._out / path.name}: was made by somebody else in the meantime")
                moved.append(path.rename(self._out / path.name))
        except BaseException:
            for path in moved:
                path.rename(self._partial / path.name)
            raise

    def _write_companions(self) -> None:
        if self._copy_from is not None:
            copy_files(self._copy_from, self._partial)
        files = {"config.json": _json(self._config), **self._texts}
        if len(self._shards) > 1:
            weight_map = {self._to_disk(name): file for file, names in self._shards.items() for name in names}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            files["model.safetensors.index.json"] = _json(index)
        for file, text in files.items():
            (self._partial / file).write_text(text, encoding="utf-8")
        if self._copy_from is not None and self._changes_family:
            self.tokenizer_note = settle_tokenizer(self._copy_from, self._partial)

    def _write_checksums(self, tensors: TensorChecksums) -> None:
        sums = {file: tensors.of_file(fd, file) for file, fd in zip(self._shards, self._fds, strict=True)}
        sums |= self._checksums_beside
        for path in sorted(self._partial.iterdir()):
            if path.name not in sums and path.is_file():
                sums[path.name] = checksum_of(path)
        (self._partial / CHECKSUMS).write_text(_json(sums), encoding="utf-8")

    def _close_shards(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds, self._places = [], {}

    def _discard(self) -> None:
        self._close_shards()
        shutil.rmtree(self._partial, ignore_errors=True)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _check_holds(stored: torch.Tensor, name: str) -> None:
    if not is_finite(stored):
        short, wider = ("fp16", "bf16 or fp32") if stored.dtype == torch.float16 else ("bf16", "fp32")
        raise CheckpointError(f"{name}: has values too large for {short}; store it as {wider}")


def _pieces(tensor: torch.Tensor, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Some rows at a time where rows must be cast or moved, so that copies are small."""
    if tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu":
        return [tensor]
    values_in_row = max(1, tensor[:1].numel())
    return tensor.split(max(1, _CAST_AT_ONCE // values_in_row))


def _merged(intervals: list[tuple[int, int]], new: tuple[int, int]) -> list[tuple[int, int]]:
    """Sorted disjoint intervals with one more added; touching ones are joined."""
    at = bisect.bisect_left(intervals, new)
    out: list[tuple[int, int]] = []
    for start, stop in [*intervals[:at], new, *intervals[at:]]:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
