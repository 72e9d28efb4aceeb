"""What the training loop needs of the world outside the node: where weights come from, and where they go."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import NonNegativeInt

from spes_mega.node.zero.local_model import LocalModel

if TYPE_CHECKING:
    from spes_mega.node.checkpoint.state import Checkpoint


@dataclass(frozen=True)
class Position:
    """Where a node is: `step` steps are done, of which those of the open `round` had `tokens` tokens.

    `samples` are those of its data that it has trained on, in whatever batches; None in earlier versions' checkpoints.
    """

    round: NonNegativeInt
    step: NonNegativeInt
    tokens: NonNegativeInt = 0
    samples: NonNegativeInt | None = None


@dataclass
class Traffic:
    """Seconds and bytes spent on synchronization since the last `take`; on ranks other than 0 the bytes are 0."""

    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class WeightSource(Protocol):
    """What the training loop needs of the world outside the node."""

    @property
    def result(self) -> str:
        """Where the trained model is, for the node's last line."""

    @property
    def owned(self) -> tuple[int, ...]:
        """Experts that the node trains at present."""

    def start(self, weights: LocalModel, checkpoint: "Checkpoint | None" = None) -> int:
        """Fill the weights; returns the round that they belong to.

        If that is the round of the checkpoint, and `resumes_rounds`, its weights are still to be laid over them.
        """

    @property
    def resumes_rounds(self) -> bool:
        """Whether a node can go on in the midst of a round from what it held there."""

    @property
    def keeps_result(self) -> bool:
        """Whether `finish` writes the trained model."""

    def save_residual(self, path: Path) -> int | None:
        """On rank 0: write what pushes lost so far; returns the round whose push it belongs into.

        None, and no file, if pushes lose nothing.
        """

    def exchange(self, weights: LocalModel, round_: int, tokens: int) -> int:
        """Close `round_`, trained on `tokens` tokens; returns the round of the weights afterwards.

        The model may train other experts from then on.
        """

    def finish(self, weights: LocalModel) -> None:
        """After the last round."""

    def leave(self) -> None:
        """However the run ended; does not raise."""

    def take_traffic(self) -> Traffic:
        """What synchronization has cost since the last call."""
