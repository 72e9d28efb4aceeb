"""Open a checkpoint and read it tensor by tensor, or row by row, under canonical names."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from spes_mega.errors import CheckpointError, system_errors
from spes_mega.layout.families.catalog import DERIVED, FAMILIES
from spes_mega.layout.families.config_json import DTYPE_NAMES, parse_config
from spes_mega.layout.megatron.source import MegatronFile, has_megatron_names
from spes_mega.layout.names import EMBEDDING, OUTPUT_HEAD, expected_tensors
from spes_mega.layout.storage.sources import locate
from spes_mega.layout.storage.tensor_files import TensorFile, open_tensor_file
from spes_mega.recipe import ModelSection

_TIED_CHECK_ROWS = 4096
_SHOWN = 3


class Checkpoint:
    """An open checkpoint of which all tensors are known to be there, with the right shapes.

    Attributes:
        model: what config.json says.
        config: config.json as it stands.
        source: the path that was opened.
        names: canonical names in canonical order; a tied model has no output head.
        left_out: tensors of the files that are not read, because they follow from config.json.
    """

    def __init__(self, source: Path, config: dict[str, Any], model: ModelSection, files: list[TensorFile]) -> None:
        """Takes over `files`. Raises CheckpointError naming missing, unexpected or misshapen tensors."""
        self.source = source
        self.config = config
        self.model = model
        self._files = files
        shapes = expected_tensors(model)
        to_disk = FAMILIES[model.family].to_disk
        found = _tensors_of(files)
        self.left_out = tuple(sorted(name for file in files for name in file.tensors if DERIVED.fullmatch(name)))
        head = found.pop(OUTPUT_HEAD, None) if model.tie_embeddings else None
        _check_names(source, {to_disk(name) for name in shapes}, set(found))
        self._places = {name: (found[to_disk(name)], to_disk(name)) for name in shapes}
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            self._check_tensor(name, shape)
        if head is not None:
            self._check_tied(head)

    def shape(self, name: str) -> tuple[int, ...]:
        file, key = self._places[name]
        return file.tensors[key].shape

    def dtype(self, name: str) -> torch.dtype:
        file, key = self._places[name]
        return file.tensors[key].dtype

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in the dtype it has on disk. Raises CheckpointError when the file can't be read."""
        return self.read_rows(name, 0, self.shape(name)[0])

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of one tensor, along its first axis."""
        file, key = self._places[name]
        if not 0 <= start <= stop <= file.tensors[key].shape[0]:
            raise ValueError(f"{name} has no rows {start}..{stop} (shape {file.tensors[key].shape})")
        return file.read_rows(key, start, stop)

    def left_out_line(self) -> str | None:
        """What to tell about `left_out`; None if there is nothing to tell."""
        if not self.left_out:
            return None
        return f"left out {len(self.left_out)} buffers that follow from config.json, such as {self.left_out[0]}"

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        file, key = self._places[name]
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{file.path}: {key}: shape {list(self.shape(name))}, but config.json asks for {list(shape)}"
            )
        if self.dtype(name) not in DTYPE_NAMES:
            raise CheckpointError(
                f"{file.path}: {key}: dtype {self.dtype(name)}; float32, bfloat16 or float16 expected"
            )

    def _check_tied(self, head: TensorFile) -> None:
        """A tied checkpoint may carry its output head a second time, but not another one."""
        info = head.tensors[OUTPUT_HEAD]
        same = info.shape == self.shape(EMBEDDING) and info.dtype == self.dtype(EMBEDDING)
        for start in range(0, info.shape[0] if same else 0, _TIED_CHECK_ROWS):
            stop = min(start + _TIED_CHECK_ROWS, info.shape[0])
            theirs = head.read_rows(OUTPUT_HEAD, start, stop)
            same = same and torch.equal(
                theirs.view(torch.uint8), self.read_rows(EMBEDDING, start, stop).view(torch.uint8)
            )
        if not same:
            raise CheckpointError(
                f"{head.path}: config.json says tie_word_embeddings, but {OUTPUT_HEAD} differs from {EMBEDDING}: "
                "set tie_word_embeddings to false, or remove the wrong one"
            )


@system_errors(CheckpointError)
def open_checkpoint(src: Path, config: Path | None = None) -> Checkpoint:
    """Open a Hugging Face directory, a .safetensors file, or a torch pickle (weights_only).

    A file may also hold the state dict of a dense Megatron-Core GPTModel with tensor parallel 1.

    Args:
        config: config.json, where it isn't in the directory or beside the file.

    Raises:
        CheckpointError: anything is missing, unexpected, damaged or not supported; the message names it.
    """
    source = locate(src, config)
    model = parse_config(source.config)
    files: list[TensorFile] = []
    try:
        for path in source.files:
            files.append(_by_canonical_names(open_tensor_file(path), model))
        if source.weight_map is not None:
            _check_index(src, source.weight_map, files)
        return Checkpoint(src, source.config, model, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _by_canonical_names(file: TensorFile, model: ModelSection) -> TensorFile:
    try:
        return MegatronFile(file, model) if has_megatron_names(file) else file
    except BaseException:
        file.close()
        raise


def _tensors_of(files: list[TensorFile]) -> dict[str, TensorFile]:
    out: dict[str, TensorFile] = {}
    for file in files:
        for name in file.tensors:
            if name in out:
                raise CheckpointError(f"{name} is both in {out[name].path} and in {file.path}")
            if not DERIVED.fullmatch(name):
                out[name] = file
    return out


def _check_index(src: Path, index: dict[str, str], files: list[TensorFile]) -> None:
    held = {name: file.path.name for file in files for name in file.tensors}
    for name, file in index.items():
        if held.get(name) != file:
            raise CheckpointError(f"{src}: {name} is not in {file}, where the index says it is")


def _check_names(src: Path, expected: set[str], found: set[str]) -> None:
    problems = []
    for kind, names in (("missing", sorted(expected - found)), ("unexpected", sorted(found - expected))):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            problems.append(f"{kind} tensor{'s' if len(names) > 1 else ''}: {', '.join(names[:_SHOWN])}{more}")
    if problems:
        raise CheckpointError(f"{src}: does not hold what its config.json describes: {'; '.join(problems)}")
