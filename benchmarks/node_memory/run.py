"""Peak memory of a node and of its hub in a real round: `spes-mega hub` and `spes-mega launch`, on the CPU."""

import json
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from scratch import scratch

from spes_mega.recipe import Recipe, load_recipe
from tests.integration.processes import Hub, launch, peak_of_rank, peak_rss

JOIN_S = 90.0
"""For the only node that comes; then the hub goes on without the others."""
PATIENCE_S = 3600.0


@click.command()
@click.option("--recipe", type=click.Path(exists=True, path_type=Path), default=Path("configs/2b.yaml"))
@click.option("--node", default=0, show_default=True, help="which of the recipe's nodes is started")
@click.option("--sequence", default=256, show_default=True, help="tokens of a sample; the micro-batch is one sample")
@click.option("--steps", default=2, show_default=True, help="optimizer steps, all of them in one round")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a field of the recipe")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/benchmark-node-memory"))
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def main(
    recipe: Path, node: int, sequence: int, steps: int, overrides: tuple[str, ...], folder: Path, as_json: bool
) -> None:
    """Train one node of RECIPE at its full size against a hub that draws the weights from the seed, for one round.

    The other nodes never come. Peaks are VmHWM of the hub's process and of the rank that trains.
    """
    with scratch(folder):
        short = _short(recipe, overrides, sequence, steps, folder)
        _write_data(folder / "train", load_recipe(short))
        figures = _run(short, node, folder)
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


def _short(recipe: Path, overrides: tuple[str, ...], sequence: int, steps: int, folder: Path) -> Path:
    """The recipe, for one short round of one node."""
    nodes = load_recipe(recipe, overrides).spes.num_nodes
    settings = (
        *overrides,
        *(f"train.{key}={value}" for key, value in {
            "steps": steps, "warmup_steps": 0, "seq_len": sequence, "batch_size": "null", "micro_batch_size": 1,
            "log_every": 1,
        }.items()),
        *(f"spes.{key}={value}" for key, value in {
            "sync_every": steps, "merge_steps": 0, "join_deadline_s": JOIN_S, "min_nodes": 1, "snapshot_every": 1000,
            "round_deadline_s": PATIENCE_S, "rpc_deadline_s": PATIENCE_S,
        }.items()),
        "checkpoint.every=0",
        f"data.train={(folder / 'train').absolute()}",
    )  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(load_recipe(recipe, settings).model_dump(mode="json")))
    click.echo(f"{recipe}: {nodes} nodes, of which one is started", err=True)
    return path


def _write_data(prefix: Path, recipe: Recipe) -> None:
    """Random tokens, enough for every node to have its own."""
    count = (recipe.train.steps + 1) * (recipe.train.seq_len + 1) * recipe.spes.num_nodes * 2
    tokens = np.random.default_rng(1).integers(0, recipe.model.vocab_size, count, dtype=np.int32)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    builder.add_document(tokens, [count])
    builder.finalize(f"{prefix}.idx")


def _run(recipe: Path, node: int, folder: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        hub = Hub(recipe, folder / "hub")
        stack.callback(hub.end)
        started = time.monotonic()
        trained = launch(recipe, "--node", node, "--hub", hub.address, "--out", folder / "node")
        stack.callback(trained.end)
        peaks = {"hub": 0, "node": 0}
        while trained.popen.poll() is None:
            peaks["hub"] = max(peaks["hub"], peak_rss(hub.popen.pid))
            peaks["node"] = max(peaks["node"], peak_of_rank(trained))
            time.sleep(0.2)
        trained.succeed()
        seconds = time.monotonic() - started
        peaks["hub"] = max(peaks["hub"], peak_rss(hub.popen.pid))
    rows = [json.loads(line) for line in (folder / "node/metrics.jsonl").read_text().splitlines()]
    found = re.search(r"([\d,]+) parameters, ([\d,]+) trained here", trained.output)
    assert found, trained.output
    total, trainable = (int(number.replace(",", "")) for number in found.groups())
    return {
        "node_peak_rss_bytes": peaks["node"],
        "hub_peak_rss_bytes": peaks["hub"],
        "parameters": total,
        "trained_parameters": trainable,
        "steps": len(rows),
        "rounds": len({row["round"] for row in rows if row["bytes_up"]}),
        "losses": [row["lm_loss"] for row in rows],
        "sync_seconds": [row["sync_seconds"] for row in rows],
        "tokens_per_s": [row["tokens_per_s"] for row in rows],
        "wall_s": seconds,
    }


if __name__ == "__main__":
    main()
