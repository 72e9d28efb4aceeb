"""A router that tells kinds of tokens apart from the start: its rows are centers of what the layer's FFN receives.

A text runs through the dense model once, layer by layer, and the inputs of each FFN are clustered by their directions
(spherical k-means). An expert's row is its center times a factor of the layer, so a token's largest logit is that of
the center nearest to it. The factor makes the logits of a token have a standard deviation of 1 across experts, in
the root mean square over the text: softmax then prefers near centers clearly without saturating.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from spes_mega.data.token_stream import TokenStream
from spes_mega.errors import DataError
from spes_mega.layout import EMBEDDING, generator
from upcycle.plan import Plan
from upcycle.router.kmeans import spherical_kmeans
from upcycle.sources import Sources
from upcycle.verify.reference import Reference

_LENGTH = 512


@dataclass(frozen=True)
class Calibration:
    """`routers`: layer -> rows, fp32 [num_experts, H]. `tokens`, `sha256`: how many were read, and of their ids."""

    routers: dict[int, torch.Tensor]
    tokens: int
    sha256: str


@torch.inference_mode()
def calibrate(
    sources: Sources, plan: Plan, prefix: Path, advance: Callable[[int], None] = lambda count: None
) -> Calibration:
    """Cluster what the FFNs of the MoE layers receive on the indexed dataset `prefix`.

    Memory holds the residual stream of all tokens, one matrix a thread, and one layer's inputs. The result does not
    depend on the number of threads: each sequence is computed by one. Of several sources, their average is run.

    Args:
        advance: called with 1 after each layer.

    Raises:
        DataError: no dataset there, too few tokens, or one that the model's vocabulary does not have.
    """
    tokens = _tokens(TokenStream(prefix), plan)
    x = _embedded(sources, tokens)
    model = Reference(plan.source, sources.read)
    routers = {}
    with _one_thread_a_sequence() as pool:
        for layer in range(plan.source.num_layers):
            steps = list(pool.map(lambda one, layer=layer: _step(model, layer, one), x.split(1)))
            x = torch.cat([after for after, _ in steps])
            if layer in plan.moe_layers:
                inputs = torch.cat([received for _, received in steps]).flatten(0, 1)
                routers[layer] = router_rows(inputs, plan, layer)
            del steps
            advance(1)
    return Calibration(routers, tokens.numel(), hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest())


def router_rows(inputs_NH: torch.Tensor, plan: Plan, layer: int) -> torch.Tensor:
    """Centers of the inputs, scaled; one row for each expert (for each copy of the FFN, with method split)."""
    count = plan.settings.num_experts
    clusters = spherical_kmeans(inputs_NH, count, generator(plan.settings.seed, f"router/{layer}"))
    lengths_N = inputs_NH.double().square().sum(dim=1).sqrt()
    spread_N = lengths_N * clusters.cosines.std(dim=1, correction=0)
    scale = math.sqrt(math.fsum(spread_N.square().tolist()) / len(spread_N))
    return (clusters.centers / (scale or 1.0)).float()


def _step(model: Reference, layer: int, x_1SH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream after a layer, and what its FFN received."""
    x_1SH = model.after_attention(layer, x_1SH)
    h_1SH = model.ffn_input(layer, x_1SH)
    return model.after_ffn(layer, x_1SH, model.dense_ffn(layer, h_1SH)), h_1SH


def _tokens(stream: TokenStream, plan: Plan) -> torch.Tensor:
    """int64 [B, S]: sequences spread evenly over the whole text."""
    length = min(_LENGTH, plan.source.max_seq_len, stream.num_tokens, plan.settings.calibration_tokens)
    count = min(plan.settings.calibration_tokens, stream.num_tokens) // max(length, 1)
    needed = plan.settings.num_experts
    if length * count < needed:
        raise DataError(f"{stream.prefix}: {length * count} tokens to calibrate on are too few for {needed} experts")
    last = stream.num_tokens - length
    starts = [last * i // max(count - 1, 1) for i in range(count)]
    rows = [torch.from_numpy(stream.read_below(start, length, plan.source.vocab_size)) for start in starts]
    return torch.stack(rows)


def _embedded(sources: Sources, tokens: torch.Tensor) -> torch.Tensor:
    out = torch.full((*tokens.shape, sources.model.hidden_size), math.nan)
    for start, rows in sources.pieces(EMBEDDING):
        here = (tokens >= start) & (tokens < start + len(rows))
        out[here] = rows[tokens[here] - start].float()
    if out.isnan().any():
        raise DataError(f"{EMBEDDING}: some token of the text has no row in it, or one with NaN")
    return out


@contextmanager
def _one_thread_a_sequence() -> Iterator[ThreadPoolExecutor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
