"""`spes-mega demo`: the main job on this machine, through the same commands that a user would type."""

import importlib.util
import json
import shutil
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import click

from spes_mega.errors import SpesError, VerificationError, system_errors
from spes_mega.layout.counts import count_parameters
from spes_mega.layout.tokenizer_files import copy_files
from spes_mega.progress import sigterm_interrupts
from spes_mega.recipe import Recipe, load_recipe
from spes_mega.tools.demo.corpus import train_tokenizer, write_corpus
from spes_mega.tools.demo.plot import plot_losses, read_metrics
from spes_mega.tools.demo.processes import Command, Together
from spes_mega.tools.demo.result import open_snapshot, sample, transformers_loss

MARKER = ".spes-mega-demo"
STAGE_DEADLINE_S = 300
# two programs that compute the same loss in fp32, summed in another order
LOSS_TOLERANCE = 1e-3


@dataclass
class Demo:
    """Where the demo works, and what it runs."""

    out: Path
    dense: Recipe
    moe: Recipe

    def run(self, label: str, *arguments: str, threads: int = 2) -> list[str]:
        """Run one `spes-mega` command to its end; returns the lines that it printed."""
        with Together() as together:
            command = together.add(self.start(label, *arguments, threads=threads))
            together.wait()
        return command.lines

    def start(self, label: str, *arguments: str, threads: int = 1) -> Command:
        log = self.out / "logs" / f"{label.replace(' ', '-')}.log"
        return Command(label, arguments, log, click.echo, threads)

    def evaluate(self, checkpoint: Path) -> float:
        """Held-out loss of a checkpoint, by `spes-mega evaluate`."""
        lines = self.run(
            "evaluate", "evaluate", str(checkpoint), "--data", str(self.out / "text/valid"),
            "--seq-len", str(self.moe.train.seq_len), "--json",
        )  # fmt: skip
        return float(json.loads(lines[-1])["loss"])


def prepare(out: Path) -> Demo:
    """An empty folder with the two recipes in it. A folder that an earlier demo made is cleared first."""
    missing = [name for name in ("transformers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise SpesError(f"the demo needs {' and '.join(missing)}: pip install 'spes-mega[demo]'")
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).exists():
            raise SpesError(f"{out} is not empty and was not made by the demo: choose another --out")
        click.echo(f"== replacing what an earlier demo left in {out}")
        shutil.rmtree(out)
    with system_errors(SpesError, out):
        out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()
    for name in ("dense.yaml", "moe.yaml"):
        (out / name).write_text(resources.files("spes_mega.tools.demo").joinpath(name).read_text(encoding="utf-8"))
    return Demo(out, load_recipe(out / "dense.yaml"), load_recipe(out / "moe.yaml"))


def make_data(demo: Demo) -> Path:
    """Text, tokenizer and the two indexed datasets; returns the tokenizer's folder."""
    text = demo.out / "text"
    click.echo("== the text of Python's own language reference, and a tokenizer for it")
    train, valid = write_corpus(text)
    tokenizer = train_tokenizer(train, text / "tokenizer", demo.moe.model.vocab_size)
    for file in (train, valid):
        prefix = str(file.with_suffix(""))
        demo.run("tokenize", "tokenize", str(file), "--tokenizer", str(tokenizer), "--out", prefix)
    return tokenizer


def make_upcycled(demo: Demo, tokenizer: Path) -> Path:
    """Pretrain the dense model on one node, then turn it into an MoE; returns the MoE's folder."""
    click.echo("== a tiny dense model, pretrained on one node")
    demo.run("dense", "launch", str(demo.out / "dense.yaml"), "--out", str(demo.out / "dense"))
    final = demo.out / "dense/final"
    copy_files(tokenizer, final)
    click.echo("== upcycled into a Mixture-of-Experts")
    moe, model = demo.out / "upcycled", demo.moe.model
    demo.run(
        "upcycle", "upcycle", str(final), "--out", str(moe), "--num-experts", str(model.num_experts),
        "--top-k", str(model.top_k), "--verify",
    )  # fmt: skip
    return moe


def train_together(demo: Demo, init: Path) -> None:
    """A hub and its nodes, each a process of its own, through all rounds."""
    click.echo(f"== SPES: a hub and {demo.moe.spes.num_nodes} nodes")
    recipe, out = str(demo.out / "moe.yaml"), demo.out
    with Together() as together:
        hub = together.add(
            demo.start(
                "hub", "hub", recipe, "--init", str(init), "--state", str(out / "hub"), "--listen", "127.0.0.1:0"
            )
        )
        address = hub.wait_for_line(r"listening on (\S+:\d+)", STAGE_DEADLINE_S)[1]
        for k in range(demo.moe.spes.num_nodes):
            together.add(
                demo.start(
                    f"node {k}", "launch", recipe, "--node", str(k), "--hub", address, "--out", str(out / f"node-{k}")
                )
            )
        together.wait()


def newest_snapshot(state: Path) -> Path:
    """The last snapshot that the hub wrote."""
    return max((state / "snapshots").iterdir())


def closed_rounds(state: Path) -> list[dict[str, Any]]:
    """The hub's records of the rounds that it closed (the initial state, round 0, is none)."""
    newest = max((state / "rounds").iterdir()) / "round.json"
    return [record for record in json.loads(newest.read_text(encoding="utf-8"))["ledger"]["rounds"] if record["round"]]


def summarize(demo: Demo, snapshot: Path, losses: dict[str, float], seconds: float) -> dict[str, Any]:
    """The figures of the run, read from what hub and nodes wrote."""
    moe, out = demo.moe, demo.out
    nodes = [read_metrics(out / f"node-{k}/metrics.jsonl") for k in range(moe.spes.num_nodes)]
    rounds = closed_rounds(out / "hub")
    counts = count_parameters(moe.model)
    ownership = moe.ownership()
    synced = [row for rows in nodes for row in rows if row["bytes_up"]]
    return {
        **losses,
        "nodes": moe.spes.num_nodes,
        "rounds": len(rounds),
        "merges": len(merges := [r["step"] for r in rounds if r["merge_alpha"] is not None]),
        "params_total": counts.total,
        "params_active": counts.active,
        "params_trainable_per_node": [counts.trainable(len(ownership.owned(k))) for k in range(moe.spes.num_nodes)],
        "bytes_up_per_node_round": round(sum(r["bytes_up"] for r in synced) / len(synced)),
        "bytes_down_per_node_round": round(sum(r["bytes_down"] for r in synced) / len(synced)),
        "snapshot": str(snapshot),
        "seconds": round(seconds, 1),
        "round_steps": [r["step"] for r in rounds],
        "merge_steps": merges,
    }


@click.command(name="demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="a new folder, or that of an earlier demo",
)
def command(out: Path) -> None:
    """Run the whole job on this machine in a few minutes.

    Text, tokenizer, a dense model, upcycling, a hub and two nodes under the deepspeed launcher, evaluation,
    a sample, a picture (OUT/loss.png) and the figures (OUT/summary.json).
    """
    with sigterm_interrupts():  # hub and nodes are stopped on the way out
        run_demo(out)


@system_errors(SpesError)
def run_demo(out: Path) -> None:
    """All stages, one after the other."""
    begin = time.monotonic()
    demo = prepare(out)
    tokenizer = make_data(demo)
    upcycled = make_upcycled(demo, tokenizer)
    train_together(demo, upcycled)
    snapshot = newest_snapshot(out / "hub")
    click.echo("== held-out loss")
    losses = {
        "dense_val_loss": demo.evaluate(out / "dense/final"),
        "upcycled_val_loss": demo.evaluate(upcycled),
        "final_val_loss": demo.evaluate(snapshot),
    }
    model = open_snapshot(snapshot)
    losses["transformers_val_loss"] = transformers_loss(model, out / "text/valid", demo.moe.train.seq_len)
    text = sample(model, snapshot)
    summary = summarize(demo, snapshot, losses, time.monotonic() - begin)
    summary["sample"] = text
    finish(demo, summary)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)


def finish(demo: Demo, summary: dict[str, Any]) -> None:
    """Write the picture and `summary.json`, print both places, and check that the run did what it promises."""
    picture = demo.out / "loss.png"
    nodes = {f"node {k}": read_metrics(demo.out / f"node-{k}/metrics.jsonl") for k in range(summary["nodes"])}
    levels = {"upcycled, held out": summary["upcycled_val_loss"], "final, held out": summary["final_val_loss"]}
    plot_losses(nodes, summary["round_steps"], summary["merge_steps"], levels, picture)
    (demo.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    click.echo(f"== a sample (of so small a model, form is all that can be expected)\n{summary['sample']}")
    click.echo(f"== summary ({demo.out / 'summary.json'}, {picture})")
    for key, value in summary.items():
        if key != "sample":
            click.echo(f"{key:>28}: {_shown(value)}")
    if summary["final_val_loss"] >= summary["upcycled_val_loss"]:
        raise VerificationError("training together did not lower the held-out loss of the upcycled model")
    gap = abs(summary["transformers_val_loss"] - summary["final_val_loss"])
    if gap > LOSS_TOLERANCE:
        raise VerificationError(f"transformers and evaluate disagree on the snapshot's loss by {gap:.2g}")
