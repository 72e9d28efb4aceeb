"""How far a node's update leads away from the state that it trained from."""

from collections.abc import Iterator

from torch import Tensor

from spes_mega.layout.reader import Checkpoint
from spes_mega.layout.storage.rows import row_slices
from spes_mega.outer.codecs import FP32
from spes_mega.wire.payload import StoredPayload


def update_norm(update: Iterator[Tensor]) -> float:
    """L2 norm of an update over all its rows, which come in slices of any shape; sums are in fp64."""
    return float(sum(float(rows.double().square().sum()) for rows in update)) ** 0.5


def update_rows(payload: StoredPayload, base: Checkpoint) -> Iterator[Tensor]:
    """What a push changes, in slices of rows: fp32 carries values, the lossy codecs the change itself."""
    for name, (shape, codec) in payload.forms.items():
        for start, stop in row_slices(shape):
            rows = payload.read_rows(name, start, stop)
            yield rows - base.read_rows(name, start, stop).float() if codec is FP32 else rows
