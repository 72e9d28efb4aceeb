"""Each patch of DeepSpeed on a release that is not as it was written for: left out, or refused by name."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from spes_mega import internals
from spes_mega.internals import IncompatibleError
from spes_mega.model import ensure_parallel_state
from spes_mega.node.zero import deepspeed_patches
from spes_mega.node.zero.deepspeed_patches import FlatGroups, Place, default_timeout, release, tune


@pytest.fixture(autouse=True)
def one_rank():
    ensure_parallel_state()
    internals._say_once.cache_clear()


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "spes_mega"]


def stage_2(**changes):
    """What the patches rely on in the optimizer of stages 1 and 2; everything that is not here fails."""
    zero = object.__new__(DeepSpeedZeroOptimizer)
    weights = torch.arange(4.0)
    attributes = {
        "cpu_offload": False,
        "dtype": torch.float32,
        "parallel_partitioned_bit16_groups": [[weights]],
        "single_partition_of_fp32_groups": [weights.clone()],
        "_link_all_hp_params": lambda: linked.append(True),
        "linked": (linked := []),
    }
    vars(zero).update(attributes | changes)
    return zero


def shares(zero):
    (master,), ((part,),) = zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups
    return master.data_ptr() == part.data_ptr()


def test_all_patches_fit_the_installed_release(caplog):
    zero = stage_2()
    tune(zero)
    deepspeed_patches.leave_out_shared_memory_comm()
    assert shares(zero)
    assert zero.linked == [True]
    assert zero.buffered_reduce_fallback(None, [], torch.float32) is None
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    assert default_timeout() == deepspeed.constants.default_pg_timeout
    assert said(caplog) == []


def test_other_optimizers_are_left_as_they_are():
    zero = SimpleNamespace(get_grad_norm_direct=len)
    tune(zero)
    assert vars(zero) == {"get_grad_norm_direct": len}


def test_norms_are_measured_in_parts_and_padding_is_left_out():
    seen = []
    zero = stage_2(get_grad_norm_direct=lambda gradients, params, norm_type=2: seen.extend(gradients))
    padding = torch.zeros(3)
    padding._zero_padding = True
    tune(zero)
    zero.get_grad_norm_direct([torch.full((2, 1 << 16), 3.0), padding], [], norm_type=2)
    assert [norms.tolist() for norms in seen] == [[3 * 256.0, 3 * 256.0]]


@pytest.mark.parametrize(
    ("changes", "told", "kept"),
    [
        ({"get_grad_norm_direct": (norm := lambda grads, norm_type=2: 1.0)}, "takes (grads, norm_type)", "norm"),
        ({"_link_all_hp_params": None}, "has no attribute _link_all_hp_params", "masters"),
        ({"single_partition_of_fp32_groups": [torch.zeros(5)]}, "masters have other shapes", "masters"),
        ({"buffered_reduce_fallback": None}, "has no attribute buffered_reduce_fallback", "reduction"),
    ],
)
def test_a_patch_that_does_not_fit_leaves_the_optimizer_as_it_is(monkeypatch, caplog, changes, told, kept):
    zero = stage_2(**changes)
    for name in [name for name, value in changes.items() if value is None]:
        vars(zero).pop(name, None)
        monkeypatch.delattr(DeepSpeedZeroOptimizer, name)
    tune(zero)
    (line,) = said(caplog)
    assert told in line
    assert shares(zero) == (kept != "masters")
    assert (vars(zero).get("get_grad_norm_direct") is norm) == (kept == "norm")
    assert ("buffered_reduce_fallback" in vars(zero)) == (kept != "reduction")


@pytest.mark.parametrize("changes", [{"cpu_offload": True}, {"dtype": torch.bfloat16}])
def test_masters_on_another_device_or_of_another_dtype_are_kept(caplog, changes):
    zero = stage_2(**changes)
    tune(zero)
    assert not shares(zero)
    assert said(caplog) == []


def test_without_the_optimizers_class_nothing_is_tuned(monkeypatch, caplog):
    zero = stage_2()
    monkeypatch.delattr("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer")
    tune(zero)
    assert not shares(zero)
    assert "has no attribute DeepSpeedZeroOptimizer" in said(caplog)[0]


def test_a_list_of_operations_of_another_kind_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", ("deepspeed_shm_comm",))
    assert deepspeed_patches.leave_out_shared_memory_comm() is False
    assert "__compatible_ops__ is not a dict" in said(caplog)[0]


def test_where_deepspeed_does_not_say_its_timeout_it_is_torchs(monkeypatch):
    monkeypatch.delattr(deepspeed.constants, "default_pg_timeout")
    assert default_timeout() is None


def test_where_async_io_cannot_be_asked_deepspeed_decides(monkeypatch):
    asked = []

    class Builder:
        def is_compatible(self, verbose=True):
            asked.append(verbose)
            return False

    monkeypatch.setattr("deepspeed.ops.op_builder.AsyncIOBuilder", Builder)
    assert deepspeed_patches.async_io_is_usable() is False
    assert asked == [False]
    monkeypatch.delattr(Builder, "is_compatible")
    assert deepspeed_patches.async_io_is_usable() is True


@pytest.fixture
def flat():
    """An optimizer over one flat tensor, and a parameter of which elements 2 to 5 are its elements 6 to 9."""
    tensor, parameter = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(2, 3))
    there, here = SimpleNamespace(start=6, numel=4), SimpleNamespace(start=2, numel=4)
    parameter._hp_mapping = SimpleNamespace(hp_fragment_address=there, lp_fragment_address=here)
    optimizer = torch.optim.AdamW([tensor])
    return SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer, bit16_groups=[[parameter]])), parameter


def test_a_parameter_is_found_where_deepspeed_has_put_it(flat):
    engine, parameter = flat
    groups = FlatGroups(engine)
    (tensor,) = groups.optimizer.param_groups[0]["params"]
    place = groups.place(parameter)
    assert (place.flat is tensor, place.offset, place.start, place.count) == (True, 6, 2, 4)
    parameter._hp_mapping = None
    assert groups.place(parameter) == Place(tensor, 0, 0, 0)


@pytest.mark.parametrize("attribute", ["hp_fragment_address", "lp_fragment_address"])
def test_an_address_that_is_not_kept_is_refused_by_name(flat, attribute):
    engine, parameter = flat
    delattr(parameter._hp_mapping, attribute)
    with pytest.raises(IncompatibleError, match=f"deepspeed .*: SimpleNamespace has no attribute {attribute}"):
        FlatGroups(engine).place(parameter)


def test_a_parameter_that_is_in_no_group_is_refused(flat):
    engine, _ = flat
    with pytest.raises(IncompatibleError, match="its optimizer keeps parameters in another way"):
        FlatGroups(engine).place(nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("rank", [0, 1])
def test_in_stage_3_each_rank_has_an_equal_part_and_the_last_is_padded(monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    tensor, parameter = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(0))
    parameter.ds_id, parameter.ds_numel = 7, 5
    zero = SimpleNamespace(
        optimizer=torch.optim.AdamW([tensor]),
        grad_position={7: (0, 4, 3)},
        get_param_id=lambda parameter: parameter.ds_id,
        fp32_partitioned_groups_flat=[tensor],
    )
    place = FlatGroups(SimpleNamespace(optimizer=zero)).place(parameter)
    assert (place.flat is tensor, place.offset, place.start, place.count) == (True, 4, (0, 3)[rank], (3, 2)[rank])
    del zero.grad_position
    with pytest.raises(IncompatibleError, match="has no attribute grad_position"):
        FlatGroups(SimpleNamespace(optimizer=zero)).place(parameter)


def test_a_released_engine_holds_no_tensor(flat):
    engine, parameter = flat
    zero, optimizer = engine.optimizer, engine.optimizer.optimizer
    engine.destroy = lambda: None
    release(engine, [parameter])
    assert (vars(zero), optimizer.param_groups, engine.optimizer) == ({}, [], None)
    assert (parameter.numel(), vars(parameter)) == (0, {})
