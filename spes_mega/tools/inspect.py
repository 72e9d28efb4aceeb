"""`spes-mega inspect`: what a checkpoint is, and how alike its experts are."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from spes_mega.errors import CheckpointError, system_errors
from spes_mega.layout import FAMILIES, MOE_OF, Checkpoint, expert_of, open_checkpoint
from spes_mega.layout.counts import count_parameters
from spes_mega.layout.storage.safetensors_format import byte_count
from spes_mega.progress import count_progress
from spes_mega.tools.similarity import expert_similarity, off_diagonal, plot_similarity


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Facts of a checkpoint from its config.json and the headers of its files; no weights are read.

    `params_expert` is one expert of one layer; `params_active` what one token passes through.
    """
    model, counts = checkpoint.model, count_parameters(checkpoint.model)
    family = FAMILIES[model.family]
    dtypes: Counter[str] = Counter()
    for name in checkpoint.names:
        dtypes[str(checkpoint.dtype(name)).removeprefix("torch.")] += _bytes(checkpoint, name)
    return {
        "path": str(checkpoint.source),
        "family": model.family,
        "architecture": family.architecture,
        "params_total": counts.total,
        "params_active": counts.active,
        "params_shared": counts.shared,
        "params_expert": counts.expert,
        "bytes": sum(dtypes.values()),
        "bytes_experts": sum(_bytes(checkpoint, name) for name in checkpoint.names if expert_of(name)),
        "dtypes": dict(dtypes),
        "num_layers": model.num_layers,
        "moe_layers": counts.moe_layers,
        "hidden_size": model.hidden_size,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "expert_hidden_size": model.expert_hidden_size,
        "shared_expert_hidden_size": model.shared_expert_hidden_size,
        "norm_topk_prob": model.norm_topk_prob if model.is_moe else None,
        "qk_norm": family.qk_norm,
        "qkv_bias": family.qkv_bias,
        "norm_placement": family.norm_placement,
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling,
        "max_seq_len": model.max_seq_len,
        "sliding_window": model.sliding_window,
        "vocab_size": model.vocab_size,
        "tie_embeddings": model.tie_embeddings,
    }


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    return byte_count(checkpoint.dtype(name), checkpoint.shape(name))


def similarity_facts(similarity: dict[int, torch.Tensor]) -> list[dict[str, Any]]:
    """For each MoE layer the matrix, and the least, mean and greatest similarity of two different experts."""
    facts = []
    for layer, matrix in similarity.items():
        pairs = off_diagonal(matrix)
        spread = (
            {"min": float(pairs.min()), "mean": float(pairs.mean()), "max": float(pairs.max())} if len(pairs) else {}
        )
        facts.append({"layer": layer, **spread, "matrix": matrix.tolist()})
    return facts


PICTURES = (".png", ".svg", ".pdf")


@click.command("inspect")
@click.argument("src", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--config", type=click.Path(path_type=Path), help="config.json of SRC, where it is not beside the weights"
)
@click.option(
    "--similarity/--no-similarity", default=True, help="compare experts, for which they are read  [default: yes]"
)
@click.option("--plot", type=click.Path(path_type=Path), help="draw the similarity of experts into this PNG file")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@system_errors(CheckpointError)
def command(src: Path, config: Path | None, similarity: bool, plot: Path | None, as_json: bool) -> None:
    """Say what the checkpoint SRC is: parameters, bytes, family, RoPE, and how alike the experts of each layer are.

    Similarity is the cosine of two experts' gate projections, by which expert merging chooses its donors: 1 for equal
    experts, near 0 for unrelated ones.
    """
    with open_checkpoint(src, config) as checkpoint:
        facts = describe(checkpoint)
        moe = checkpoint.model.is_moe
        if plot and not (moe and similarity):
            raise CheckpointError(f"{src}: there is no similarity of experts to draw by --plot")
        if plot and (plot.suffix not in PICTURES or not plot.parent.is_dir()):
            raise CheckpointError(f"--plot {plot}: a file in an existing folder, ending in {' '.join(PICTURES)}")
        if moe and similarity:
            with count_progress("compare experts", facts["moe_layers"], "layers") as advance:
                found = expert_similarity(checkpoint, advance)
            facts["similarity"] = similarity_facts(found)
            if plot:
                plot_similarity(found, f"{src.resolve().name}: {facts['num_experts']} experts a layer", plot)
    click.echo(json.dumps(facts) if as_json else "\n".join([*_lines(facts), *([f"plot: {plot}"] if plot else [])]))


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{facts['path']}: {facts['family']} ({facts['architecture']})"
    yield f"  parameters   {facts['params_total']:,}" + (
        f"  active per token {facts['params_active']:,}  shared {facts['params_shared']:,}  "
        f"per expert {facts['params_expert']:,}"
        if facts["num_experts"]
        else ""
    )
    dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in facts["dtypes"].items())
    yield f"  bytes        {facts['bytes']:,}  ({dtypes})"
    yield (
        f"  layers       {facts['num_layers']} of hidden size {facts['hidden_size']}, {facts['num_heads']} heads of "
        f"{facts['head_dim']}, {facts['num_kv_heads']} KV heads"
    )
    yield f"  attention    {', '.join(_attention(facts))}"
    yield f"  FFN          {', '.join(_feed_forward(facts))}"
    scaling = facts["rope_scaling"]
    yield f"  RoPE         base {facts['rope_theta']:g}, " + (json.dumps(scaling) if scaling else "no scaling")
    yield (
        f"  tokens       {facts['vocab_size']:,} in the vocabulary, {facts['max_seq_len']:,} positions, embeddings "
        f"{'tied' if facts['tie_embeddings'] else 'not tied'}"
    )
    yield from _similarity_lines(facts.get("similarity", []))
    if facts["family"] in MOE_OF:
        yield f"next: spes-mega upcycle {facts['path']}"


def _attention(facts: dict[str, Any]) -> Iterator[str]:
    yield {"none": "no qk-norm", "head": "qk-norm of each head", "full": "qk-norm over all heads"}[facts["qk_norm"]]
    yield "QKV biases" if facts["qkv_bias"] else "no biases"
    yield {"pre": "inputs normalized", "post": "outputs normalized"}[facts["norm_placement"]]
    if facts["sliding_window"]:
        yield f"sliding window of {facts['sliding_window']:,}"


def _feed_forward(facts: dict[str, Any]) -> Iterator[str]:
    if facts["num_experts"]:
        yield (
            f"{facts['num_experts']} experts of width {facts['expert_hidden_size']} in {facts['moe_layers']} layers, "
            f"top-{facts['top_k']} ({'' if facts['norm_topk_prob'] else 'not '}renormalized)"
        )
    if facts["shared_expert_hidden_size"]:
        yield f"shared expert of width {facts['shared_expert_hidden_size']}"
    if dense := facts["num_layers"] - facts["moe_layers"]:
        yield f"dense of width {facts['ffn_hidden_size']} in {dense} layers"


def _similarity_lines(layers: list[dict[str, Any]]) -> Iterator[str]:
    if layers and "mean" in layers[0]:
        yield "  similarity of two experts of a layer (cosine of gate projections)"
        yield "    layer     min    mean     max"
    for layer in layers:
        if "mean" in layer:
            yield f"    {layer['layer']:5d}  {layer['min']:6.3f}  {layer['mean']:6.3f}  {layer['max']:6.3f}"
