import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_mega.outer.merging import (
    add_to_gram,
    choose_donors,
    cosine_similarity,
    merge_alpha,
    merge_due,
    merge_rows,
    new_gram,
)


def gram_of(rows, slice_rows):
    gram = new_gram(rows.shape[0])
    for start in range(0, rows.shape[1], slice_rows):
        add_to_gram(gram, rows[:, start : start + slice_rows])
    return gram


def test_alpha_falls_linearly_to_zero():
    assert merge_alpha(0, alpha=0.05, merge_steps=20_000) == 0.05
    assert merge_alpha(5000, alpha=0.05, merge_steps=20_000) == pytest.approx(0.0375)
    assert merge_alpha(20_000, alpha=0.05, merge_steps=20_000) == 0
    assert merge_alpha(7, alpha=0.05, merge_steps=0) == 0


@pytest.mark.parametrize(
    ("before", "after", "due"),
    [
        (400, 500, True),
        (450, 550, True),
        (500, 600, False),
        (0, 100, False),
        (499, 500, True),
        (300, 2300, True),
        (9900, 10_000, False),
        (9000, 9500, True),
        (500, 500, False),
    ],
)
def test_due_when_a_multiple_of_the_interval_is_passed(before, after, due):
    assert merge_due(before, after, interval=500, merge_steps=10_000) is due


def test_never_due_without_merging():
    assert not merge_due(0, 500, interval=500, merge_steps=0)


@given(st.integers(1, 60), st.integers(1, 90), st.integers(0, 400))
def test_due_is_the_definition_spelled_out(interval, length, merge_steps):
    for round_ in range(5):
        before, after = round_ * length, (round_ + 1) * length
        spelled = any(s % interval == 0 for s in range(before + 1, after + 1)) and after < merge_steps
        assert merge_due(before, after, interval=interval, merge_steps=merge_steps) == spelled


def test_similarity_by_hand():
    rows = torch.tensor([[[3.0, 0.0]], [[0.0, 2.0]], [[1.0, 1.0]], [[0.0, 0.0]]])
    half = 0.5**0.5
    expected = [[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(cosine_similarity(gram_of(rows, 1)), torch.tensor(expected, dtype=torch.float64))


@given(st.integers(1, 7))
def test_slices_of_any_size_give_the_similarity_of_the_whole(slice_rows):
    rows = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(3))
    flat = rows.flatten(1).double()
    exact = torch.nn.functional.cosine_similarity(flat[:, None], flat[None, :], dim=-1)
    # fp64 sums in another order
    torch.testing.assert_close(cosine_similarity(gram_of(rows, slice_rows)), exact, rtol=1e-12, atol=1e-12)


def test_donors_are_the_most_similar_others_and_ties_go_to_the_lower_number():
    similarity = torch.eye(6, dtype=torch.float64)
    similarity[0] = torch.tensor([1, 0.1, 0.9, -0.5, 0.3, 0.2])
    donors = choose_donors(similarity, 4)
    assert donors[0] == (1, 2, 4, 5)
    assert donors[5] == (0, 1, 2, 3)


def test_fewer_than_five_experts_take_from_all_the_others_and_one_from_nobody():
    assert choose_donors(torch.eye(3), 4) == ((1, 2), (0, 2), (0, 1))
    assert choose_donors(torch.ones(1, 1), 4) == ((),)
    rows = torch.randn(1, 2, 3)
    assert torch.equal(merge_rows(rows, ((),), 0.5), rows)


def test_merged_values_by_hand_come_from_before_any_merge():
    rows = torch.tensor([[[0.0, 8.0]], [[4.0, 8.0]], [[2.0, -4.0]]])
    merged = merge_rows(rows, ((1, 2), (0,), (0, 1)), 0.5)
    # expert 0: 0 + .5 * mean(4, 2); 8 + .5 * mean(0, -12); expert 1: 4 + .5 * (0 - 4), from the old 0
    assert merged.tolist() == [[[1.5, 5.0]], [[2.0, 8.0]], [[2.0, 2.0]]]
    assert rows.tolist() == [[[0.0, 8.0]], [[4.0, 8.0]], [[2.0, -4.0]]]


@given(st.floats(0, 1), st.integers(2, 6))
def test_equal_experts_stay_bit_for_bit(alpha, experts):
    row = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    rows = row.expand(experts, 3, 4).contiguous()
    merged = merge_rows(rows, choose_donors(torch.ones(experts, experts), 4), alpha)
    assert torch.equal(merged, rows)
