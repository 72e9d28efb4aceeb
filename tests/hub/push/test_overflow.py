"""Pushes of finite values whose outcome would not be finite."""

import pytest
import torch

from spes_mega.errors import SpesError
from tests.hub.fabricated import fabricate, make_recipe, pull, push

NAME = "model.norm.weight"
HUGE = {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.9}


@pytest.mark.parametrize(
    ("spes", "value"),
    [
        ({"outer": {"shared": {"lr": 1e39}}}, 1.0),  # the step
        ({"outer": {"shared": HUGE}}, 3e38),  # the step on top of what there is
        ({"wire": {"down": "bf16"}}, 3.4e38),  # bf16 rounds it up
    ],
)
def test_the_hub_ends_before_it_commits_what_is_not_finite(start_hub, connect, tmp_path, spes, value):
    recipe = make_recipe(num_nodes=1, **spes)
    hub = start_hub(recipe)
    client = connect(hub, 0)
    client.join()
    pull(client)
    tensors = fabricate(recipe, 0, 0)
    tensors[NAME] = torch.full_like(tensors[NAME], value)
    push(client, 0, tensors)
    with pytest.raises(SpesError, match=r"the new state of .* would have NaN or infinite values"):
        client.wait_round(1)
    assert "would have NaN" in str(hub.join().error)
    assert [path.name for path in (tmp_path / "state/rounds").iterdir()] == ["000000"]
