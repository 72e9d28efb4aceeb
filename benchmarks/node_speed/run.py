"""Tokens a second of one training step: a node with all experts, with a quarter of them, and transformers."""

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from spes_mega.node.launch.command import free_port
from spes_mega.node.main import prepare_process
from spes_mega.recipe import Recipe

MODEL = {
    "family": "qwen3_moe", "num_layers": 8, "hidden_size": 384, "num_heads": 6, "num_kv_heads": 6, "head_dim": 64,
    "num_experts": 16, "top_k": 2, "expert_hidden_size": 512, "vocab_size": 16384, "max_seq_len": 512,
    "tie_embeddings": True,
}  # fmt: skip
SMALL = {"num_layers": 1, "hidden_size": 64, "expert_hidden_size": 64, "vocab_size": 512}


@click.command()
@click.option("--rounds", default=9, show_default=True, help="steps of each, in turn; medians are taken")
@click.option("--micro-batch-size", default=4, show_default=True, help="samples of 512 tokens")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="of ours")
@click.option("--small", is_flag=True, help="a model too small to say anything, to see that this runs")
@click.option("--profile", is_flag=True, help="show where the time of each goes, on standard error")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def main(rounds: int, micro_batch_size: int, dtype: str, small: bool, profile: bool, as_json: bool) -> None:
    """Train on the same weights and batch, in turn, and print ratios of tokens a second."""
    train = {
        "seq_len": 512, "micro_batch_size": micro_batch_size, "dtype": dtype, "lr": 1e-4, "steps": 10_000
    }  # fmt: skip
    recipe = Recipe.model_validate({"model": MODEL | (SMALL if small else {}), "train": train})
    prepare_process(1)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    figures = _measure(recipe, rounds, profile)
    if as_json:
        click.echo(json.dumps(figures))
    else:
        for name, value in figures.items():
            click.echo(f"{name:24} {value:,.3f}")


def _measure(recipe: Recipe, rounds: int, profile: bool) -> dict[str, Any]:
    from variants import ours, theirs, write_weights

    from spes_mega.node.distributed.process_group import process_group
    from spes_mega.node.distributed.ranks import Ranks

    experts = recipe.model.num_experts
    with tempfile.TemporaryDirectory() as temporary, process_group():
        folder, ranks = Path(temporary) / "weights", Ranks(60)
        write_weights(recipe, folder)
        steps = {
            "ours_all": ours(recipe, folder, range(experts), ranks),
            "ours_quarter": ours(recipe, folder, range(experts // 4), ranks),
            "hf": theirs(recipe, folder),
        }
        first = {name: step() for name, step in steps.items()}
        assert max(first.values()) - min(first.values()) < 0.05, f"losses before training: {first}"
        if profile:
            for name, step in steps.items():
                _profile(name, step)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                seconds[name].append(_timed(step))
    return _figures(recipe, seconds)


def _timed(step: Any) -> tuple[float, float]:
    """Seconds of a step: elapsed, and CPU time of all threads."""
    elapsed, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - elapsed, time.process_time() - cpu


def _figures(recipe: Recipe, seconds: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    tokens = recipe.train.seq_len * recipe.train.micro_batch_size
    medians = {name: [median(times) for times in zip(*both, strict=True)] for name, both in seconds.items()}
    figures: dict[str, Any] = {}
    for clock, suffix in enumerate(["", "_cpu"]):
        speed = {name: tokens / times[clock] for name, times in medians.items()}
        figures |= {
            f"ours_all_over_hf{suffix}": speed["ours_all"] / speed["hf"],
            f"ours_quarter_over_all{suffix}": speed["ours_quarter"] / speed["ours_all"],
            **{f"{name}_tokens_per{suffix}_s": value for name, value in speed.items()},
        }
    return figures | {"threads": torch.get_num_threads()}


def _profile(name: str, step: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    click.echo(f"{name}\n{found.key_averages().table(sort_by='self_cpu_time_total', row_limit=18)}", err=True)


if __name__ == "__main__":
    main()
