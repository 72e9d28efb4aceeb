"""Puts a plan together: memory, network, time and disk of a recipe on given machines, beside DiLoCo and centralized."""

import io
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any

from spes_mega.layout.counts import ParameterCounts, count_parameters
from spes_mega.layout.families.rope import llama3_factor
from spes_mega.outer.ownership import Ownership, ownership_of
from spes_mega.recipe import Recipe
from spes_mega.recipe.deepspeed_config import check_readable, deepspeed_config
from spes_mega.tools.plan.compute import Flops, flops_per_token, tokens_per_step
from spes_mega.tools.plan.disk import Disk, planned_disk
from spes_mega.tools.plan.memory import Build, Device, Memory, installed_build, rank_memory
from spes_mega.tools.plan.traffic import (
    CODECS,
    CONFIGURED,
    Links,
    centralized_bytes,
    merging_rounds,
    node_traffic,
    round_seconds,
    waited_seconds,
)
from spes_mega.tools.plan.wire_sizes import RoundBytes

USABLE = 0.95
"""Of a GPU's memory: what the allocator leaves unused between blocks cannot be known before."""


@dataclass(frozen=True)
class Machines:
    """What the nodes are: `memory` bytes and `tflops` sustained are those of one GPU, links are in bits a second.

    `torch` is the build of torch that they have.
    """

    gpus: int
    memory: int
    links: Links
    tflops: float
    device: Device = "cuda"
    torch: Build = field(default_factory=installed_build)


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
    """A round's communication in one precision. Bytes are those of the node that moves most.

    `waited_s` of it nodes do not train, a round on average; that is `share_lost` of their time.
    """

    up: int
    down: int
    down_after_merge: int
    node_link_s: float
    hub_link_s: float
    waited_s: float
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
            "disk": {**asdict(self.disk), "hub_state": self.disk.hub_state, "node": self.disk.node},
            "wire": recipe.spes.wire.model_dump(),
            "overlap": recipe.spes.overlap,
            "fits": self.spes.fits,
            "schemes": [scheme.as_json() for scheme in self.schemes],
        }


def make_plan(recipe: Recipe, machines: Machines) -> Plan:
    """The plan of `recipe`, whose first scheme is the recipe itself; the others train every expert everywhere.

    Raises RecipeError: a node would refuse the recipe's deepspeed section, or its RoPE variant.
    """
    _check_as_a_node(recipe, machines.gpus)
    model, spes = recipe.model, recipe.spes
    everything = ownership_of(model.num_experts, spes.num_nodes, "all")
    own = recipe.ownership()
    schemes = (
        _rounds("this recipe", recipe, own, machines),
        _rounds("DiLoCo", recipe, everything, machines),
        _centralized(recipe, machines),
    )
    disk = planned_disk(recipe, own, _tokens(recipe, machines))
    return Plan(recipe, machines, count_parameters(model), schemes, disk)


def _check_as_a_node(recipe: Recipe, ranks: int) -> None:
    """Raises RecipeError. DeepSpeed and Megatron-Core, which take seconds, are asked only about what they are to do."""
    config = deepspeed_config(recipe, ranks)
    if recipe.deepspeed:
        with redirect_stdout(io.StringIO()):  # DeepSpeed logs to it, of which --json has to be free
            check_readable(config)
    llama3_factor(recipe.model)


def _tokens(recipe: Recipe, machines: Machines) -> int:
    """That a node trains on in a round."""
    return tokens_per_step(recipe, machines.gpus) * recipe.spes.sync_every


def node_groups(recipe: Recipe, machines: Machines) -> tuple[NodeGroup, ...]:
    """The nodes of the recipe as it stands."""
    return _groups(recipe, recipe.ownership(), machines)


def _groups(recipe: Recipe, ownership: Ownership, machines: Machines) -> tuple[NodeGroup, ...]:
    by_load: dict[int, list[int]] = {}
    for node in range(ownership.num_nodes):
        by_load.setdefault(len(ownership.owned(node)), []).append(node)
    return tuple(_group(recipe, tuple(nodes), owned, machines, machines.gpus) for owned, nodes in by_load.items())


def _rounds(name: str, recipe: Recipe, ownership: Ownership, machines: Machines) -> Scheme:
    groups = _groups(recipe, ownership, machines)
    compute = max(group.compute_s for group in groups)
    codecs = (*CODECS, CONFIGURED)
    return Scheme(name, groups, {codec: _exchange(recipe, ownership, codec, machines, compute) for codec in codecs})


def _group(recipe: Recipe, nodes: tuple[int, ...], owned: int, machines: Machines, ranks: int) -> NodeGroup:
    memory = rank_memory(recipe, owned, ranks, machines.device, machines.torch)
    flops = flops_per_token(recipe, owned)
    tokens = tokens_per_step(recipe, ranks) * recipe.spes.sync_every
    seconds = flops.total * tokens / (ranks * machines.tflops * 1e12)
    trained = count_parameters(recipe.model).trainable(owned)
    return NodeGroup(nodes, owned, trained, memory, flops, seconds, memory.peak <= USABLE * machines.memory)


def _exchange(recipe: Recipe, ownership: Ownership, codec: str, machines: Machines, compute_s: float) -> Exchange:
    loads = {ownership.owned(node): node for node in range(ownership.num_nodes)}
    tokens = _tokens(recipe, machines)
    traffic = {owned: node_traffic(recipe, ownership, node, codec, tokens) for owned, node in loads.items()}
    nodes: list[RoundBytes] = [traffic[ownership.owned(node)] for node in range(ownership.num_nodes)]
    on_node, on_hub = round_seconds(machines.links, nodes, merging_rounds(recipe) / recipe.num_rounds)
    waited = waited_seconds(recipe, max(on_node, on_hub), compute_s)
    return Exchange(
        up=max(node.up for node in nodes),
        down=max(node.down for node in nodes),
        down_after_merge=max(node.down_after_merge for node in nodes),
        node_link_s=on_node,
        hub_link_s=on_hub,
        waited_s=waited,
        share_lost=_share(waited, compute_s),
    )


def _centralized(recipe: Recipe, machines: Machines) -> Scheme:
    """One job over all GPUs: ZeRO shards over all of them, gradients meet every step; there is no hub."""
    spes, model = recipe.spes, recipe.model
    nodes = tuple(range(spes.num_nodes))
    group = _group(_with_all_batches(recipe), nodes, model.num_experts, machines, machines.gpus * len(nodes))
    exchanges = {}
    for codec, size in (("fp32", 4), ("bf16", 2)):
        moved = spes.sync_every * centralized_bytes(group.trained, len(nodes), size)
        seconds = 8 * moved / machines.links.node
        exchanges[codec] = Exchange(moved, moved, moved, seconds, 0.0, seconds, _share(seconds, group.compute_s))
    return Scheme("centralized", (group,), exchanges)


def _with_all_batches(recipe: Recipe) -> Recipe:
    """A step of one job takes the samples that all nodes take in one."""
    size = recipe.train.batch_size
    train = recipe.train.model_copy(update={"batch_size": size and size * recipe.spes.num_nodes})
    return recipe.model_copy(update={"train": train})


def _share(lost_s: float, compute_s: float) -> float:
    return lost_s / (lost_s + compute_s) if lost_s + compute_s else 0.0
