"""Offload to NVMe, and what else DeepSpeed cannot do or read, is refused by name; nothing is lost by the attempt."""

from types import SimpleNamespace

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from spes_mega.data.samples import NodeData
from spes_mega.errors import RecipeError, SpesError
from spes_mega.node.checkpoint.resume import Resume
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.lone_node import LoneNode
from spes_mega.node.sync.weight_source import Position
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.recipe import load_recipe

REFUSAL = (
    r"deepspeed\.zero_optimization\.offload_optimizer\.device is nvme: .*"
    r"spes\.adopt_after.*set device to cpu, or .*checkpoint\.every 0"
)


def offloading(**options):
    return {"zero_optimization": {"offload_optimizer": options}}


@pytest.fixture
def recipe_with(tmp_path, write_recipe):
    def load(**options):
        path = write_recipe(tmp_path, train={"zero_stage": 3}, deepspeed=offloading(**options))
        return load_recipe(path)

    return load


@pytest.fixture
def swapping(ranks, recipe_with, tmp_path):
    """A model in ZeRO-3 whose optimizer says of itself that it is on NVMe (DeepSpeed's code for that is not here)."""
    recipe = recipe_with(device="cpu")
    model = LocalModel(recipe, (0, 1), ranks, StopRequest(), tmp_path)
    assert model.engine.optimizer.swap_optimizer is False  # what DeepSpeed sets by the device
    model.engine.optimizer.swap_optimizer = True
    return model


def test_experts_that_change_hands_are_refused_before_anything_is_given_up(swapping):
    engine = swapping.engine
    with pytest.raises(RecipeError, match=REFUSAL):
        swapping.own((0, 1, 2))
    assert swapping.owned == (0, 1)
    assert swapping.engine is engine
    engine.optimizer.swap_optimizer = False
    assert swapping.own((0, 1, 2))


def test_checkpoints_are_refused_before_the_first_step(swapping, ranks, tmp_path):
    recipe = swapping.recipe
    options = SimpleNamespace(node=0, change=(), out=tmp_path / "out", resume="auto")
    resume = Resume(recipe, options, NodeData(recipe, 0), ranks, lambda text: None)
    source = LoneNode(recipe, ranks, options.out, None)
    with pytest.raises(SpesError, match=REFUSAL) as refused, resume.saver(swapping, Position(0, 0), source):
        raise AssertionError("training began")
    assert refused.value.exit_code == RecipeError.exit_code
    swapping.engine.optimizer.swap_optimizer = False
    with resume.saver(swapping, Position(0, 0), source) as saver:
        assert saver is not None


@pytest.mark.skipif(AsyncIOBuilder().is_compatible(verbose=False), reason="NVMe can be used here")
def test_nvme_that_deepspeed_cannot_reach_is_refused_by_name(ranks, recipe_with, tmp_path):
    recipe = recipe_with(device="nvme", nvme_path=str(tmp_path))
    with pytest.raises(SpesError, match=r"offload_optimizer\.device is nvme: .*async_io.*libaio.*set device to cpu"):
        LocalModel(recipe, (0, 1), ranks, StopRequest(), tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"zero_optimization": {"bogus": 1}},
            r"^deepspeed\.zero_optimization\.bogus is 1: Extra inputs are not permitted$",
        ),
        (
            {"zero_optimization": {"offload_param": 3}},
            r"^deepspeed\.zero_optimization\.offload_param is 3: .* dictionary",
        ),
        (offloading(bogus=1), r"^deepspeed\.zero_optimization\.offload_optimizer\.bogus is 1: Extra inputs"),
        ({"zero_optimization": {"reduce_bucket_size": "5 e8"}}, r"\.reduce_bucket_size is '5 e8': .* valid integer"),
        ({"comms_logger": 3}, "^the recipe's deepspeed section: DeepSpeed cannot read it: .*Comms"),
    ],
)
def test_keys_and_values_that_deepspeed_does_not_take_are_refused_by_name(
    ranks, write_recipe, tmp_path, section, message
):
    recipe = load_recipe(write_recipe(tmp_path, deepspeed=section))
    with pytest.raises(SpesError, match=message):
        LocalModel(recipe, (0, 1), ranks, StopRequest(), tmp_path)


def test_a_number_as_json_has_it_reaches_deepspeed(ranks, write_recipe, tmp_path):
    path = write_recipe(tmp_path)
    path.write_text(path.read_text() + "deepspeed: {zero_optimization: {reduce_bucket_size: 5e8}}\n")
    model = LocalModel(load_recipe(path), (0, 1), ranks, StopRequest(), tmp_path)
    assert model.engine.zero_reduce_bucket_size() == 500_000_000
