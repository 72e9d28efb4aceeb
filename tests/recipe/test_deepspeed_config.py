"""What a recipe makes of DeepSpeed's config, and what it refuses."""

import datetime

import pytest
from pydantic import ValidationError

from spes_mega.errors import RecipeError
from spes_mega.recipe import Recipe
from spes_mega.recipe.deepspeed_config import check_readable, deepspeed_config

MODEL = {
    "family": "llama", "num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8,
    "ffn_hidden_size": 8, "vocab_size": 8,
}  # fmt: skip


def config_of(deepspeed=None, *, ranks=2, **train):
    recipe = Recipe.model_validate({"model": MODEL, "train": train, "deepspeed": deepspeed or {}})
    return deepspeed_config(recipe, ranks)


def offloading(**options):
    return {"zero_optimization": {"offload_optimizer": options}}


def test_the_train_section_sets_the_config():
    config = config_of(micro_batch_size=3, grad_accumulation=2, clip_grad=0.5, zero_stage=2, dtype="bf16")
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"]["stage"] == 2
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)


def test_bf16_gradients_are_summed_in_fp32_unless_the_recipe_says_otherwise():
    assert config_of(dtype="bf16", grad_accumulation=4)["data_types"] == {"grad_accum_dtype": "fp32"}
    own = {"data_types": {"grad_accum_dtype": "bf16"}}
    assert config_of(own, dtype="bf16", grad_accumulation=4)["data_types"] == {"grad_accum_dtype": "bf16"}
    assert "data_types" not in config_of(dtype="bf16") | config_of(dtype="fp32", grad_accumulation=4)


def test_other_keys_pass_through_at_every_depth():
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 7}, "comms_logger": {}}
    config = config_of(extra, zero_stage=3)
    assert config["zero_optimization"] == {
        "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 7, "sub_group_size": 32 << 20, "stage": 3
    }  # fmt: skip
    assert config["comms_logger"] == {}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_without_others_has_its_gradients_copied_only_where_the_recipe_says_so(stage):
    def contiguous(**options):
        return config_of({"zero_optimization": options}, zero_stage=stage, **ranks)["zero_optimization"].get(
            "contiguous_gradients"
        )

    ranks = {"ranks": 2}
    assert contiguous() is None
    ranks = {"ranks": 1}
    assert contiguous() is (False if stage < 3 else None)
    assert contiguous(contiguous_gradients=True) is True
    assert contiguous(offload_optimizer={"device": "cpu"}) is None


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"zero_optimization": {"stage": 0}}, r"deepspeed\.zero_optimization\.stage is 0, but .* makes it 1"),
        ({"bf16": {"enabled": False}}, r"deepspeed\.bf16\.enabled is False, but .* makes it True"),
        ({"gradient_clipping": 3.0}, r"deepspeed\.gradient_clipping is 3\.0, but .* makes it 1\.0: remove it"),
        ({"train_micro_batch_size_per_gpu": 3}, r"deepspeed\.train_micro_batch_size_per_gpu is 3"),
        ({"gradient_accumulation_steps": 3}, r"deepspeed\.gradient_accumulation_steps is 3"),
        ({"fp16": {"enabled": True}}, r"deepspeed\.fp16\.enabled is True, but .* makes it False"),
        ({"zero_force_ds_cpu_optimizer": True}, r"deepspeed\.zero_force_ds_cpu_optimizer is True"),
        ({"optimizer": {"type": "Lion"}}, r"deepspeed\.optimizer: cannot be set here; use train\.lr"),
        ({"scheduler": {}}, r"deepspeed\.scheduler"),
        ({"train_batch_size": 8}, r"deepspeed\.train_batch_size: cannot be set here; use train\.batch_size"),
        ({"amp": {"enabled": True}}, r"deepspeed\.amp: cannot be set here; use train\.dtype"),
        (
            offloading(device="cpu", ratio=0.5),
            r"deepspeed\.zero_optimization\.offload_optimizer\.ratio is 0\.5.*: remove it",
        ),
        (
            offloading(device="nvme", nvme_path="/x"),
            r"offload_optimizer\.device is nvme: in ZeRO-1 .*zero_stage to 3, or",
        ),
        ({"zero_optimization": {"offload_optimizer": True}}, r"offload_optimizer: expected a mapping such as"),
        ({"zero_optimization": {"cpu_offload": True}}, r"deepspeed\.zero_optimization\.cpu_offload cannot be set"),
        ({"torch_autocast": {"enabled": True}}, r"deepspeed\.torch_autocast\.enabled cannot be set: use train\.dtype"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, r"bf16_master_weights_and_grads cannot be set"),
        ({"zero_optimization": {"round_robin_gradients": True}}, r"round_robin_gradients cannot be set: with several"),
        ({"zero_optimization": {"compute_grad_norm": False}}, r"zero_optimization\.compute_grad_norm cannot be false"),
        ({"torch_autocast": 3}, r"deepspeed\.torch_autocast: expected a mapping, got 3"),
        ({"data_types": "bf16"}, r"deepspeed\.data_types: expected a mapping, got 'bf16'"),
        ({"data_types": None}, r"deepspeed\.data_types: expected a mapping, got None"),
        ({"data_types": {"grad_accum_dtype": 5}}, r"deepspeed\.data_types\.grad_accum_dtype is 5: fp32, bf16 or fp16"),
        ({"steps_per_print": 0}, r"deepspeed\.steps_per_print is 0: a whole number above 0"),
        ({"steps_per_print": "abc"}, r"deepspeed\.steps_per_print is 'abc'"),
        ({"zero_optimization": 3}, r"deepspeed\.zero_optimization: expected a mapping"),
    ],
)
def test_a_contradiction_is_refused_by_name(extra, key):
    with pytest.raises(RecipeError, match=key):
        config_of(extra)
    assert config_of({"zero_optimization": {"stage": 1}})["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ({"a": datetime.date(2026, 1, 1)}, r"datetime\.date\(2026, 1, 1\)"),
        ({"a": [{1}]}, r"\{1\}"),
        ({"a": {1: 2}}, r"\{1: 2\}"),
        ({"a": float("nan")}, "nan"),
        ({"zero_optimization": {"reduce_bucket_size": "1e400"}}, "inf"),
    ],
)
def test_values_that_json_lacks_are_refused(section, value):
    with pytest.raises(ValidationError, match=f"{value}: JSON has no such value"):
        config_of(section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"nebula": {"enabled": False}}, "DeepSpeed cannot read it: Nebula checkpointing has been removed"),
        ({"elasticity": {}}, "Elastic training has been removed"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "MiCS ZeRO-3 sharding has been removed"),
        ({"checkpoint": {"tag_validation": "foo"}}, "tag_validation"),
        ({"zero_optimization": {"foo": 1}}, r"^deepspeed\.zero_optimization\.foo is 1: Extra inputs"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, r"^deepspeed\.zero_optimization\.reduce_bucket_size is 0"),
        (offloading(device="gpu"), r"^deepspeed\.zero_optimization\.offload_optimizer\.device is 'gpu'"),
    ],
)
def test_what_deepspeed_does_not_take_is_refused(section, message):
    with pytest.raises(RecipeError, match=message):
        check_readable(config_of(section))
    check_readable(config_of({"zero_optimization": {"reduce_bucket_size": 7}}))


def test_numbers_as_json_has_them_are_numbers():
    zero = {"reduce_bucket_size": "5e8", "sub_group_size": "1E+9", "stage3_max_live_parameters": "1.5e-1"}
    extra = {"zero_optimization": zero | {"offload_optimizer": {"device": "cpu", "nvme_path": "e8"}}}
    config = config_of(extra, zero_stage=3)["zero_optimization"]
    assert [config[key] for key in zero] == [5e8, 1e9, 0.15]
    assert config["offload_optimizer"]["nvme_path"] == "e8"


def test_whole_offload_passes_through():
    nvme = offloading(device="nvme", nvme_path="/x")
    for stage, extra in ((1, offloading(device="cpu", ratio=1.0)), (2, offloading(device="none")), (3, nvme)):
        zero = config_of(extra, zero_stage=stage)["zero_optimization"]
        assert zero["offload_optimizer"] == extra["zero_optimization"]["offload_optimizer"]
