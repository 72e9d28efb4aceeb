"""Bytes between nodes, and the seconds that they take.

SPES and DiLoCo, once a round: every node sends its shared weights and the experts that it trains, then gets what others
changed: all but the experts that it alone trains; after a merge, those too. (Those too, where the outer optimizer does
more than average them.) The links of the nodes work side by side, the hub's carries the sum. Centralized training,
every step: gradients are summed over the nodes and updated weights are given out, each of which moves (N - 1) / N of
them in and out of every node.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from spes_mega.layout.names import expected_tensors
from spes_mega.outer.merging import merge_due
from spes_mega.outer.ownership import Ownership
from spes_mega.recipe import CodecPair, Recipe, WireSection
from spes_mega.tools.plan.wire_sizes import RoundBytes, round_bytes

CODECS = ("fp32", "bf16", "int8")
CONFIGURED = "spes.wire"
"""Stands among the codecs for what the recipe says."""


def node_traffic(recipe: Recipe, ownership: Ownership, node: int, codec: str, tokens: int) -> RoundBytes:
    """What `node` sends and gets in a round of so many tokens, all in one of CODECS, or as CONFIGURED."""
    spes = recipe.spes
    if codec != CONFIGURED:
        spes = spes.model_copy(update={"wire": WireSection.model_validate(codec)})
    return round_bytes(expected_tensors(recipe.model), spes, ownership, node, tokens)


def wire_text(wire: WireSection) -> str:
    """What a recipe says of the codecs, in short."""
    up, down = (_pair_text(pair) for pair in (wire.up, wire.down))
    return up if up == down else f"up {up}, down {down}"


def _pair_text(pair: CodecPair) -> str:
    return pair.shared if pair.shared == pair.experts else f"shared {pair.shared} + experts {pair.experts}"


def merging_rounds(recipe: Recipe) -> int:
    """Rounds of the whole run that end with a merge of similar experts."""
    spes = recipe.spes
    if recipe.model.num_experts < 2:
        return 0
    due = partial(merge_due, interval=spes.merge_interval, merge_steps=spes.merge_steps)
    whole, rest = divmod(recipe.train.steps, spes.sync_every)
    merging = max(0, min(whole, (spes.merge_steps - 1) // spes.sync_every))  # of them those before merging stops
    last = rest > 0 and due(whole * spes.sync_every, recipe.train.steps)
    return min(merging, merging * spes.sync_every // spes.merge_interval) + last


@dataclass(frozen=True)
class Links:
    """Bits a second, in each direction: of every node, and of the hub."""

    node: float
    hub: float

    def seconds(self, nodes: Iterable[int]) -> float:
        """For one transfer of all nodes at once, of these bytes each."""
        sizes = list(nodes)
        return 8 * max(max(sizes) / self.node, sum(sizes) / self.hub)


def round_seconds(links: Links, nodes: list[RoundBytes], merging: float) -> tuple[float, float]:
    """(on the links of the nodes alone, on the hub's alone) for push and pull; `merging`: share of merging rounds."""
    up = [node.up for node in nodes]
    down = [round(node.down + merging * (node.down_after_merge - node.down)) for node in nodes]
    free = float("inf")
    alone = (Links(links.node, free), Links(free, links.hub))
    on_node, on_hub = (link.seconds(up) + link.seconds(down) for link in alone)
    return on_node, on_hub


def waited_seconds(recipe: Recipe, exchange_s: float, compute_s: float) -> float:
    """For which nodes do not train, a round on average, though the exchange takes `exchange_s` in each.

    With spes.overlap a node trains the next round meanwhile, and waits for what is longer than that; but the last
    round has no next one. Making and applying what travels takes time of the nodes' own, which is not counted here.
    """
    if not recipe.spes.overlap:
        return exchange_s
    rounds = recipe.num_rounds
    return (exchange_s + (rounds - 1) * max(0.0, exchange_s - compute_s)) / rounds


def centralized_bytes(trained: int, nodes: int, size: int) -> int:
    """One way, a node and step: gradients and weights of `size` bytes."""
    return 2 * trained * size * (nodes - 1) // nodes
