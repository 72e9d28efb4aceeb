import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_mega.outer.ownership import (
    Ownership,
    next_absent,
    ownership_of,
    private_names,
    pushed_names,
    ranges,
    with_absent,
)


@dataclass(frozen=True)
class Key:
    expert: int


def expert_of(name):
    found = re.search(r"experts\.(\d+)", name)
    return Key(int(found[1])) if found else None


NAMES = ["embed", *(f"layers.{layer}.experts.{e}.w" for layer in (0, 1) for e in range(4)), "norm"]


@pytest.mark.parametrize(
    ("experts", "nodes", "shares"),
    [
        (8, 4, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (4, 1, ((0, 1, 2, 3),)),
        (5, 2, ((0, 1, 2), (3, 4))),
        (7, 3, ((0, 1, 2), (3, 4), (5, 6))),
        (2, 3, ((0,), (1,), ())),
        (0, 2, ((), ())),
    ],
)
def test_equal_shares_are_contiguous_and_the_remainder_goes_to_the_first(experts, nodes, shares):
    assert ownership_of(experts, nodes).nodes == shares


def test_all_gives_every_node_every_expert():
    ownership = ownership_of(3, 2, "all")
    assert ownership.nodes == ((0, 1, 2), (0, 1, 2))
    assert ownership.owners(1) == (0, 1)
    assert ownership.sole_owner(1) is None


def test_explicit_lists_may_overlap_and_need_not_be_contiguous():
    ownership = ownership_of(4, 2, ((3, 0, 1), (2, 1)))
    assert ownership.owned(0) == (0, 1, 3)
    assert [ownership.owners(e) for e in range(4)] == [(0,), (0, 1), (1,), (0,)]
    assert [ownership.sole_owner(e) for e in range(4)] == [0, None, 1, 0]


def test_faulty_assignments_are_refused_by_name():
    with pytest.raises(ValueError, match="nobody owns expert 2"):
        ownership_of(4, 2, ((0, 1), (3,)))
    with pytest.raises(ValueError, match="there is no expert 4"):
        ownership_of(4, 2, ((0, 1, 2), (3, 4)))
    with pytest.raises(ValueError, match="lists 1 nodes, num_nodes is 2"):
        ownership_of(2, 2, ((0, 1),))
    with pytest.raises(ValueError, match=r"no node 2: nodes are 0\.\.1"):
        ownership_of(2, 2).owned(2)


@given(st.integers(0, 40), st.integers(1, 20))
def test_equal_shares_cover_every_expert_once_and_differ_by_at_most_one(experts, nodes):
    ownership = ownership_of(experts, nodes)
    assert [e for owned in ownership.nodes for e in owned] == list(range(experts))
    sizes = [len(owned) for owned in ownership.nodes]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_node_pushes_what_is_shared_and_what_it_owns_in_order():
    ownership = ownership_of(4, 2)
    assert pushed_names(NAMES, ownership, 1, expert_of) == [
        "embed",
        "layers.0.experts.2.w",
        "layers.0.experts.3.w",
        "layers.1.experts.2.w",
        "layers.1.experts.3.w",
        "norm",
    ]


def test_private_is_what_nobody_else_trains():
    ownership = Ownership(4, ((0, 1), (1, 2, 3)))
    assert private_names(NAMES, ownership, 0, expert_of) == ["layers.0.experts.0.w", "layers.1.experts.0.w"]
    assert private_names(NAMES, ownership_of(4, 2, "all"), 0, expert_of) == []


@pytest.mark.parametrize(
    ("experts", "capacity", "shares"),
    [
        (8, (2, 1, 1), ((0, 1, 2, 3), (4, 5), (6, 7))),
        (5, (1, 3), ((0,), (1, 2, 3, 4))),  # 1.25 and 3.75: the larger remainder gets the one that is left
        (3, (1, 1, 2), ((0,), (1,), (2,))),  # 0.75, 0.75, 1.5: one is left for each of the first two
        (2, (1, 5, 1), ((), (0, 1), ())),  # 0.29, 1.43, 0.29
    ],
)
def test_shares_by_capacity_are_proportional_and_contiguous(experts, capacity, shares):
    assert ownership_of(experts, len(capacity), "equal", capacity).nodes == shares


def test_a_capacity_that_is_not_one_positive_number_a_node_is_refused():
    for capacity in ((1,), (1, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match="one positive number for each of 2 nodes"):
            ownership_of(4, 2, "equal", capacity)


CAPACITIES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(st.integers(0, 40), CAPACITIES)
def test_shares_by_capacity_are_within_one_of_the_exact_share(experts, capacity):
    ownership = ownership_of(experts, len(capacity), "equal", capacity)
    assert [e for owned in ownership.nodes for e in owned] == list(range(experts))
    for owned, own in zip(ownership.nodes, capacity, strict=True):
        assert abs(len(owned) - experts * own / sum(capacity)) < 1


@st.composite
def situations(draw, spec="any"):
    """A base assignment, capacities, and absent nodes of which at least one is missing."""
    capacity = tuple(draw(CAPACITIES))
    nodes = range(len(capacity))
    experts = draw(st.integers(0, 30))
    if spec == "equal" or draw(st.booleans()):
        base = ownership_of(experts, len(capacity), "equal", capacity)
    else:
        owners = [draw(st.sets(st.sampled_from(nodes), min_size=1)) for _ in range(experts)]
        base = Ownership(experts, tuple(tuple(e for e in range(experts) if n in owners[e]) for n in nodes))
    absent = draw(st.sets(st.sampled_from(nodes), max_size=len(capacity) - 1))
    return base, absent, capacity


@given(situations())
def test_while_nodes_are_away_present_ones_keep_theirs_and_nothing_is_without_owner(situation):
    base, absent, capacity = situation
    now = with_absent(base, absent, capacity)  # an Ownership without an owner for an expert cannot be made
    assert now == with_absent(base, sorted(absent, reverse=True), list(capacity))
    for node in range(base.num_nodes):
        if node in absent:
            assert now.owned(node) == ()
        else:
            assert set(now.owned(node)) >= set(base.owned(node))
    for expert in range(base.num_experts):
        here = tuple(node for node in base.owners(expert) if node not in absent)
        assert now.owners(expert) == here if here else len(now.owners(expert)) == 1


@given(situations())
def test_without_absent_nodes_everyone_has_what_the_recipe_says(situation):
    base, _, capacity = situation
    assert with_absent(base, (), capacity) == base


@given(situations("equal"))
def test_loads_stay_even_for_their_capacity(situation):
    base, absent, capacity = situation
    now = with_absent(base, absent, capacity)
    present = [node for node in range(base.num_nodes) if node not in absent]
    load = {node: len(now.owned(node)) for node in present}
    for heir in present:
        if load[heir] > len(base.owned(heir)):  # before the last one it got, nobody had less for its capacity
            assert all((load[heir] - 1) * capacity[node] <= load[node] * capacity[heir] for node in present)
    if len(set(capacity)) == 1:
        assert max(load.values()) - min(load.values()) <= 1


def test_experts_of_absent_nodes_go_to_the_least_loaded_one_by_one():
    base = ownership_of(8, 4)
    assert with_absent(base, {1}).nodes == ((0, 1, 2), (), (3, 4, 5), (6, 7))
    assert with_absent(base, {1, 2}).nodes == ((0, 1, 2, 4), (), (), (3, 5, 6, 7))
    assert with_absent(base, {0}, (1, 1, 1, 4)).nodes == ((), (2, 3), (4, 5), (0, 1, 6, 7))
    replicated = Ownership(4, ((0, 1), (1, 2), (3,)))
    assert with_absent(replicated, {1}).nodes == ((0, 1), (), (2, 3))
    with pytest.raises(ValueError, match="all nodes are absent"):
        with_absent(base, range(4))


def test_a_node_is_absent_after_so_many_missed_rounds_or_when_it_left_until_it_contributes():
    missed = {0: 0, 1: 1, 2: 2}.__getitem__
    assert next_absent(3, (), (0,), (), missed, 2) == (2,)
    assert next_absent(3, (), (0,), (), missed, None) == ()
    assert next_absent(3, (1,), (0,), (), missed, 2) == (1, 2)  # away for longer than the hub can tell
    assert next_absent(3, (1, 2), (0, 2), (), missed, 2) == (1,)
    assert next_absent(3, (), (0, 1), (1,), missed, 3) == (1,)
    assert next_absent(3, (), (0, 1), (1,), missed, None) == ()
    assert next_absent(2, (), (0,), (0,), missed, 1) == (1,)  # all are gone: the last ones stay owners


def test_numbers_in_short():
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert ranges(()) == "none"
