"""The picture of a run: the loss of every node, with the rounds and the merges marked."""

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a node's `metrics.jsonl`."""
    with path.open(encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def trailing_mean(values: list[float], window: int = 8) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def plot_losses(
    nodes: dict[str, list[dict[str, Any]]],
    rounds: list[int],
    merges: list[int],
    levels: dict[str, float],
    out: Path,
) -> None:
    """Draw training losses over steps: each step faintly, the trailing mean of eight boldly.

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
        steps, losses = [r["step"] for r in rows], [r["lm_loss"] for r in rows]
        (line,) = axes.plot(steps, trailing_mean(losses), linewidth=1.8, label=label)
        axes.plot(steps, losses, linewidth=0.7, alpha=0.3, color=line.get_color())
    for i, step in enumerate(rounds):
        axes.axvline(step, color="0.75", linewidth=1, zorder=0, label=None if i else "round closed")
    for i, step in enumerate(merges):
        axes.axvline(step, color="tab:red", linewidth=1.2, linestyle="--", zorder=0, label=None if i else "merge")
    for (label, value), style in zip(levels.items(), (":", "-.", "--"), strict=False):
        axes.axhline(value, color="0.3", linestyle=style, linewidth=1, label=f"{label}: {value:.3f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(out)
    pyplot.close(figure)
