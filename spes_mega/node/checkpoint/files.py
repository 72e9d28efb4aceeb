"""A checkpoint directory as files: written beside, made durable, renamed; each file with its size and checksum.

OUT/checkpoints/step-NNNNNN/
    weights.safetensors     fp32 values of what the node trains
    moments.safetensors     Adam's two moments of the same
    rng.safetensors         state of each rank's random number generators
    residual.safetensors    with lossy codecs: what pushes to the hub lost so far
    state.json              everything else, and size and SHA-256 of the files
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch

from spes_mega.errors import CheckpointError, system_errors
from spes_mega.files.durable import sync_path
from spes_mega.layout.storage.checksums import CHECKSUMS, TensorChecksums, check_files, checksum_of, require
from spes_mega.layout.storage.safetensors_format import Specs, pack_header
from spes_mega.layout.storage.tensor_bytes import bytes_of, write_tensor
from spes_mega.layout.storage.write_behind import WriteBehind

STATE = "state.json"
_NAME = re.compile(r"step-([0-9]{6,})(\.old)?")
_WRITING = ".writing-"
_ATTEMPT = "attempt"


class TensorFileWriter:
    """A safetensors file, written from beginning to end; its checksum is taken on the way."""

    def __init__(self, path: Path, specs: Specs) -> None:
        """Raises CheckpointError, as all methods do, if the disk does not take it."""
        self.path = path
        self._pending = iter(specs)
        self._end = 0
        self._source = str(path)
        self._checksums = TensorChecksums()
        self._behind = WriteBehind(drop=True)
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot write: {e.strerror}") from e
        self._append(torch.frombuffer(bytearray(pack_header(specs)), dtype=torch.uint8))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, in the order of `specs`."""
        assert next(self._pending) == name, "tensors come in the order of the header"
        tensor = tensor.detach().cpu().contiguous()
        self._append(tensor)
        self._checksums.wrote(name, 0, bytes_of(tensor))

    def _append(self, tensor: torch.Tensor) -> None:
        write_tensor(self._fd, self._end, tensor, self._source)
        self._behind.wrote(self._fd, self._end, tensor.nbytes)
        self._end += tensor.nbytes

    def checksum(self) -> str:
        """Of the file, once all tensors are there."""
        assert next(self._pending, None) is None, "all tensors of the header are written"
        return self._checksums.of_file(self._fd, self._source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Raises CheckpointError if the disk does not take it."""
    try:
        path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    except OSError as e:
        raise CheckpointError(f"{path}: cannot write: {e.strerror}") from e


def finish(directory: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Write the last files of a checkpoint; `checksums` are those of the others. Raises CheckpointError."""
    write_json(directory / STATE, state)
    write_json(directory / CHECKSUMS, {**checksums, STATE: checksum_of(directory / STATE)})


def read_state(directory: Path) -> tuple[dict[str, Any], frozenset[str]]:
    """The state of a checkpoint, and which of its files are what was written.

    Raises CheckpointError: this is no checkpoint, or one of its files is not what was written.
    """
    with system_errors(CheckpointError, directory, "cannot be read"):
        if not (directory / STATE).is_file():
            raise CheckpointError(f"{directory / STATE}: missing or damaged: not a checkpoint of a node?")
    require((STATE,), checked := check_files(directory), directory)
    try:
        return json.loads((directory / STATE).read_text(encoding="utf-8")), checked
    except (ValueError, RecursionError) as e:  # its checksum is that of something that no version has written
        raise CheckpointError(f"{directory / STATE}: damaged: {e}") from e


class Shelf:
    """The checkpoints of a node, in one folder. A directory that has its name is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest_first(self) -> list[Path]:
        """Checkpoints that are there; one that has just been replaced may stand behind the one in its place."""
        found = [(path, m) for path in _entries(self.folder) if (m := _NAME.fullmatch(path.name))]
        found.sort(key=lambda one: (int(one[1][1]), one[1][2] is None), reverse=True)
        return [path for path, _ in found]

    def begin(self, step: int) -> Path:
        """A directory to write the checkpoint of `step` in."""
        path = self.folder / f"{_WRITING}step-{step:06d}"
        try:
            self.sweep()
            path.mkdir(parents=True)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot make the directory: {e.strerror}") from e
        return path

    def commit(self, written: Path, keep_last: int | None) -> None:
        """Make the written directory durable, give it its name, and delete the oldest of those up to its step.

        None for `keep_last` deletes nothing: one that had the name stands behind it. Raises CheckpointError.
        """
        path = self.folder / written.name.removeprefix(_WRITING)
        old = path.with_name(f"{path.name}.old")
        try:
            for file in (*written.iterdir(), written):
                sync_path(file)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
                path.rename(old)
            written.rename(path)
            sync_path(self.folder)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot write: {e.strerror}") from e
        if keep_last is None:
            return
        shutil.rmtree(old, ignore_errors=True)
        for outdated in [one for one in self.newest_first() if step_of(one) <= step_of(path)][keep_last:]:
            shutil.rmtree(outdated, ignore_errors=True)

    def sweep(self) -> None:
        """Delete what a node that was killed has left half-written."""
        for path in _entries(self.folder):
            if path.name.startswith(_WRITING):
                shutil.rmtree(path)

    def set_aside(self, paths: Iterable[Path]) -> Path | None:
        """Move checkpoints (`newest_first`) that a run does not go on from to a new folder beside: which.

        Raises CheckpointError: they cannot be moved.
        """
        others = list(paths)
        if not others:
            return None
        name = f"{self.folder.name}.old"
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        aside = next(path for path in map(self.folder.with_name, names) if not os.path.lexists(path))
        try:
            aside.mkdir()
            # The oldest first: a node that is killed meanwhile still finds the newest.
            for path in reversed(others):
                path.rename(aside / path.name)
            for changed in (aside, self.folder, self.folder.parent):
                sync_path(changed)
        except OSError as e:
            raise CheckpointError(f"{aside}: cannot move checkpoints there: {e.strerror}") from e
        return aside

    def attempt(self) -> str | None:
        """What `begin_attempt` has written, if it has."""
        try:
            return (self.folder / _ATTEMPT).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

    def begin_attempt(self, attempt: str) -> None:
        """Note that checkpoints are from now on those of this attempt. Raises CheckpointError."""
        path = self.folder / _ATTEMPT
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(attempt, encoding="utf-8")
            for changed in (path, self.folder):
                sync_path(changed)
        except OSError as e:
            raise CheckpointError(f"{path}: cannot write: {e.strerror}") from e

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete checkpoints, the oldest first, as far as it goes."""
        for path in reversed(list(paths)):
            shutil.rmtree(path, ignore_errors=True)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint. Raises CheckpointError: it is not the name of one."""
    if (match := _NAME.fullmatch(path.name)) is None:
        raise CheckpointError(f"{path}: not the name of a whole checkpoint, which is step- and six digits or more")
    return int(match[1])


def _entries(folder: Path) -> Iterator[Path]:
    """Of a folder that need not be there. Raises CheckpointError: it is something else, or cannot be read."""
    with system_errors(CheckpointError, folder, "cannot be read"):
        return iter(sorted(folder.iterdir()) if os.path.lexists(folder) else ())
