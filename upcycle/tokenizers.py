"""Whether two checkpoints read text alike: compares the files beside their weights."""

from pathlib import Path
from typing import Any

from spes_mega.errors import CheckpointError
from spes_mega.files.text import read_json
from spes_mega.layout.tokenizer_files import VOCABULARIES, files_of

# What turns text into ids; chat templates, padding and the like may differ between fine-tuned checkpoints.
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens")
_JSON = "tokenizer.json"


def tokenizer_difference(first: Path, other: Path) -> str | None:
    """What differs between the tokenizers of two folders; None where they agree. Raises CheckpointError."""
    if (first / _JSON).is_file() and (other / _JSON).is_file():
        a, b = _parsed(first / _JSON), _parsed(other / _JSON)
        return next((f"{_JSON} ({part})" for part in _PARTS if a.get(part) != b.get(part)), None)
    names = {name for folder in (first, other) for name in files_of(folder, (*VOCABULARIES, "added_tokens.json"))}
    for name in sorted(names, key=lambda name: (name != _JSON, name)):
        here, there = (first / name).is_file(), (other / name).is_file()
        if here != there:
            return f"{name} (missing in {(first if there else other).name})"
        if here and (first / name).read_bytes() != (other / name).read_bytes():
            return name
    return None


def _parsed(path: Path) -> dict[str, Any]:
    raw = read_json(path, CheckpointError)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a JSON object was expected")
    return raw
