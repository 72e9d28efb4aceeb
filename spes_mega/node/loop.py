"""The run of a node: rounds of local steps, each closed by an exchange of weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from spes_mega.errors import CheckpointError, DataError, DeadlineError, SpesError
from spes_mega.node.checkpoint.saver import Saver
from spes_mega.node.metrics import ConsoleReport, MetricsFile, StepMetrics
from spes_mega.node.stop import Stopped
from spes_mega.node.sync.weight_source import Position, WeightSource
from spes_mega.node.trainer import Trainer
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.recipe import Recipe

_LEAVES_WEIGHTS_AS_THEY_WERE = (DeadlineError.exit_code, DataError.exit_code)
"""Errors of the hub or of others that did not answer, and of data that a step could not begin with."""


@dataclass
class NodeRun:
    """Everything that a run needs; runs on all ranks.

    `report` and `metrics` are None on all but the first; `saver` on all, if no checkpoints are wanted.
    """

    recipe: Recipe
    trainer: Trainer
    weights: LocalModel
    source: WeightSource
    report: ConsoleReport | None
    metrics: MetricsFile | None
    saver: Saver | None = None
    node: int = 0
    _at: Position = field(init=False)
    _saved: Position = field(init=False)

    def run(self, begin: Position) -> None:
        """Train from there to `train.steps`.

        Raises whatever the node's data or the hub raise, on all ranks; Stopped after Ctrl-C or SIGTERM.
        """
        self._at = self._saved = begin
        try:
            while self.recipe.step_at(self._at.round) < self.recipe.train.steps:
                self._round()
        except Stopped:
            self._save()
            raise
        except SpesError as e:
            if e.exit_code in _LEAVES_WEIGHTS_AS_THEY_WERE:
                self._save()
            raise
        self._finish()

    def _finish(self) -> None:
        """What the source writes may fail, by a full disk for one: the last step is safe before it tries."""
        saved = self.source.keeps_result and self._save_the_last()
        try:
            self.source.finish(self.weights)
        except SpesError as e:
            if saved and e.exit_code == CheckpointError.exit_code:
                e.args = (f"{e}. The last step is in a checkpoint: mend that and start the same command again",)
            raise

    def _save_the_last(self) -> bool:
        """Whether a checkpoint of the last step is on the disk.

        Where there is no room for one, there may still be some for the result.
        """
        if self.saver is None:
            return False
        try:
            self._save()
            self.saver.close()
        except SpesError as e:
            if e.exit_code != CheckpointError.exit_code:
                raise
            self.saver.discard()
            return False
        return True

    def _round(self) -> None:
        """Train what is left of the open round, and exchange."""
        round_, last = self._at.round, self.recipe.step_at(self._at.round + 1)
        while self._at.step < last - 1:
            self._log(self._step())
            self._save_if_due()
        with self._logged_at_the_end(self._step() if self._at.step < last else None):
            if self.report is not None:
                self.report.status("synchronizing")
            round_ = self.source.exchange(self.weights, round_, self._at.tokens)
        self._at = Position(round_, self.recipe.step_at(round_), samples=self._at.samples)
        self._save_if_due()

    def _step(self) -> StepMetrics:
        metrics = self.trainer.step(self._at)
        self._check(metrics)
        self._at = self.trainer.after(self._at)
        return metrics

    def _save_if_due(self) -> None:
        every = self.recipe.checkpoint.every
        if every and self._at.step // every > self._saved.step // every:
            self._save()

    def _save(self) -> None:
        if self.saver is not None and self._at != self._saved:
            self.saver.save(self.weights, self._at, self.source)
            self._saved = self._at

    @contextmanager
    def _logged_at_the_end(self, metrics: StepMetrics | None) -> Iterator[None]:
        """The line of a round's last step comes after the exchange, whose cost it carries, even if that fails.

        It is None if an earlier process has taken that step.
        """
        try:
            yield
        finally:
            if metrics is not None:
                self._log(metrics)

    def _log(self, metrics: StepMetrics) -> None:
        traffic = self.source.take_traffic()
        metrics.sync_seconds = traffic.seconds
        metrics.bytes_up, metrics.bytes_down = traffic.bytes_up, traffic.bytes_down
        if self.metrics is not None:
            self.metrics.write(metrics)
        if self.report is not None:
            self.report.step(metrics)

    def _check(self, metrics: StepMetrics) -> None:
        """Before what the step has made of the weights is pushed or saved. Raises SpesError: they are of no use."""
        norm = metrics.grad_norm
        if not math.isfinite(metrics.lm_loss):
            fault = f"the loss is {metrics.lm_loss}"
        elif not math.isfinite(norm) or norm < 0:  # DeepSpeed's functions say -1 for both
            fault = f"the gradient's norm is {'NaN or infinite' if norm < 0 else norm}"
        else:
            return
        raise SpesError(
            f"node {self.node}, step {metrics.step}: {fault}; training has diverged: lower train.lr, lengthen "
            "train.warmup_steps, or look at the data. The newest checkpoint may have diverged already: --resume takes "
            "an older one, or never"
        )
