import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spes_mega.outer.optimizer import nesterov_step, sgd_step

CHANGES = hnp.arrays(np.float32, (3, 4), elements=st.floats(-10, 10, width=32))


@given(st.lists(CHANGES, min_size=1, max_size=6), st.sampled_from([0.5, 0.7, 1.0]), st.sampled_from([0.5, 0.9]))
def test_nesterov_is_torchs_on_the_pseudo_gradient(rounds, lr, momentum):
    weights = torch.nn.Parameter(torch.zeros(3, 4))
    reference = torch.optim.SGD([weights], lr=lr, momentum=momentum, nesterov=True)
    mine, velocity = torch.zeros(3, 4), torch.zeros(3, 4)
    for change in map(torch.from_numpy, rounds):
        weights.grad = -change  # global weights - local weights
        reference.step()
        mine += nesterov_step(change.clone(), velocity, lr=lr, momentum=momentum)
        # torch may fuse the last product and sum into one rounding
        torch.testing.assert_close(mine, weights.detach(), rtol=1e-5, atol=1e-4)


def test_nesterov_by_hand():
    velocity = torch.tensor([2.0])
    step = nesterov_step(torch.tensor([3.0]), velocity, lr=0.5, momentum=0.5)
    assert velocity.item() == 4.0  # 0.5 * 2 + 3
    assert step.item() == 2.5  # 0.5 * (3 + 0.5 * 4)


@pytest.mark.parametrize(("lr", "step"), [(1.0, 3.0), (0.5, 1.5)])
def test_sgd_goes_towards_the_local_weights(lr, step):
    assert sgd_step(torch.tensor([3.0]), lr).item() == step
