"""What a run needs of the disks of its hub and of its nodes."""

from dataclasses import dataclass

from spes_mega.layout.counts import count_parameters
from spes_mega.layout.names import expected_tensors
from spes_mega.outer.ownership import Ownership
from spes_mega.recipe import Recipe
from spes_mega.tools.plan.wire_sizes import lost_bytes, push_bytes, spool_bytes, state_bytes

STATES = 3
"""On the hub: the newest, the one before it, and the one that is written."""
PUSHES = 2
"""On the hub, of each node: that of the round that is closed stays until the state made of it is on the disk, and
meanwhile that of the next one comes. Otherwise there is room for one that a node has left incomplete."""


@dataclass(frozen=True)
class Disk:
    """Bytes at the most: the hub's three states (weights, and what lies beside them) and two pushes of every node; its
    snapshots in all; and of the node that needs most, the files for what is on its way, for what it trains on from
    while that is (spes.overlap), for moments while experts change hands (spes.adopt_after), and its checkpoints, of
    which one is being written."""

    hub_weights: int
    hub_beside: int
    hub_pushes: int
    hub_snapshots: int
    node_spools: int
    node_overlap: int
    node_moving: int
    node_checkpoints: int

    @property
    def hub_state(self) -> int:
        return self.hub_weights + self.hub_beside + self.hub_pushes

    @property
    def node(self) -> int:
        """All but the checkpoints."""
        return self.node_spools + self.node_overlap + self.node_moving


def planned_disk(recipe: Recipe, ownership: Ownership, tokens: int) -> Disk:
    """`tokens` are what a node trains on in a round."""
    shapes, spes = expected_tensors(recipe.model), recipe.spes
    state = state_bytes(shapes, spes, ownership)
    # So many of the states can end with a merge.
    merged = min(STATES, -(-STATES * spes.sync_every // spes.merge_interval))
    snapshots = -(-recipe.num_rounds // spes.snapshot_every)
    # Nodes with equally many experts need the same but for the names of these.
    nodes = range(ownership.num_nodes)
    largest = max(nodes, key=lambda node: len(ownership.owned(node)))
    trained = count_parameters(recipe.model).trainable(len(ownership.owned(largest)))
    lost = 0 if spes.overlap else lost_bytes(shapes, spes, ownership, largest)
    kept = recipe.checkpoint.keep_last + 1 if recipe.checkpoint.every else 0
    return Disk(
        hub_weights=STATES * state.weights,
        hub_beside=STATES * (state.residual + state.velocity + state.delta) + merged * state.merge,
        hub_pushes=PUSHES * sum(push_bytes(shapes, spes, ownership, node, tokens) for node in nodes),
        hub_snapshots=snapshots * state.weights,
        node_spools=max(spool_bytes(shapes, spes, ownership, node, tokens).total for node in nodes),
        node_overlap=2 * 4 * trained if spes.overlap else 0,
        node_moving=2 * 4 * trained if spes.adopt_after else 0,
        # its values and two moments, in fp32
        node_checkpoints=kept * (3 * 4 * trained + lost),
    )
