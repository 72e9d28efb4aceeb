"""Puts a plan together: memory, network, time and disk of a recipe on given machines, beside DiLoCo and centralized."""

from dataclasses import asdict, dataclass
from typing import Any

from spes_mega.layout.counts import ParameterCounts, count_parameters
from spes_mega.outer.ownership import Ownership, ownership_of
from spes_mega.recipe import Recipe
from spes_mega.tools.plan.compute import Flops, flops_per_token, tokens_per_step
from spes_mega.tools.plan.memory import Device, Memory, rank_memory
from spes_mega.tools.plan.traffic import (
    CODECS,
    Links,
    NodeTraffic,
    centralized_bytes,
    merging_rounds,
    node_traffic,
    round_seconds,
)

USABLE = 0.95
"""Of a GPU's memory: what the allocator leaves unused between blocks cannot be known before."""


@dataclass(frozen=True)
class Machines:
    """What the nodes are: `memory` bytes and `tflops` sustained are those of one GPU, links are in bits a second."""

    gpus: int
    memory: int
    links: Links
    tflops: float
    device: Device = "cuda"


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that train equally many experts a layer, and so need the same."""

    nodes: tuple[int, ...]
    owned: int
    trained: int
    memory: Memory
    flops: Flops
    compute_s: float
    fits: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": list(self.nodes),
            "owned_experts": self.owned,
            "params_trained": self.trained,
            "memory": self.memory.as_json(),
            "fits": self.fits,
            "flops_per_token": {**asdict(self.flops), "total": self.flops.total},
            "compute_s_per_round": self.compute_s,
        }


@dataclass(frozen=True)
class Exchange:
    """A round's communication in one precision. Bytes are those of the node that moves most."""

    up: int
    down: int
    down_after_merge: int
    node_link_s: float
    hub_link_s: float
    share_lost: float

    @property
    def seconds(self) -> float:
        return max(self.node_link_s, self.hub_link_s)


@dataclass(frozen=True)
class Scheme:
    """One way to train the model on the machines."""

    name: str
    groups: tuple[NodeGroup, ...]
    exchanges: dict[str, Exchange]

    @property
    def fits(self) -> bool:
        return all(group.fits for group in self.groups)

    @property
    def peak(self) -> int:
        return max(group.memory.peak for group in self.groups)

    @property
    def compute_s(self) -> float:
        """Of the slowest node, a round."""
        return max(group.compute_s for group in self.groups)

    def as_json(self) -> dict[str, Any]:
        exchanges = {codec: {**asdict(e), "seconds": e.seconds} for codec, e in self.exchanges.items()}
        return {
            "name": self.name,
            "fits": self.fits,
            "peak_bytes": self.peak,
            "compute_s_per_round": self.compute_s,
            "nodes": [group.as_json() for group in self.groups],
            "communication_per_round": exchanges,
        }


@dataclass(frozen=True)
class Disk:
    """Bytes: the hub's state at its largest (two states, one being written, all pushes), its snapshots in all, and a
    node's files: what is on its way, and its checkpoints, of which one is being written."""

    hub_state: int
    hub_snapshots: int
    node: int
    node_checkpoints: int


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    machines: Machines
    counts: ParameterCounts
    schemes: tuple[Scheme, ...]
    disk: Disk

    @property
    def spes(self) -> Scheme:
        """The recipe as it stands."""
        return self.schemes[0]

    def as_json(self) -> dict[str, Any]:
        recipe, counts = self.recipe, self.counts
        return {
            "recipe": recipe.name,
            "num_nodes": recipe.spes.num_nodes,
            "machines": asdict(self.machines),
            "parameters": {**asdict(counts), "active": counts.active},
            "rounds": recipe.num_rounds,
            "merging_rounds": merging_rounds(recipe),
            "tokens_per_step_and_node": tokens_per_step(recipe, self.machines.gpus),
            "disk": asdict(self.disk),
            "fits": self.spes.fits,
            "schemes": [scheme.as_json() for scheme in self.schemes],
        }


def make_plan(recipe: Recipe, machines: Machines) -> Plan:
    """The plan of `recipe`, whose first scheme is the recipe itself; the others train every expert everywhere."""
    model, spes = recipe.model, recipe.spes
    everything = ownership_of(model.num_experts, spes.num_nodes, "all")
    own = ownership_of(model.num_experts, spes.num_nodes, spes.ownership, spes.capacity)
    schemes = (
        _rounds("this recipe", recipe, own, machines),
        _rounds("DiLoCo", recipe, everything, machines),
        _centralized(recipe, machines),
    )
    return Plan(recipe, machines, count_parameters(model), schemes, _disk(recipe, own))


def _rounds(name: str, recipe: Recipe, ownership: Ownership, machines: Machines) -> Scheme:
    by_load: dict[int, list[int]] = {}
    for node in range(ownership.num_nodes):
        by_load.setdefault(len(ownership.owned(node)), []).append(node)
    groups = tuple(_group(recipe, tuple(nodes), owned, machines, machines.gpus) for owned, nodes in by_load.items())
    compute = max(group.compute_s for group in groups)
    return Scheme(name, groups, {codec: _exchange(recipe, ownership, codec, machines, compute) for codec in CODECS})


def _group(recipe: Recipe, nodes: tuple[int, ...], owned: int, machines: Machines, ranks: int) -> NodeGroup:
    memory = rank_memory(recipe, owned, ranks, machines.device)
    flops = flops_per_token(recipe, owned)
    tokens = tokens_per_step(recipe, machines.gpus) * recipe.spes.sync_every
    seconds = flops.total * tokens / (machines.gpus * machines.tflops * 1e12)
    trained = count_parameters(recipe.model).trainable(owned)
    return NodeGroup(nodes, owned, trained, memory, flops, seconds, memory.peak <= USABLE * machines.memory)


def _exchange(recipe: Recipe, ownership: Ownership, codec: str, machines: Machines, compute_s: float) -> Exchange:
    loads = {ownership.owned(node): node for node in range(ownership.num_nodes)}
    traffic = {owned: node_traffic(recipe, ownership, node, codec) for owned, node in loads.items()}
    nodes: list[NodeTraffic] = [traffic[ownership.owned(node)] for node in range(ownership.num_nodes)]
    on_node, on_hub = round_seconds(machines.links, nodes, merging_rounds(recipe) / recipe.num_rounds)
    return Exchange(
        up=max(node.up for node in nodes),
        down=max(node.down for node in nodes),
        down_after_merge=max(node.down_after_merge for node in nodes),
        node_link_s=on_node,
        hub_link_s=on_hub,
        share_lost=_share(max(on_node, on_hub), compute_s),
    )


def _centralized(recipe: Recipe, machines: Machines) -> Scheme:
    """One job over all GPUs: ZeRO shards over all of them, gradients meet every step; there is no hub."""
    spes, model = recipe.spes, recipe.model
    nodes = tuple(range(spes.num_nodes))
    group = _group(recipe, nodes, model.num_experts, machines, machines.gpus * len(nodes))
    exchanges = {}
    for codec, size in (("fp32", 4), ("bf16", 2)):
        moved = spes.sync_every * centralized_bytes(group.trained, len(nodes), size)
        seconds = 8 * moved / machines.links.node
        exchanges[codec] = Exchange(moved, moved, moved, seconds, 0.0, _share(seconds, group.compute_s))
    return Scheme("centralized", (group,), exchanges)


def _share(lost_s: float, compute_s: float) -> float:
    return lost_s / (lost_s + compute_s) if lost_s + compute_s else 0.0


def _disk(recipe: Recipe, ownership: Ownership) -> Disk:
    state = 4 * count_parameters(recipe.model).total
    rounds, every = recipe.num_rounds, recipe.spes.snapshot_every
    traffic = [node_traffic(recipe, ownership, node, "fp32") for node in range(ownership.num_nodes)]
    kept = recipe.checkpoint.keep_last + 1 if recipe.checkpoint.every else 0
    return Disk(
        hub_state=3 * state + sum(node.up for node in traffic),
        hub_snapshots=state * (rounds // every + (rounds % every > 0)),
        node=max(node.up + node.down_after_merge for node in traffic),
        # what it trains, and two moments of it
        node_checkpoints=kept * 3 * max(node.up for node in traffic),
    )
