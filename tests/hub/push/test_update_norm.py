"""The norm of an update, in fp32 and in lossy codecs, and the bound on it."""

import math
import tempfile

import pytest
import torch

from spes_mega.client.client import PayloadError
from spes_mega.hub.push.update_norm import update_norm, update_rows
from spes_mega.outer.codecs import codec_named
from spes_mega.tools.status import describe
from spes_mega.wire.payload import StoredPayload, write_payload
from spes_mega.wire.tensor_specs import forms_of
from tests.hub.fabricated import fabricate, make_recipe, pull, push, shapes_of


def trained(recipe, node, state, length):
    """Values that lie at exactly this L2 distance from `state`."""
    step = fabricate(recipe, node, 0)
    norm = math.sqrt(sum(t.double().square().sum().item() for t in step.values()))
    return {name: (state[name].double() + t.double() * (length / norm)).float() for name, t in step.items()}


def test_an_update_above_the_bound_is_refused_with_its_norm_and_one_below_is_taken(start_hub, connect, tmp_path):
    recipe = make_recipe(max_update_norm=2.0)
    client = connect(start_hub(recipe), 0)
    client.join()
    state = pull(client)[1]
    with pytest.raises(PayloadError, match=r"its update has the norm 2\.00\d*, and spes\.max_update_norm is 2"):
        push(client, 0, trained(recipe, 0, state, 2.001))
    assert list((tmp_path / "state/pushes/000000").iterdir()) == []
    assert client.status()["waiting_for"] == [0, 1]
    push(client, 0, trained(recipe, 0, state, 1.999))
    status = client.status()
    assert status["waiting_for"] == [1]
    assert status["nodes"][0]["update_norm"] == pytest.approx(1.999, rel=1e-4)
    assert status["nodes"][1]["update_norm"] is None
    assert "  norm of its update 1.99" in "\n".join(describe(status))
    assert "norm 2.00" in status["rejected"][0]["reason"]


class State:
    """Reads rows as a checkpoint does."""

    def __init__(self, tensors):
        self._tensors = tensors

    def read_rows(self, name, start, stop):
        return self._tensors[name][start:stop]


@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-6), ("bf16", 4e-3), ("int8", 1e-2)])
def test_a_lossy_payload_is_the_update_and_fp32_is_taken_relative_to_the_state(codec, tolerance):
    shapes = shapes_of(make_recipe(), 0)
    step = fabricate(make_recipe(), 0, 0)
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    sent = {name: state[name] + t for name, t in step.items()} if codec == "fp32" else step
    expected = torch.cat([t.flatten() for t in step.values()]).double().norm().item()
    with tempfile.TemporaryFile() as file:
        write_payload(file, forms_of(shapes, lambda name: codec_named(codec)), sent.items(), {})
        assert update_norm(update_rows(StoredPayload(file, "x"), State(state))) == pytest.approx(
            expected, rel=tolerance
        )


def test_the_norm_of_large_values_does_not_overflow():
    assert update_norm(iter([torch.full((4,), 1e30)])) == pytest.approx(2e30)
