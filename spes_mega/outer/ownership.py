"""Who owns which experts.

An expert has the same number in every MoE layer, and a node that owns it owns it in all of them
(arXiv 2602.11543, section 3: expert e belongs to node e // (E / N); here any assignment goes).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

OwnershipSpec = Literal["equal", "all"] | tuple[tuple[int, ...], ...]


class HasExpert(Protocol):
    """What a tensor's name says of the expert that it belongs to."""

    @property
    def expert(self) -> int: ...


ExpertOf = Callable[[str], HasExpert | None]


@dataclass(frozen=True)
class Ownership:
    """An assignment of experts to nodes; `nodes[k]` are the experts of node k in ascending order."""

    num_experts: int
    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        everyone = {expert for owned in self.nodes for expert in owned}
        if missing := sorted(set(range(self.num_experts)) - everyone):
            raise ValueError(f"ownership: nobody owns expert {missing[0]}")
        if unknown := sorted(everyone - set(range(self.num_experts))):
            raise ValueError(f"ownership: there is no expert {unknown[0]} (num_experts {self.num_experts})")

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    def owned(self, node: int) -> tuple[int, ...]:
        """Experts of `node`, ascending; may be empty."""
        if not 0 <= node < self.num_nodes:
            raise ValueError(f"there is no node {node}: nodes are 0..{self.num_nodes - 1}")
        return self.nodes[node]

    def owners(self, expert: int) -> tuple[int, ...]:
        """Nodes that train `expert`, ascending; never empty."""
        return tuple(node for node, owned in enumerate(self.nodes) if expert in owned)

    def sole_owner(self, expert: int) -> int | None:
        """The node that alone trains `expert`; None if several do."""
        owners = self.owners(expert)
        return owners[0] if len(owners) == 1 else None


def ownership_of(num_experts: int, num_nodes: int, spec: OwnershipSpec = "equal") -> Ownership:
    """The assignment that a recipe's `spes.ownership` stands for.

    "equal" gives contiguous shares, one more to the first nodes where num_nodes does not divide num_experts
    (with fewer experts than nodes, the last nodes train shared weights alone); "all" gives every node every
    expert; explicit lists are taken as they are.

    Raises:
        ValueError: explicit lists leave an expert without an owner, name an unknown one, or are not one a node.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes {num_nodes} must be at least 1")
    if spec == "all":
        return Ownership(num_experts, (tuple(range(num_experts)),) * num_nodes)
    if spec == "equal":
        return Ownership(num_experts, _equal_shares(num_experts, num_nodes))
    if len(spec) != num_nodes:
        raise ValueError(f"ownership lists {len(spec)} nodes, num_nodes is {num_nodes}")
    return Ownership(num_experts, tuple(tuple(sorted(set(experts))) for experts in spec))


def _equal_shares(num_experts: int, num_nodes: int) -> tuple[tuple[int, ...], ...]:
    share, remainder = divmod(num_experts, num_nodes)
    starts = [node * share + min(node, remainder) for node in range(num_nodes + 1)]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))


def pushed_names(names: Iterable[str], ownership: Ownership, node: int, expert_of: ExpertOf) -> list[str]:
    """Names that `node` trains and sends, in the order given: all shared ones and those of its own experts."""
    owned = set(ownership.owned(node))
    return [name for name in names if (key := expert_of(name)) is None or key.expert in owned]


def private_names(names: Iterable[str], ownership: Ownership, node: int, expert_of: ExpertOf) -> list[str]:
    """Names that `node` alone trains: those of the experts of which it is the sole owner."""
    alone = {expert for expert in ownership.owned(node) if ownership.sole_owner(expert) == node}
    return [name for name in names if (key := expert_of(name)) is not None and key.expert in alone]
