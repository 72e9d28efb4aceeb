import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spes_mega.outer.average import average

TENSORS = hnp.arrays(
    np.float32, st.integers(1, 20), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def test_mean_of_two_and_of_three():
    a, b, c = (torch.tensor(v) for v in ([1.0, 2.0], [3.0, -2.0], [5.0, 3.0]))
    assert average([a, b]).tolist() == [2.0, 0.0]
    assert average([a, b, c]).tolist() == [3.0, 1.0]


def test_weighted_by_hand_and_without_weight_all_count_alike():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])
    assert average([a, b], [3, 1]).tolist() == [2.0, 1.0]
    assert average([a, b], [0, 1]).tolist() == b.tolist()
    assert average([a, b], [0, 0]).tolist() == [3.0, 0.0]
    assert average([a], [0]).tolist() == a.tolist()
    with pytest.raises(ValueError, match="shorter"):
        average([a, b], [1])


@given(TENSORS, st.lists(st.integers(0, 10**15), min_size=1, max_size=9))
def test_the_weighted_mean_of_equal_tensors_is_that_tensor_bit_for_bit(values, weights):
    x = torch.from_numpy(values)
    assert torch.equal(average([x] * len(weights), weights), x)


def test_inputs_stay_as_they_are():
    parts = [torch.tensor([1.0]), torch.tensor([3.0])]
    average(parts)
    assert [p.item() for p in parts] == [1.0, 3.0]


@given(TENSORS, st.integers(1, 9))
def test_the_mean_of_equal_tensors_is_that_tensor_bit_for_bit(values, count):
    x = torch.from_numpy(values)
    mean = average([x] * count)
    assert mean.dtype == torch.float32
    assert mean.numpy().tobytes() == values.tobytes()


def test_sums_that_fp32_would_lose_are_kept():
    big, one = torch.tensor([2.0**25]), torch.tensor([1.0])
    assert average([big, one, one, -big]).item() == 0.5
    most = torch.tensor([torch.finfo(torch.float32).max])
    assert average([most, most]).item() == most.item()


def test_parts_are_taken_one_at_a_time():
    alive = 0

    def parts():
        nonlocal alive
        for value in range(1, 6):
            alive += 1
            yield torch.full((3,), float(value))

    assert average(parts()).tolist() == [3.0, 3.0, 3.0]
    assert alive == 5


def test_no_parts_and_other_shapes_are_refused():
    with pytest.raises(ValueError, match="no tensors"):
        average([])
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        average([torch.zeros(2), torch.zeros(1)])
