"""The run of a node: rounds of local steps, each closed by an exchange of weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spes_mega.errors import SpesError
from spes_mega.node.local_model import LocalModel
from spes_mega.node.metrics import ConsoleReport, MetricsFile, StepMetrics
from spes_mega.node.trainer import Trainer
from spes_mega.node.weight_source import WeightSource
from spes_mega.recipe import Recipe


@dataclass
class NodeRun:
    """Everything that a run needs; runs on all ranks. `report` and `metrics` are None on all but the first."""

    recipe: Recipe
    trainer: Trainer
    weights: LocalModel
    source: WeightSource
    report: ConsoleReport | None
    metrics: MetricsFile | None

    def run(self, round_: int) -> None:
        """Train from the start of `round_` to `train.steps`.

        Raises whatever the node's data or the hub raise, on all ranks; Stopped after Ctrl-C or SIGTERM.
        """
        while (step := self.recipe.step_at(round_)) < self.recipe.train.steps:
            round_ = self._round(round_, step)
        self.source.finish(self.weights)

    def _round(self, round_: int, done: int) -> int:
        """Train `round_` after `done` steps, and exchange; returns the round of the weights then held."""
        last = self.recipe.step_at(round_ + 1)
        for step in range(done + 1, last):
            self._log(self.trainer.step(step, round_))
        with self._logged_at_the_end(self.trainer.step(last, round_)):
            if self.report is not None:
                self.report.status("synchronizing")
            return self.source.exchange(self.weights, round_, (last - done) * self.trainer.tokens_per_step)

    @contextmanager
    def _logged_at_the_end(self, metrics: StepMetrics) -> Iterator[None]:
        """The line of a round's last step comes after the exchange, whose cost it carries, even if that fails."""
        self._check(metrics)
        try:
            yield
        finally:
            self._log(metrics)

    def _log(self, metrics: StepMetrics) -> None:
        self._check(metrics)
        traffic = self.source.take_traffic()
        metrics.sync_seconds = traffic.seconds
        metrics.bytes_up, metrics.bytes_down = traffic.bytes_up, traffic.bytes_down
        if self.metrics is not None:
            self.metrics.write(metrics)
        if self.report is not None:
            self.report.step(metrics)

    def _check(self, metrics: StepMetrics) -> None:
        if not math.isfinite(metrics.lm_loss):
            raise SpesError(
                f"step {metrics.step}: the loss is {metrics.lm_loss}; training has diverged: lower train.lr, "
                "lengthen train.warmup_steps, or look at the data"
            )
