"""A gradient that is not finite, through DeepSpeed's optimizers, which would leave the step out and go on."""

import math

import pytest

from spes_mega.data.samples import NodeData
from spes_mega.errors import SpesError
from spes_mega.node.loop import NodeRun
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.lone_node import LoneNode
from spes_mega.node.sync.weight_source import Position
from spes_mega.node.trainer import Trainer
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.recipe import load_recipe

CASES = [(1, "bf16", 2), *((stage, dtype, 1) for stage in (1, 2, 3) for dtype in ("fp32", "bf16"))]


class Saved:
    """A saver that only takes notes."""

    def __init__(self):
        self.steps = []

    def save(self, model, at, source):
        self.steps.append(at.step)


@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize(("stage", "dtype", "accumulation"), CASES)
def test_a_gradient_that_is_not_finite_ends_the_run_with_the_checkpoint_before(
    ranks, write_recipe, tmp_path, stage, dtype, accumulation, factor
):
    train = {"zero_stage": stage, "dtype": dtype, "grad_accumulation": accumulation, "lr": 1e-3}
    recipe = load_recipe(write_recipe(tmp_path, train=train, spes={"sync_every": 3}, checkpoint={"every": 1}))
    model = LocalModel(recipe, (0, 1, 2, 3), ranks, StopRequest(), tmp_path)
    source, saver = LoneNode(recipe, ranks, tmp_path, None), Saved()
    source.start(model)
    trainer = Trainer(recipe, model, NodeData(recipe, 0), ranks, StopRequest())
    passes = []

    def spoil(gradient):
        passes.append(1)
        return gradient * factor if len(passes) > accumulation else gradient

    model.gpt.decoder.final_layernorm.weight.register_hook(spoil)
    with pytest.raises(SpesError, match=r"^node 0, step 2: the gradient's norm is "):
        NodeRun(recipe, trainer, model, source, None, None, saver).run(Position(0, 0, samples=0))
    assert saver.steps == [1]
