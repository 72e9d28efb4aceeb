"""What a node reports: a JSON line a step, and a live line on the console."""

import json
import math
import os
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from spes_mega.errors import CheckpointError, system_errors


@dataclass
class StepMetrics:
    """One optimizer step, averaged over its micro-batches and the node's ranks.

    `aux_loss` and `z_loss` (router) are means over the MoE layers, before their coefficients. Bytes and seconds of
    synchronization belong to the step that they follow; those of the first pull to the first step. With overlap,
    seconds are those that training stood still, and bytes belong to the step at whose end they had gone.
    """

    step: int
    round: int
    lm_loss: float
    aux_loss: float
    z_loss: float
    logit_z_loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    sync_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    tokens_per_expert: list[list[int]] = field(default_factory=list)  # [moe layer][expert]


class MetricsFile:
    """Appends lines to `metrics.jsonl`; lines of steps after `done_steps`, which come again, are dropped first.

    A run that begins at step 0 sets an older file aside as `metrics.jsonl.old`. All raise CheckpointError: something
    else has its name, or the disk does not take it.
    """

    def __init__(self, path: Path, done_steps: int) -> None:
        self._path = path
        with self._writing(), system_errors(CheckpointError):  # an error that has a path of its own names that
            self._stream: IO[str] = _open_after(path, done_steps)

    def write(self, metrics: StepMetrics) -> None:
        """One line, on disk when this returns. Numbers that are not finite become null."""
        values = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(metrics).items()
        }
        with self._writing():
            self._stream.write(json.dumps(values, allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        with self._writing():
            self._stream.close()

    def _writing(self) -> AbstractContextManager[None]:
        return system_errors(CheckpointError, self._path, "cannot be written")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_after(path: Path, step: int) -> IO[str]:
    if not path.is_file() and os.path.lexists(path):
        raise CheckpointError(f"{path}: this is not a file: move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    if step == 0 and path.is_file() and path.stat().st_size:
        path.replace(path.with_name(f"{path.name}.old"))
    kept = _lines_up_to(path, step)
    rewritten = path.with_name(f"{path.name}.new")
    rewritten.write_text("".join(kept), encoding="utf-8")
    rewritten.replace(path)  # a node that is killed meanwhile keeps its lines
    return path.open("a", encoding="utf-8")


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break  # the half line of a node that was killed
        kept.append(line)
    return kept


class ConsoleReport:
    """A progress bar with the latest figures on a terminal, one plain line every `log_every` steps elsewhere."""

    def __init__(self, node: int, steps: int, log_every: int, console: Console | None = None) -> None:
        self.node, self.steps, self.log_every = node, steps, log_every
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("node {task.fields[node]}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),  # last: a narrow terminal cuts it, and not what comes before
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=steps, node=node)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(f"node {self.node}: {text}", markup=False, highlight=False, soft_wrap=True)

    def status(self, text: str) -> None:
        """What the node is doing between steps; shown on a terminal only."""
        self._progress.update(self._task, description=text)

    def step(self, metrics: StepMetrics) -> None:
        """Report a finished step."""
        due = metrics.step % self.log_every == 0 or metrics.step == self.steps
        if self.console.is_terminal:
            self._progress.update(self._task, completed=metrics.step, description=describe(metrics) if due else None)
        elif due:
            self.say(f"step {metrics.step}/{self.steps} {describe(metrics)}")


def describe(metrics: StepMetrics) -> str:
    """The figures of a step in one short line."""
    parts = [f"round {metrics.round}", f"loss {metrics.lm_loss:.4f}"]
    if metrics.tokens_per_expert:
        parts.append(f"aux {metrics.aux_loss:.3f}")
    parts += [f"grad {metrics.grad_norm:.2f}", f"lr {metrics.lr:.2e}", f"{metrics.tokens_per_s:.0f} tokens/s"]
    if metrics.sync_seconds:
        parts.append(f"sync {metrics.sync_seconds:.1f} s")
    return "  ".join(parts)
