"""Two real ranks under the deepspeed launcher, through ZeRO 1-3 in fp32 and bf16: see zero_exactness.py."""

import json
import re
from pathlib import Path

import pytest

from spes_mega.node.launch.command import free_port
from tests.integration.processes import PYTHON, Hub, Process

SCRIPT = Path(__file__).with_name("zero_exactness.py")
CASES = [
    (stage, dtype, frozen_dtype)
    for stage in (1, 2, 3)
    for dtype, frozen_dtype in (("fp32", "bf16"), ("fp32", "train"), ("bf16", "bf16"))
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory, write_recipe):
    folder = tmp_path_factory.mktemp("zero")
    train = {"steps": 2, "lr": 0.0, "dtype": "bf16", "zero_stage": 2, "micro_batch_size": 2, "seq_len": 8}
    recipe = write_recipe(folder, spes={"num_nodes": 2, "sync_every": 1}, train=train)
    hub = Hub(recipe, folder / "hub")
    launcher = ["-m", "deepspeed.launcher.runner", "--quiet", "--num_gpus=2", f"--master_port={free_port()}"]
    process = Process([*PYTHON, *launcher, SCRIPT, recipe, hub.address])
    try:
        process.succeed(240)
    finally:
        process.end()
        hub.end()
    return [json.loads(line) for line in re.findall(r"\{.*?\}+(?=\n|\{\"kind)", process.output)]


def facts(reports, kind, **which):
    """The facts of both ranks."""
    found = [r for r in reports if r["kind"] == kind and which.items() <= r.items()]
    assert sorted(r["rank"] for r in found) == [0, 1]
    return [{key: value for key, value in r.items() if key not in ("kind", "rank", *which)} for r in found]


@pytest.mark.parametrize(("stage", "dtype", "frozen_dtype"), CASES)
def test_weights_are_set_and_read_exactly_with_their_masters(reports, stage, dtype, frozen_dtype):
    for found in facts(reports, "exactness", stage=stage, dtype=dtype, frozen_dtype=frozen_dtype):
        assert len(found) == 6
        assert set(found.values()) == {True}, found


@pytest.mark.parametrize(("stage", "dtype", "frozen_dtype"), CASES)
def test_frozen_experts_stay_bit_equal_and_cost_their_weights_alone(reports, stage, dtype, frozen_dtype):
    for found in facts(reports, "frozen", stage=stage, dtype=dtype, frozen_dtype=frozen_dtype):
        held = found.pop("bytes")
        assert len(found) == 3
        assert set(found.values()) == {True}, found
        assert held["parameters"] == held["parameters_expected"]
        assert held["masters"] == held["masters_expected"]
        assert held["moments"] == 2 * held["masters"]
        assert held["gradients_of_frozen"] == 0


@pytest.mark.parametrize(("stage", "dtype", "tolerance"), [(1, "fp32", 1e-5), (3, "fp32", 1e-5), (1, "bf16", 2e-2)])
def test_accumulation_gives_the_gradients_of_one_large_batch(reports, stage, dtype, tolerance):
    """The tolerance is the order of summation in fp32, and the rounding of bf16 in forward and backward."""
    for found in facts(reports, "accumulation", stage=stage, dtype=dtype):
        assert found["relative_difference"] < tolerance
        assert 0.9 < found["norm_of_matrices"] <= 1.001  # the gradient that was compared is nearly all of it
        assert found["norm_ratio"] == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_routers_losses_are_scaled_right_under_accumulation(reports, stage):
    for found in facts(reports, "router_accumulation", stage=stage):
        assert found["relative_difference"] < 1e-5
        assert found["share_of_router_losses"] > 0.01


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("stage", [1, 3])
def test_recomputing_activations_changes_no_gradient(reports, stage, recompute):
    for found in facts(reports, "recomputed", stage=stage, recompute=recompute):
        assert found["relative_difference"] < 1e-6


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")])
def test_an_optimizer_in_ram_trains_alike_and_takes_new_weights(reports, stage, dtype):
    """ZeRO's CPU offload, by the recipe's deepspeed section, needs nothing compiled with the optimizer given here."""
    for found in facts(reports, "offloaded", stage=stage, dtype=dtype):
        losses = found.pop("losses")
        assert found == {"offloads": True, "none_set": True, "cpu_set": True}
        assert losses["cpu"] == pytest.approx(losses["none"], rel=1e-5 if dtype == "fp32" else 1e-2)
        assert losses["cpu"][2] < losses["cpu"][0] - 0.01  # so that equal losses mean equal updates


def test_after_a_sync_at_lr_0_in_bf16_the_weights_equal_those_of_the_hub(reports):
    for found in facts(reports, "sync"):
        assert found.pop("round") == 1
        assert len(found) == 4
        assert set(found.values()) == {True}, found


def test_an_error_on_one_rank_is_raised_on_all(reports):
    for found in facts(reports, "errors"):
        assert found == {
            "agree_0": "bad data on rank 0 5",
            "agree_1": "bad data on rank 1 5",
            "first": "bad data on rank 0 5",
            "tensor": "bad data on rank 0 5",
            "lead": "bad data on rank 0 5",
            "lead_result": [None, None, 3],
            "first_result": {"rank": 0},
            "tensor_result": [0.0, 1.0],
        }
