import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_mega.outer.ownership import Ownership, ownership_of, private_names, pushed_names


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
