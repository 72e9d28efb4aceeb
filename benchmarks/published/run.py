"""Published figures of SPES, computed by the reference's rules and by ours: what docs/benchmarks/published.md shows.

    python benchmarks/published/run.py

Nothing is measured here. GB are 10^9 bytes. docs/benchmarks/published.md has the rules, and where each comes from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spes_mega.layout.counts import count_parameters
from spes_mega.recipe import Recipe, load_recipe
from spes_mega.tools.plan.activations import activation_bytes
from spes_mega.tools.plan.memory import rank_memory
from spes_mega.tools.plan.traffic import node_traffic

CONFIGS = Path(__file__).parents[2] / "configs"
CENTRALIZED_TOKENS_PER_S = 3790
"""Of one GPU, 7B, published; the rate at which SPES would train if its exchanges took no time."""
LINK_BITS_PER_S = 15e9
"""The middle of the 13 to 17 Gbit/s that the paper names for its Ethernet."""
GPUS_PER_NODE = 8
POLL_S = 20
"""A client of the reference asks every 20 s whether the round is over: half of it is lost on average."""


@dataclass(frozen=True)
class Figure:
    name: str
    published: float
    reference: float
    ours: float
    form: str

    def row(self) -> str:
        apart = self.reference / self.published - 1
        cells = [self.form.format(value) for value in (self.published, self.reference, self.ours)]
        return f"| {self.name} | {cells[0]} | {cells[1]} ({apart:+.1%}) | {cells[2]} |"


def reference_memory(recipe: Recipe, owned: int) -> float:
    """Bytes of one GPU: weights and, of what is trained, gradients and two moments in fp32; activations in bf16.

    Logits take 4 bytes: those that the fused loss was given, and their gradient, both bf16.
    """
    counts = count_parameters(recipe.model)
    states = 4 * counts.total + 12 * counts.trainable(owned)
    tokens = recipe.train.micro_batch_size * recipe.train.seq_len
    return states + activation_bytes(recipe, owned, fused=True).kept + 4 * tokens * recipe.model.vocab_size


def reference_up_down(recipe: Recipe, owned: int) -> tuple[int, int]:
    """Bytes of a node and round: what it trains goes up, the whole model comes down, all in fp32."""
    counts = count_parameters(recipe.model)
    return 4 * counts.trainable(owned), 4 * counts.total


def our_up_down(recipe: Recipe, codec: str) -> tuple[int, int]:
    traffic = node_traffic(recipe, recipe.ownership(), 0, codec, 0)
    return traffic.up, traffic.down


def tokens_per_s(recipe: Recipe, up: int, down: int, waiting_s: float) -> float:
    """Tokens a GPU and second of a run that trains at the centralized rate between exchanges through one server."""
    assert recipe.train.batch_size is not None
    tokens = recipe.spes.sync_every * recipe.train.batch_size * recipe.train.seq_len / GPUS_PER_NODE
    exchange_s = 8 * recipe.spes.num_nodes * (up + down) / LINK_BITS_PER_S + waiting_s
    return tokens / (tokens / CENTRALIZED_TOKENS_PER_S + exchange_s)


def figures() -> Iterator[Figure]:
    small, large = (load_recipe(CONFIGS / f"{name}.yaml") for name in ("2b", "7b"))
    for name, owned, published in (("DiLoCo", 16, 55e9), ("SPES", 1, 35e9)):
        reference = reference_memory(small, owned)
        ours = rank_memory(small, owned, 1, "cuda").peak
        yield Figure(f"2B, memory of a GPU, {name}", published / 1e9, reference / 1e9, ours / 1e9, "{:.1f} GB")
    everything = 2 * 4 * count_parameters(small.model).total
    saved = [1 - sum(pair) / everything for pair in (reference_up_down(small, 1), our_up_down(small, "fp32"))]
    yield Figure("2B, bytes of a round, less than DiLoCo's", 1 / 3, *saved, "{:.1%}")
    whole = 4 * count_parameters(large.model).total
    saved = [1 - up / whole for up, _ in (reference_up_down(large, 8), our_up_down(large, "fp32"))]
    yield Figure("7B, bytes that a node sends, less than DiLoCo's", 0.65, *saved, "{:.1%}")
    rates = [
        tokens_per_s(large, *reference_up_down(large, 8), POLL_S / 2),
        tokens_per_s(large, *our_up_down(large, "fp32"), 0.0),
    ]
    yield Figure("7B, tokens/s of a GPU over Ethernet", 3670, *rates, "{:,.0f}")


def table() -> list[str]:
    head = "| figure | published | by the reference's rules | ours, by our rules |"
    return [head, "|---|---|---|---|", *(figure.row() for figure in figures())]


if __name__ == "__main__":
    print("\n".join(table()))
