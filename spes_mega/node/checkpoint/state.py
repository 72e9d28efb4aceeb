"""What a node needs to go on where it was: its state by canonical tensor name, for any ZeRO stage, precision and ranks.

The directory's files are described in `checkpoint_files`.
"""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from spes_mega.data.samples import DataIdentity, NodeData
from spes_mega.errors import CheckpointError, system_errors
from spes_mega.layout.storage.checksums import require
from spes_mega.layout.storage.tensor_files import SafetensorsFile, open_tensor_file
from spes_mega.node.checkpoint.files import Shelf, read_state, step_of
from spes_mega.node.sync.weight_source import Position
from spes_mega.node.zero.moments import KEYS, Moments
from spes_mega.recipe import Recipe
from spes_mega.recipe.agreement import differences, may_go_on, told

WEIGHTS, MOMENTS, RNG, RESIDUAL = (f"{name}.safetensors" for name in ("weights", "moments", "rng", "residual"))


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Identity(_Frozen):
    """What a node must have in common with the one that wrote a checkpoint."""

    node: int
    recipe: str
    """Its digest."""
    seed: int
    data: DataIdentity
    agreed: dict[str, Any] | None = None
    """What the digest is of; None in checkpoints of earlier versions."""

    @classmethod
    def of(cls, recipe: Recipe, node: int, data: NodeData) -> "Identity":
        return cls(
            node=node, recipe=recipe.digest(), seed=recipe.train.seed, data=data.identity(), agreed=recipe.agreed()
        )


class CheckpointState(_Frozen):
    """`state.json`."""

    format: Literal[1] = 1
    identity: Identity
    position: Position
    owned: tuple[NonNegativeInt, ...]
    steps: dict[str, NonNegativeInt]
    """How often Adam has updated each tensor of `moments.safetensors`."""
    residual_round: int | None
    """The round whose push the residual belongs into; None without lossy codecs."""
    ranks: int
    zero_stage: int
    dtype: str
    samples_per_step: NonNegativeInt | None = None
    """What the node that wrote it took in a step; None in checkpoints of earlier versions."""


class Checkpoint:
    """A checkpoint that is whole. Its state is known on all ranks; tensors are read on rank 0."""

    def __init__(self, path: Path, state: CheckpointState) -> None:
        self.path, self.state = path, state
        self._files: dict[str, SafetensorsFile] = {}
        self._stack = ExitStack()

    @property
    def position(self) -> Position:
        return self.state.position

    @property
    def names(self) -> list[str]:
        """Tensors whose weights it holds."""
        return list(self._file(WEIGHTS).tensors)

    @property
    def residual(self) -> Path | None:
        """The file with what pushes to the hub lost so far."""
        return None if self.state.residual_round is None else self.path / RESIDUAL

    def read(self, name: str) -> torch.Tensor:
        """The fp32 value of a tensor. Raises CheckpointError."""
        return self._read(WEIGHTS, name)

    def moments(self, name: str) -> Moments:
        """Adam's moments of a tensor named in `state.steps`. Raises CheckpointError."""
        return Moments(*(self._read(MOMENTS, f"{name} {key}") for key in KEYS))

    def random_state(self, rank: int) -> torch.Tensor | None:
        """What `random_state()` gave on that rank; None if there was none."""
        name = f"rank-{rank}"
        return self._read(RNG, name) if name in self._file(RNG).tensors else None

    def _file(self, file: str) -> SafetensorsFile:
        if file not in self._files:
            opened = open_tensor_file(self.path / file)
            assert isinstance(opened, SafetensorsFile)
            self._stack.callback(opened.close)
            self._files[file] = opened
        return self._files[file]

    def _read(self, file: str, name: str) -> torch.Tensor:
        if (info := self._file(file).tensors.get(name)) is None:
            raise CheckpointError(f"{self.path / file}: has no {name}")
        return self._file(file).read_rows(name, 0, info.shape[0])

    def close(self) -> None:
        self._stack.close()

    def check(self, mine: Identity, num_experts: int, change: Collection[str] = ()) -> None:
        """Raises CheckpointError: it is of another node, recipe, seed or dataset; says which, and what in a recipe.

        Or it speaks of experts that there are not. Fields in `change` may have another value.
        """
        its = self.state.identity
        data = its.data if mine.data.is_as_in(its.data) else mine.data
        fields = differences(its.agreed, mine.agreed) if its.agreed and mine.agreed else {}
        told_fields = told(fields, "checkpoint")
        set_back = f"set back what differs ({told_fields})" if fields else "set the fields that are not local back"
        allowed = its.agreed is not None and may_go_on(fields, change)
        recipe = its.recipe if allowed else mine.recipe
        for what, theirs, own, cure in (
            ("of node {}", its.node, mine.node, "each node needs an --out of its own"),
            ("with train.seed {}", its.seed, mine.seed, "set it back"),
            ("of a recipe with digest {}", its.recipe[:12], recipe[:12], set_back),
            ("with {}", its.data.text, data.text, "give the dataset of before"),
        ):
            if theirs != own:
                raise CheckpointError(
                    f"{self.path}: a checkpoint {what.format(theirs)}, but this is one {what.format(own)}: {cure}, "
                    "or begin anew with --resume never"
                )
        if unknown := [expert for expert in self.state.owned if expert >= num_experts]:
            raise CheckpointError(f"{self.path}: damaged: it owns expert {unknown[0]}, of {num_experts}")


@system_errors(CheckpointError)
def open_checkpoint_directory(path: Path) -> Checkpoint:
    """Raises CheckpointError: `path` is not a checkpoint of a node, or its files are not what was written."""
    raw, checked = read_state(path)
    named = step_of(path.resolve())  # one that was not written to its end has none, and is swept away
    try:
        state = CheckpointState.model_validate(raw)
    except ValidationError as e:
        fault = e.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise CheckpointError(f"{path}: of another version of spes-mega? {where}: {fault['msg']}") from e
    if state.position.step != named:
        raise CheckpointError(f"{path}: a checkpoint of step {state.position.step}: give it back the name of that")
    require((WEIGHTS, MOMENTS, RNG, *((RESIDUAL,) if state.residual_round is not None else ())), checked, path)
    return Checkpoint(path, state)


def find_checkpoint(resume: str, folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """What `--resume` means: the newest whole checkpoint in `folder` (auto), none (never), or that of a path.

    Raises:
        CheckpointError: the path is not a whole checkpoint, or there are checkpoints, and none is whole.
    """
    if resume == "never":
        return None
    if resume != "auto":
        _refuse_shelf(Path(resume), say)
        return open_checkpoint_directory(Path(resume))
    return _newest_whole(folder, say)


def _newest_whole(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    paths = Shelf(folder).newest_first()
    for path in paths:
        try:
            return open_checkpoint_directory(path)
        except CheckpointError as e:
            say(f"cannot go on from a checkpoint: {e}")
    if paths:
        raise CheckpointError(f"{folder}: no checkpoint is whole; begin anew with --resume never")
    return None


def _refuse_shelf(path: Path, say: Callable[[str], None]) -> None:
    """Raises CheckpointError: `path` is a folder with checkpoints, not one of them; says which one it may be."""
    if (newest := _newest_whole(path, say)) is not None:
        newest.close()
        raise CheckpointError(f"{path}: a folder with checkpoints, the newest whole one is {newest.path}: pass that")


def random_state() -> torch.Tensor:
    """State of this rank's generators: uint8, of one size on all ranks of a node."""
    parts = [torch.get_rng_state()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_rng_state())
    return torch.cat(parts)


def set_random_state(state: torch.Tensor) -> None:
    """Back to what `random_state` gave; on a machine with other devices, as far as it goes."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size].clone())
    if torch.cuda.is_available() and state.numel() > size:
        torch.cuda.set_rng_state(state[size:].clone())
