"""The picture of a run: the loss of every node, with the rounds and the merges marked."""

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a node's `metrics.jsonl`."""
    with path.open(encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def plot_losses(
    nodes: dict[str, list[dict[str, Any]]],
    rounds: list[int],
    merges: list[int],
    levels: dict[str, float],
    out: Path,
) -> None:
    """Draw training losses over steps.

    Args:
        nodes: rows of metrics for each node's label.
        rounds: steps at which a round was closed; `merges`: those at which experts were merged as well.
        levels: held-out losses to draw as horizontal lines, by label.
        out: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for label, rows in nodes.items():
        axes.plot([r["step"] for r in rows], [r["lm_loss"] for r in rows], linewidth=1, label=label)
    for i, step in enumerate(rounds):
        axes.axvline(step, color="0.75", linewidth=1, zorder=0, label=None if i else "round closed")
    for i, step in enumerate(merges):
        axes.axvline(step, color="tab:red", linewidth=1.2, linestyle="--", zorder=0, label=None if i else "merge")
    for (label, value), style in zip(levels.items(), (":", "-.", "--"), strict=False):
        axes.axhline(value, color="0.3", linestyle=style, linewidth=1, label=f"{label}: {value:.3f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
