"""What a node remembers where weights travel with loss: the weights as they are published, and what its pushes lost.

Everything lies in unlinked spool files and is read and written by rows, so that memory does not grow with the model.
"""

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from spes_mega.layout.storage.rows import row_slices
from spes_mega.outer.codecs import lossy
from spes_mega.wire.errors import PayloadError
from spes_mega.wire.payload import PayloadWriter, StoredPayload, in_turn
from spes_mega.wire.policy import WirePolicy
from spes_mega.wire.tensor_specs import Shape, Shapes, forms_of, in_fp32


class _Versions:
    """fp32 tensors of which new rows are staged beside the current ones, and take their place by `commit`."""

    def __init__(self, shapes: Shapes, directory: Path | None, stack: ExitStack) -> None:
        forms = in_fp32(shapes)
        self._writers, self._readers = [], []
        for _ in range(2):
            spool = tempfile.TemporaryFile(dir=directory, prefix="spes-mega-")  # noqa: SIM115
            file = cast(BinaryIO, stack.enter_context(spool))
            self._writers.append(PayloadWriter(file, forms))
            self._readers.append(StoredPayload(file, "spool file"))
        self._current: dict[str, int] = {}

    @property
    def names(self) -> Collection[str]:
        """Tensors that have been written and committed."""
        return self._current.keys()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._readers[self._current[name]].read_rows(name, start, stop)

    def write(self, name: str, start: int, rows: Tensor) -> None:
        """New rows in the place of the current ones."""
        self._writers[self._current.setdefault(name, 0)].write_rows(name, start, rows)

    def stage(self, name: str, start: int, rows: Tensor) -> None:
        self._writers[1 - self._current.get(name, 1)].write_rows(name, start, rows)

    def commit(self, names: Iterable[str]) -> None:
        """What has been staged of these tensors, all rows of them, becomes current."""
        for name in names:
            self._current[name] = 1 - self._current.get(name, 1)


class Replica:
    """A node's counterpart of the hub's published state.

    Of what the node alone trains the hub has the exact values S, and this node's pushes have lost e of it: the node
    goes on from S + e, so that what the hub lacks is always e, also after a merge or a restart.
    """

    def __init__(
        self,
        shapes: Shapes,
        policy: WirePolicy,
        directory: Path | None,
        private_of: Callable[[Collection[int]], Collection[str]],
    ) -> None:
        """`directory` needs room for two copies of the weights in fp32, and one or two of what the node trains.

        `private_of` gives `WirePolicy.private` of this node while the nodes are absent that it is given.
        """
        self.round: int | None = None
        """Whose published weights these are; None before the first pull, and while one is applied."""
        self.pushed_round: int | None = None
        """The last round that took a push of this node."""
        self.shapes: dict[str, Shape] = dict(shapes)
        self._policy = policy
        self._private_of = private_of
        self._private: Collection[str] = ()
        self._stack = ExitStack()
        self._weights = _Versions(shapes, directory, self._stack)
        """As published; of what is private, as the node began the round."""
        self._residual = _Versions(shapes, directory, self._stack)
        self._arrived: StoredPayload | None = None
        self._coming: int | None = 0
        self._read = False
        """Whether something was read of what has arrived."""
        self._worker = ThreadPoolExecutor(1)
        self._settling: Future[None] | None = None
        self._staged: tuple[list[str], set[str]] = ([], set())
        self._pushed: list[str] = []
        self._kept: set[str] = set()

    def encode(
        self,
        file: BinaryIO,
        shapes: Shapes,
        tensors: Iterable[tuple[str, Tensor]],
        metadata: Mapping[str, str],
    ) -> int:
        """Write a push to `file`; returns its bytes. What it loses counts only after `accepted`."""
        self.settle()
        if self.round is None:
            raise ValueError("a node pulls before it pushes: changes are against what is published")
        private = set(shapes).intersection(self._private)
        writer = PayloadWriter(file, forms_of(shapes, self._policy.up), metadata)
        for name, tensor in in_turn(shapes, tensors):
            for start, stop in row_slices(tuple(tensor.shape)):
                rows = tensor[start:stop].detach().to(device="cpu", dtype=torch.float32)
                if name in private:
                    self._weights.stage(name, start, rows)
                if self._policy.up(name).lossless:
                    writer.write_rows(name, start, rows)
                else:
                    change = self._change(name, start, stop, rows)
                    lossy(self._policy.up(name)).subtract(change, *writer.write_rows(name, start, change))
                    self._residual.stage(name, start, change)
        self._staged = list(shapes), private
        return writer.size

    def _change(self, name: str, start: int, stop: int, rows: Tensor) -> Tensor:
        before = self._weights.rows(name, start, stop)
        change = torch.sub(rows, before, out=before)
        return change.add_(self._residual.rows(name, start, stop)) if name in self._residual.names else change

    def accepted(self, round_: int) -> None:
        """The hub has taken the push that was encoded last."""
        (self._pushed, self._kept), self._staged = self._staged, ([], set())
        self._residual.commit(name for name in self._pushed if not self._policy.up(name).lossless)
        self._weights.commit(self._kept)
        self.pushed_round = round_

    def follow(self, payload: StoredPayload, round_: int, full: bool, absent: Collection[int]) -> None:
        """Go to the state of `round_`: `read` gives what has come already applied, and `settle` keeps it.

        `absent` are the nodes that do not take part from it on.

        Raises:
            PayloadError: the payload is not one that leads there from what this node holds.
        """
        self._check(payload, round_, full)
        self._private = self._private_of(absent)
        self._arrived, self._read = payload, False
        self.round = None  # all would be needed again if something goes wrong
        # With a push for the open round this node is past its state already: what that push lost is of the next one.
        self._coming = None if round_ == self.pushed_round else round_

    def settle(self) -> None:
        """Write what has come to the files, or wait until that is done; the payload is not needed any more.

        Raises CheckpointError: the disk is full; the next pull is of everything.
        """
        if self._settling is None:
            self._settle()
        else:
            settling = self._settling
            try:
                settling.result()
            finally:
                if settling.done():  # else a signal came in between
                    self._settling = None

    def settle_behind(self, payload: StoredPayload, then: Callable[[], None]) -> None:
        """The same while the node goes on training, and then call `then`; only that if `payload` is settled already."""
        if self._arrived is not payload:
            then()
            return

        def settle() -> None:
            try:
                self._settle()
            finally:
                then()

        self._settling = self._worker.submit(settle)

    def _settle(self) -> None:
        if (arrived := self._arrived) is None:
            return
        try:
            for name in arrived.forms:
                for start, rows in self._applied(arrived, name):
                    self._weights.write(name, start, rows)
            self.round = self._coming
        finally:
            self._arrived = None

    def _applied(self, payload: StoredPayload, name: str) -> Iterator[tuple[int, Tensor]]:
        """(start, new rows) of a tensor that has come."""
        shape, codec = payload.forms[name]
        for start, stop in row_slices(shape):
            if codec.lossless:
                rows = payload.read_rows(name, start, stop)
                if name in self._private and name in self._residual.names:
                    rows.add_(self._residual.rows(name, start, stop))
            else:
                payload.add_rows(name, start, stop, rows := self._weights.rows(name, start, stop))
            yield start, rows

    def _check(self, payload: StoredPayload, round_: int, full: bool) -> None:
        # What the hub has of these is what this node has.
        own = self._kept if self.pushed_round == self.round else set()
        foreign = set(self._private) - own
        for name, (shape, codec) in payload.forms.items():
            if shape != self.shapes.get(name):
                raise PayloadError(f"state of round {round_}: {name} of shape {shape} was not expected")
            if not codec.lossless and (full or name in foreign or codec is not self._policy.down(name)):
                raise PayloadError(f"state of round {round_}: {name} came in {codec.name}, which was not expected")
        if full and (missing := [name for name in self.shapes if name not in payload.forms]):
            raise PayloadError(f"state of round {round_}: {missing[0]} is missing")
        if full:
            return
        if self.round != round_ - 1:
            raise PayloadError(f"the hub sent the change to round {round_} to a node that holds round {self.round}")
        needed = foreign.union(self._pushed if self.pushed_round == self.round else ()) - own
        if left_out := sorted(needed.difference(payload.forms)):
            raise PayloadError(f"state of round {round_}: {left_out[0]} is missing, which is not this node's alone")

    def read(self, name: str) -> Tensor:
        """A tensor as the node begins the round with it, fp32."""
        shape = self.shapes[name]
        if self._arrived is None or name not in self._arrived.forms:
            return self._weights.rows(name, 0, shape[0])
        self._read = True
        tensor: Tensor | None = None
        for start, rows in self._applied(self._arrived, name):
            if len(rows) == shape[0]:
                return rows
            tensor = torch.empty(shape) if tensor is None else tensor
            tensor[start : start + len(rows)] = rows
        assert tensor is not None, "a tensor has rows"
        return tensor

    def save_residual(self, path: Path) -> None:
        """Write what accepted pushes lost so far to a safetensors file."""
        shapes = {name: self.shapes[name] for name in self.shapes if name in self._residual.names}
        with path.open("w+b") as file:
            writer = PayloadWriter(file, in_fp32(shapes))
            for name, shape in shapes.items():
                for start, stop in row_slices(shape):
                    writer.write_rows(name, start, self._residual.rows(name, start, stop))

    def restore_residual(self, path: Path) -> None:
        """Go on from what `save_residual` wrote, before anything is read of the state that was pulled last.

        Raises PayloadError: it is not of this model, or damaged.
        """
        if self.round is not None or self._read:
            raise ValueError("what earlier pushes lost is part of the state, of which something was read already")
        payload = StoredPayload.open(path, str(path))
        try:
            for name, (shape, codec) in payload.forms.items():
                if shape != self.shapes.get(name) or not codec.lossless or self._policy.up(name).lossless:
                    raise PayloadError(f"{path}: {name} of shape {shape} in {codec.name} was not expected")
            payload.check_finite()
            for name, shape in payload.shapes.items():
                for start, stop in row_slices(shape):
                    self._residual.write(name, start, payload.read_rows(name, start, stop))
        finally:
            payload.close()

    def close(self) -> None:
        """Free the spool files."""
        self._worker.shutdown()
        self._arrived = None
        self._stack.close()
