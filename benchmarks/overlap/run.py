"""What `spes.overlap` does to lost time and to the loss: two nodes over a slow line, with and without it."""

import json
import random
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import numpy as np
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from scratch import scratch

from tests.hub.relay import Relay
from tests.integration.processes import COMMAND, Hub, Process, launch

VOCAB = 64
MODEL = {
    "family": "qwen3_moe", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "num_experts": 4, "top_k": 2, "expert_hidden_size": 64, "vocab_size": VOCAB, "max_seq_len": 64,
}  # fmt: skip


@click.command()
@click.option("--steps", default=150, show_default=True)
@click.option("--sync-every", default=15, show_default=True)
@click.option("--bytes-per-second", default=1_000_000, show_default=True, help="of each node's line, either way")
@click.option("--runs", default=3, show_default=True, help="each with another seed, both ways")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("runs/benchmark-overlap"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def main(steps: int, sync_every: int, bytes_per_second: int, runs: int, folder: Path, as_json: bool) -> None:
    """Train a tiny model of four experts on two nodes, and print means over the runs.

    Lost time is what training stood still, in the median round of those that neither wait for a node that starts later
    nor are the last one; round_s is the median time of a round's steps; time_ratio compares the sum of both.
    """
    if steps < 5 * sync_every:
        raise click.UsageError("five rounds are needed: steps must be at least 5 times sync-every")
    with scratch(folder):
        for name, documents in (("train", 400), ("heldout", 40)):
            _write_data(folder / name, documents)
        found: dict[str, list[dict[str, float]]] = {"plain": [], "overlap": []}
        for seed in range(runs):
            for name, results in found.items():
                recipe = _recipe(folder, seed, steps, sync_every, overlap=name == "overlap")
                results.append(
                    _run(folder / f"{name}-{seed}", recipe, folder / "heldout", sync_every, bytes_per_second)
                )
    figures: dict[str, Any] = {
        f"{name}_{key}": mean(result[key] for result in results)
        for name, results in found.items()
        for key in results[0]
    }
    pairs = list(zip(found["overlap"], found["plain"], strict=True))
    figures["lost_ratio"] = figures["overlap_lost_s"] / figures["plain_lost_s"]
    took = {name: figures[f"{name}_lost_s"] + figures[f"{name}_round_s"] for name in found}
    figures["time_ratio"] = took["overlap"] / took["plain"]
    figures["heldout_differences"] = [overlap["heldout_loss"] - plain["heldout_loss"] for overlap, plain in pairs]
    figures["heldout_ratio"] = figures["overlap_heldout_loss"] / figures["plain_heldout_loss"]
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


def _write_data(prefix: Path, documents: int) -> None:
    """Every token is the last one plus 1, 2 or 3, modulo the vocabulary, with chances that depend on the last one."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    draw = random.Random(prefix.name)
    for _ in range(documents):
        tokens = [draw.randrange(VOCAB)]
        while len(tokens) < 200:
            common = 1 + tokens[-1] % 3
            tokens.append((tokens[-1] + draw.choice((1, 2, 3, common, common, common))) % VOCAB)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def _recipe(folder: Path, seed: int, steps: int, sync_every: int, overlap: bool) -> Path:
    train = {"steps": steps, "seq_len": 32, "micro_batch_size": 4, "lr": 0.003, "warmup_steps": sync_every}
    raw = {
        "model": MODEL,
        "train": train | {"dtype": "fp32", "log_every": steps, "seed": seed},
        "spes": {"num_nodes": 2, "sync_every": sync_every, "snapshot_every": steps, "overlap": overlap},
        "data": {"train": str((folder / "train").absolute())},
    }
    path = folder / f"{'overlap' if overlap else 'plain'}-{seed}.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def _run(folder: Path, recipe: Path, heldout: Path, sync_every: int, bytes_per_second: int) -> dict[str, float]:
    with ExitStack() as stack:
        hub = Hub(recipe, folder / "hub")
        stack.callback(hub.end)
        for node in (0, 1):
            line = Relay(hub.address)
            line.bytes_per_s = bytes_per_second
            process = launch(recipe, "--node", node, "--hub", line.address, "--out", folder / f"node-{node}")
            stack.callback(process.end)
        hub.succeed(1200)
    snapshot = max((folder / "hub/snapshots").iterdir())
    evaluated = Process([*COMMAND, "evaluate", snapshot, "--data", heldout, "--json"]).succeed()
    rounds = [_rounds(folder / f"node-{node}", sync_every) for node in (0, 1)]
    return {
        "lost_s": mean(median(lost for lost, _ in node) for node in rounds),
        "round_s": mean(median(trained for _, trained in node) for node in rounds),
        "heldout_loss": json.loads(evaluated.output.splitlines()[-1])["loss"],
    }


def _rounds(out: Path, sync_every: int) -> list[tuple[float, float]]:
    """Seconds lost and trained in each round of a node, without the first two and the last."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(rows[0]["tokens_per_expert"][0]) / MODEL["top_k"]
    rounds = [rows[start : start + sync_every] for start in range(0, len(rows), sync_every)][2:-1]
    return [(r[-1]["sync_seconds"], sum(tokens / row["tokens_per_s"] for row in r)) for r in rounds]


if __name__ == "__main__":
    main()
