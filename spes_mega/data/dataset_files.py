"""The files of a dataset: `PREFIX.bin` and `PREFIX.idx`. Imports nothing heavy."""

from pathlib import Path

from spes_mega.errors import DataError
from spes_mega.recipe import Recipe


def training_data(recipe: Recipe) -> Path:
    """Prefix of the node's dataset. Raises DataError: none is named, or its files are not there."""
    prefix = recipe.data.train
    if prefix is None:
        raise DataError("no training data: give --data PREFIX, or set data.train to the prefix of an indexed dataset")
    for suffix in (".idx", ".bin"):
        if not Path(f"{prefix}{suffix}").is_file():
            raise DataError(f"{prefix}{suffix}: no such file; `spes-mega tokenize … --out {prefix}` would write it")
    return prefix
