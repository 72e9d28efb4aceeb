"""Where a checkpoint's files are: a Hugging Face directory, one safetensors file, or a torch pickle."""

from pathlib import Path
from typing import Any, NamedTuple

from spes_mega.errors import CheckpointError
from spes_mega.files.text import read_json

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class Source(NamedTuple):
    """`weight_map` maps tensor names to file names where an index file says so, else None."""

    config: dict[str, Any]
    files: list[Path]
    weight_map: dict[str, str] | None


def locate(src: Path, config: Path | None = None) -> Source:
    """Find config.json and weight files. Raises CheckpointError naming what is missing."""
    if src.is_dir():
        files, index = _files_of_directory(src)
        return Source(read_config(config or src / "config.json"), files, index)
    if not src.is_file():
        raise CheckpointError(f"{src}: no such file or directory")
    if src.suffix != ".safetensors" and src.suffix not in TORCH_SUFFIXES:
        known = ", ".join((".safetensors", *TORCH_SUFFIXES))
        raise CheckpointError(f"{src}: not a checkpoint: a directory or one of {known} was expected")
    return Source(read_config(config or src.parent / "config.json"), [src], None)


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as it stands. Raises CheckpointError."""
    raw = read_json(path, CheckpointError, "model's config.json (needed beside its weights, or by --config)")
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a JSON object was expected")
    return raw


_BY_PRECEDENCE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Which of a directory's files transformers takes: the first that is there."""


def _files_of_directory(src: Path) -> tuple[list[Path], dict[str, str] | None]:
    beside = src / "config.json"
    named = read_config(beside).get("transformers_weights") if beside.is_file() else None
    if named is not None and (not isinstance(named, str) or Path(named).name != named):
        raise CheckpointError(f"{src}: config.json: transformers_weights is {named!r}; a file name was expected")
    for name in (named,) if named is not None else _BY_PRECEDENCE:
        if (src / name).is_file():
            return _files_of_index(src / name) if name.endswith(".index.json") else ([src / name], None)
    if named is not None:
        raise CheckpointError(f"{src / named}: missing; config.json names it as transformers_weights")
    found = sorted(src.glob("*.safetensors"))
    if len(found) != 1:
        shown = ", ".join(path.name for path in found[:3])
        state = f"several safetensors files ({shown}, …) but no index" if found else "no weights"
        raise CheckpointError(f"{src}: {state}: model.safetensors or model.safetensors.index.json was expected")
    return found, None


def _files_of_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    raw = read_json(path, CheckpointError, "index of a checkpoint in several files")
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise CheckpointError(f"{path}: weight_map was expected: tensor names -> file names")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: {name!r} is not a plain file name")
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path.parent / name}: this shard is missing ({path.name} lists it)")
    return [path.parent / name for name in names], index
