"""What the hub answers a node, as the node's code sees it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.tensor_specs import Shape


@dataclass(frozen=True)
class Joined:
    """Where the run stands: `round` is the newest committed state, and the round that is open."""

    round: int
    num_rounds: int
    pushed: bool
    """The hub already holds this node's push for the open round (this process is a restart)."""
    absent: tuple[int, ...]
    """Nodes whose experts others train in the open round: see `outer.ownership.with_absent`."""

    @property
    def finished(self) -> bool:
        return self.round >= self.num_rounds


class Pulled:
    """What a node has to replace to hold a state: iterate over (name, fp32 tensor), or read by name.

    The tensors are in a spool file: read them before the next push or pull, and close this when done.
    """

    def __init__(
        self,
        opening: pb.PullOpening,
        shapes: dict[str, Shape],
        full: bool,
        read: Callable[[str], Tensor],
        close: Callable[[], None],
    ) -> None:
        self.round = opening.round
        self.full = full
        """False: what the node alone trains, or nobody has changed, is left out, because the node holds it."""
        self.absent = tuple(opening.absent)
        """Nodes whose experts others train from this state on: see `outer.ownership.with_absent`."""
        self.shapes = shapes
        self._read = read
        self._close: Callable[[], None] | None = close

    def read(self, name: str) -> Tensor:
        """One tensor, fp32. Raises KeyError if it need not be replaced, ValueError after `close`."""
        if self._close is None:
            raise ValueError("this state was closed: its file has other content by now")
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.read(name)) for name in self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def close(self) -> None:
        """Free the spool file."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
