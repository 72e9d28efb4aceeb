"""Who owns which experts.

An expert has the same number in every MoE layer, and a node that owns it owns it in all of them
(arXiv 2602.11543, section 3: expert e belongs to node e // (E / N); here any assignment goes).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
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


def ownership_of(
    num_experts: int, num_nodes: int, spec: OwnershipSpec = "equal", capacity: Sequence[int] | None = None
) -> Ownership:
    """The assignment that a recipe's `spes.ownership` stands for.

    "equal" gives contiguous shares in proportion to `capacity` (default: the same for all), rounded by largest
    remainder: one more to the first nodes where num_nodes does not divide num_experts (with fewer experts than nodes,
    the last nodes train shared weights alone); "all" gives every node every expert; explicit lists are taken as they
    are.

    Raises:
        ValueError: explicit lists leave an expert without an owner, name an unknown one, or are not one a node;
            capacity is not one positive number a node.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes {num_nodes} must be at least 1")
    capacity = _checked_capacity(capacity, num_nodes)
    if spec == "all":
        return Ownership(num_experts, (tuple(range(num_experts)),) * num_nodes)
    if spec == "equal":
        return Ownership(num_experts, _shares(num_experts, capacity))
    if len(spec) != num_nodes:
        raise ValueError(f"ownership lists {len(spec)} nodes, num_nodes is {num_nodes}")
    return Ownership(num_experts, tuple(tuple(sorted(set(experts))) for experts in spec))


def _checked_capacity(capacity: Sequence[int] | None, num_nodes: int) -> Sequence[int]:
    capacity = (1,) * num_nodes if capacity is None else capacity
    if len(capacity) != num_nodes or min(capacity) < 1:
        raise ValueError(f"capacity {list(capacity)} must be one positive number for each of {num_nodes} nodes")
    return capacity


def _shares(num_experts: int, capacity: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    total = sum(capacity)
    sizes = [num_experts * share // total for share in capacity]
    by_remainder = sorted(range(len(capacity)), key=lambda node: (-(num_experts * capacity[node] % total), node))
    for node in by_remainder[: num_experts - sum(sizes)]:
        sizes[node] += 1
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(accumulate(sizes, initial=0)))


def with_absent(base: Ownership, absent: Collection[int], capacity: Sequence[int] | None = None) -> Ownership:
    """The assignment while some nodes are away; without absent nodes it is `base`.

    Nodes that are present keep what they own. An expert whose owners are all away goes to the present node with the
    least load for its capacity, lowest number first; such experts are given away one by one in ascending order. An
    absent node owns nothing.

    Raises:
        ValueError: nobody is present, or capacity is not one positive number a node.
    """
    capacity = _checked_capacity(capacity, base.num_nodes)
    present = [node for node in range(base.num_nodes) if node not in absent]
    if not present:
        raise ValueError("all nodes are absent: nobody could own the experts")
    owned = {node: list(base.nodes[node]) for node in present}
    kept = {expert for experts in owned.values() for expert in experts}
    for expert in range(base.num_experts):
        if expert not in kept:
            heir = min(present, key=lambda node: (Fraction(len(owned[node]), capacity[node]), node))
            owned[heir].append(expert)
    return Ownership(base.num_experts, tuple(tuple(sorted(owned.get(node, ()))) for node in range(base.num_nodes)))


def next_absent(
    num_nodes: int,
    absent: Collection[int],
    contributors: Collection[int],
    left: Collection[int],
    missed: Callable[[int], int],
    adopt_after: int | None,
) -> tuple[int, ...]:
    """Nodes that are absent in the round after one that was closed with `contributors`, ascending.

    `absent` were so in the closed round, and are until they contribute again; `left` have taken their leave, and
    `missed(node)` is for how many rounds in a row a node has not contributed. With adopt_after None nobody is ever
    absent. If all were, those who contributed last are not: there must be somebody to own the experts.
    """
    if adopt_after is None:
        return ()
    away = {
        node
        for node in set(range(num_nodes)) - set(contributors)
        if node in absent or node in left or missed(node) >= adopt_after
    }
    gone = away | set(left)
    return tuple(sorted(gone if len(gone) < num_nodes else away))


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short, as in "0-3,7"; "none" without any."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def pushed_names(names: Iterable[str], ownership: Ownership, node: int, expert_of: ExpertOf) -> list[str]:
    """Names that `node` trains and sends, in the order given: all shared ones and those of its own experts."""
    owned = set(ownership.owned(node))
    return [name for name in names if (key := expert_of(name)) is None or key.expert in owned]


def private_names(names: Iterable[str], ownership: Ownership, node: int, expert_of: ExpertOf) -> list[str]:
    """Names that `node` alone trains: those of the experts of which it is the sole owner."""
    alone = {expert for expert in ownership.owned(node) if ownership.sole_owner(expert) == node}
    return [name for name in names if (key := expert_of(name)) is not None and key.expert in alone]
