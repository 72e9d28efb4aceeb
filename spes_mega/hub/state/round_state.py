"""A committed state as the hub reads and writes it: the weights that all nodes hold, and what lies beside them.

    model.safetensors       P: the published weights, fp32
    residual.safetensors    R: what publishing them in a lossy codec lost so far; P + R is the exact state
    velocity.safetensors    momentum of the outer optimizer
    delta.safetensors       the payload that took the last round's P to this one; with a merge also what that changed of
                            each expert for the node that alone trains it

The last three are there only where the recipe asks for a lossy codec down, or for momentum.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from spes_mega.errors import SpesError, StoreError
from spes_mega.layout.reader import Checkpoint, open_checkpoint
from spes_mega.layout.storage.checksums import TensorChecksums
from spes_mega.layout.storage.rows import is_finite
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.outer.codecs import lossy
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.payload import PayloadWriter, StoredPayload
from spes_mega.wire.policy import WirePolicy, delta_forms, merge_name
from spes_mega.wire.tensor_specs import Forms, Shape, in_fp32

RESIDUAL, VELOCITY, DELTA = "residual.safetensors", "velocity.safetensors", "delta.safetensors"
BESIDE = (RESIDUAL, VELOCITY, DELTA)
"""Files that belong to the hub's own working, and not to the model."""


class Published:
    """A committed state, open for reading. Close it when done."""

    def __init__(self, directory: Path, round_: int, policy: WirePolicy) -> None:
        """Raises CheckpointError or StoreError: a file is missing or damaged."""
        self._stack = ExitStack()
        try:
            self.weights: Checkpoint = self._stack.enter_context(open_checkpoint(directory))
            names = self.weights.names if round_ else ()  # the initial state has lost nothing, and came from no other
            self._lossy = [name for name in names if not policy.down(name).lossless]
            self._moving = [name for name in names if policy.optimizer(name).momentum]
            self._residual = self._open(directory / RESIDUAL, self._lossy)
            self._velocity = self._open(directory / VELOCITY, self._moving)
            self.delta = self._open(directory / DELTA, self._lossy)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, names: Iterable[str]) -> StoredPayload | None:
        if not names:
            return None
        try:
            payload = StoredPayload.open(path, str(path))
        except (OSError, PayloadError) as e:
            raise StoreError(f"{path}: missing or damaged: {e}; restore the state directory from a copy") from e
        self._stack.callback(payload.close)
        return payload

    @property
    def names(self) -> tuple[str, ...]:
        return self.weights.names

    def shape(self, name: str) -> Shape:
        return self.weights.shape(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of P, fp32."""
        return self.weights.read_rows(name, start, stop)

    def residual(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of R, fp32; zeros in the initial state, and of what is published without loss."""
        return self._beside(self._residual, name, start, stop)

    def velocity(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of the momentum, fp32; zeros in the initial state."""
        return self._beside(self._velocity, name, start, stop)

    def exact(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of P + R, fp32."""
        rows = self.rows(name, start, stop)
        if self._residual is not None and name in self._residual.forms:
            rows.add_(self.residual(name, start, stop))
        return rows

    def _beside(self, payload: StoredPayload | None, name: str, start: int, stop: int) -> Tensor:
        if payload is None or name not in payload.forms:
            return torch.zeros(stop - start, *self.shape(name)[1:])
        return payload.read_rows(name, start, stop)

    def close(self) -> None:
        self._stack.close()


class Publisher:
    """Writes the state that follows on another one, by rows."""

    def __init__(
        self,
        weights: CheckpointWriter,
        policy: WirePolicy,
        changed: Iterable[str],
        merged: Collection[str],
        stack: ExitStack,
    ) -> None:
        """`changed` are the names that will be published anew, `merged` the `merged_names` if the round ends with a
        merge; `stack` closes the files."""
        self._weights, self._policy = weights, policy
        self._merged = frozenset(merged)
        self._stack = stack
        self._files: dict[str, tuple[BinaryIO, TensorChecksums]] = {}
        shapes = {name: weights.shape(name) for name in weights.names}
        lossy = {name: shape for name, shape in shapes.items() if not policy.down(name).lossless}
        moving = {name: shape for name, shape in shapes.items() if policy.optimizer(name).momentum}
        self._delta = self._payload(DELTA, delta_forms(shapes, policy, changed, merged)) if lossy else None
        self._residual = self._payload(RESIDUAL, in_fp32(lossy)) if lossy else None
        self._velocity = self._payload(VELOCITY, in_fp32(moving)) if moving else None

    def _payload(self, name: str, forms: Forms) -> PayloadWriter:
        file = self._stack.enter_context(self._weights.open_beside(name))
        checksums = TensorChecksums()
        self._files[name] = file, checksums
        return PayloadWriter(file, forms, checksums=checksums)

    def add_checksums(self) -> None:
        """All has been written."""
        for name, (file, checksums) in self._files.items():
            self._weights.add_checksum(name, checksums.of_file(file.fileno(), name))

    def values(self, name: str, start: int, rows: Tensor) -> None:
        """New rows of P, as they are. Raises SpesError if they are not finite."""
        self._weights.write_rows(name, start, _finite(name, rows))

    def change(self, name: str, start: int, before: Tensor, change: Tensor) -> None:
        """Move rows of P from `before` by what the codec makes of `change`; the rest is R. Both are overwritten.

        Raises SpesError if the new rows are not finite.
        """
        assert self._delta is not None, "the tensor is lossy"
        assert self._residual is not None, "the tensor is lossy"
        wire, scale = self._delta.write_rows(name, start, change)
        lossy(self._policy.down(name)).move(before, change, wire, scale)
        self._weights.write_rows(name, start, _finite(name, before))
        self._residual.write_rows(name, start, change)

    def merged(self, name: str, start: int, before: Tensor, change: Tensor, merge: Tensor) -> None:
        """The same after a merge that changes new exact rows, before + change, by `merge`. All are overwritten.

        Who alone trains an expert gets what the codec makes of `merge`, so that is the merge for everybody.
        """
        if name in self._merged:
            assert self._delta is not None, "the tensor is lossy"
            wire, scale = self._delta.write_rows(merge_name(name), start, merge)
            lossy(self._policy.down(name)).add(change, wire, scale)
        else:
            change.add_(merge)
        self.change(name, start, before, change)

    def unchanged(self, name: str, start: int, rows: Tensor, residual: Tensor) -> None:
        """Rows of P and R of a lossy tensor, as they were."""
        assert self._residual is not None, "the tensor is lossy"
        self._weights.write_rows(name, start, rows)
        self._residual.write_rows(name, start, residual)

    def velocity(self, name: str, start: int, rows: Tensor) -> None:
        """New rows of the momentum. Raises SpesError if they are not finite."""
        assert self._velocity is not None, "the tensor has momentum"
        self._velocity.write_rows(name, start, _finite(name, rows))


def _finite(name: str, rows: Tensor) -> Tensor:
    """Pushes are finite, but their mean times a learning rate, or what a codec makes of it, need not be."""
    if math.isfinite(rows.sum().item()):  # what is not finite stays so in a sum, which takes a third of the time
        return rows
    if not is_finite(rows):
        raise SpesError(
            f"the new state of {name} would have NaN or infinite values: what the nodes pushed is finite, but too "
            "large for spes.outer and spes.wire.down. The last state is whole: remove the round's directory in "
            "STATE/pushes, set spes.max_update_norm, and start the hub again; its nodes train the round anew"
        )
    return rows


@contextmanager
def publishing(
    weights: CheckpointWriter, policy: WirePolicy, changed: Iterable[str], merged: Collection[str] = ()
) -> Iterator[Publisher]:
    """A Publisher whose files are closed in the end; the CheckpointWriter makes them durable and commits them."""
    with ExitStack() as stack:
        publisher = Publisher(weights, policy, changed, merged, stack)
        yield publisher
        publisher.add_checksums()
