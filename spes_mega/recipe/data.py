"""The data and checkpoint sections: what a node reads, and what it keeps on its disk."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spes_mega.recipe.section import LOCAL, Positive, Section


def _possible(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path has a NUL character")
    return path


class DataSection(Section):
    """Indexed datasets (`PREFIX.bin`, `PREFIX.idx`); relative paths start at the recipe's own folder."""

    train: Annotated[Path, AfterValidator(_possible)] | None = Field(
        default=None, json_schema_extra=LOCAL, description="prefix of the training data"
    )
    sharding: Literal["shared", "own"] = Field(
        default="shared",
        json_schema_extra=LOCAL,
        description="shared: all nodes have this file and each reads its own part; own: it is this node's alone",
    )


class CheckpointSection(Section):
    """How a node saves its state, to go on when it is started again; the model itself is also with the hub."""

    every: int = Field(
        default=100,
        ge=0,
        json_schema_extra=LOCAL,
        description="steps between two checkpoints; one more is written when the node is asked to stop; 0: none at all",
    )
    keep_last: Positive = Field(default=2, json_schema_extra=LOCAL, description="checkpoints that are kept")
