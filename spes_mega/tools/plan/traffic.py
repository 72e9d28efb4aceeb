"""Bytes between nodes, and the seconds that they take.

SPES and DiLoCo, once a round: every node sends its shared weights and the experts that it trains, then gets what others
changed: all but the experts that it alone trains; after a merge, those too. The links of the nodes work side by side,
the hub's carries the sum. Centralized training, every step: gradients are summed over the nodes and updated weights are
given out, each of which moves (N - 1) / N of them in and out of every node.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

from spes_mega.layout.names import expected_tensors, expert_of
from spes_mega.outer.merging import merge_due
from spes_mega.outer.ownership import Ownership, private_names, pushed_names
from spes_mega.recipe import Recipe

CODECS = ("fp32", "bf16", "int8")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes of one node and round in one precision; headers (some 100 bytes a tensor) are not counted."""

    up: int
    down: int
    down_after_merge: int


def wire_bytes(shapes: Shapes, names: Iterable[str], codec: str) -> int:
    """Bytes of tensors: fp32 and bf16 as they are; int8 with an fp32 scale for each row (a vector is one row)."""
    total = 0
    for name in names:
        shape = shapes[name]
        if codec == "int8":
            total += prod(shape) + 4 * (shape[0] if len(shape) > 1 else 1)
        else:
            total += prod(shape) * {"fp32": 4, "bf16": 2}[codec]
    return total


def node_traffic(recipe: Recipe, ownership: Ownership, node: int, codec: str) -> NodeTraffic:
    """What `node` sends and gets in a round. A lossy codec carries merged private experts in fp32."""
    shapes = expected_tensors(recipe.model)
    private = set(private_names(shapes, ownership, node, expert_of))
    up = wire_bytes(shapes, pushed_names(shapes, ownership, node, expert_of), codec)
    down = wire_bytes(shapes, [name for name in shapes if name not in private], codec)
    return NodeTraffic(up, down, down + wire_bytes(shapes, private, "fp32"))


def merging_rounds(recipe: Recipe) -> int:
    """Rounds of the whole run that end with a merge of similar experts."""
    spes = recipe.spes
    if recipe.model.num_experts < 2:
        return 0
    steps = [recipe.step_at(round_) for round_ in range(recipe.num_rounds + 1)]
    due = partial(merge_due, interval=spes.merge_interval, merge_steps=spes.merge_steps)
    return sum(due(before, after) for before, after in pairwise(steps))


@dataclass(frozen=True)
class Links:
    """Bits a second, in each direction: of every node, and of the hub."""

    node: float
    hub: float

    def seconds(self, nodes: Iterable[int]) -> float:
        """For one transfer of all nodes at once, of these bytes each."""
        sizes = list(nodes)
        return 8 * max(max(sizes) / self.node, sum(sizes) / self.hub)


def round_seconds(links: Links, nodes: list[NodeTraffic], merging: float) -> tuple[float, float]:
    """(on the links of the nodes alone, on the hub's alone) for push and pull; `merging`: share of merging rounds."""
    up = [node.up for node in nodes]
    down = [round(node.down + merging * (node.down_after_merge - node.down)) for node in nodes]
    free = float("inf")
    alone = (Links(links.node, free), Links(free, links.hub))
    on_node, on_hub = (link.seconds(up) + link.seconds(down) for link in alone)
    return on_node, on_hub


def centralized_bytes(trained: int, nodes: int, size: int) -> int:
    """One way, a node and step: gradients and weights of `size` bytes."""
    return 2 * trained * size * (nodes - 1) // nodes
