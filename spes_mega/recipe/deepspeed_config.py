"""DeepSpeed's own config, made of a recipe: what stands in its deepspeed section, checked against its train section."""

import copy
from typing import Any

from pydantic import ValidationError

from spes_mega.errors import RecipeError
from spes_mega.recipe import Recipe, TrainSection

# Sections of DeepSpeed's config that would take over what the recipe's train section says.
OWN_SECTIONS = {
    "optimizer": "train.lr, train.adam_*, train.weight_decay",
    "scheduler": "train.lr, train.warmup_steps, train.min_lr_ratio",
    "train_batch_size": "train.batch_size",
    "amp": "train.dtype",
}

OFFLOAD = "deepspeed.zero_optimization.offload_optimizer"
PIECE_ELEMENTS, PIECE_ELEMENTS_CPU = 32 << 20, 4 << 20
"""What ZeRO works on at a time. On the CPU flat gradients of this size come from memory that has been used before."""


def deepspeed_config(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """DeepSpeed's own config for a node of `ranks`: the recipe's deepspeed section, with what the train section says.

    Raises:
        RecipeError: a key of the deepspeed section has another value than the train section gives it, or asks for an
            offload that DeepSpeed does not have for it.
    """
    for key, instead in OWN_SECTIONS.items():
        if key in recipe.deepspeed:
            raise RecipeError(f"deepspeed.{key}: cannot be set here; use {instead}")
    config = _merged(_defaults(recipe.train, ranks), recipe.deepspeed)
    _impose(config, _required(recipe.train, ranks), "deepspeed")
    zero = config["zero_optimization"]
    _refuse_unfit(config, ranks)
    _check_offload(zero)
    if ranks == 1 and zero["stage"] < 3 and not zero.get("offload_optimizer"):
        # Gradients would be copied for a reduction of which there is none.
        zero.setdefault("contiguous_gradients", False)
    return config


def _refuse_unfit(config: dict[str, Any], ranks: int) -> None:
    """What DeepSpeed has and what would go wrong here, some of it without a word."""
    for section in ("torch_autocast", "data_types"):
        if not isinstance(config.get(section, {}), dict):
            raise RecipeError(f"deepspeed.{section}: expected a mapping, got {config[section]!r}")
    steps, sums = config["steps_per_print"], config.get("data_types", {}).get("grad_accum_dtype")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise RecipeError(f"deepspeed.steps_per_print is {steps!r}: a whole number above 0 was expected")
    if sums not in (None, "fp32", "fp16", "bf16"):
        raise RecipeError(f"deepspeed.data_types.grad_accum_dtype is {sums!r}: fp32, bf16 or fp16 was expected")
    if not config["zero_optimization"].get("compute_grad_norm", True):
        raise RecipeError("deepspeed.zero_optimization.compute_grad_norm cannot be false: each step's norm is checked")
    unfit = [
        ("zero_optimization", "cpu_offload", "DeepSpeed gave it up: use offload_optimizer"),
        ("bf16", "bf16_master_weights_and_grads", "the optimizer used here keeps fp32 masters"),
        ("torch_autocast", "enabled", "use train.dtype"),
    ]
    if ranks > 1:
        unfit.append(("zero_optimization", "round_robin_gradients", "with several ranks weights and masters differ"))
    for section, key, reason in unfit:
        if (config.get(section) or {}).get(key):
            raise RecipeError(f"deepspeed.{section}.{key} cannot be set: {reason}")


def _check_offload(zero: dict[str, Any]) -> None:
    offload = zero.get("offload_optimizer") or {}
    if not isinstance(offload, dict):
        raise RecipeError(f"{OFFLOAD}: expected a mapping such as {{device: cpu}}, got {offload!r}")
    if offload.get("ratio", 1) != 1:
        raise RecipeError(
            f"{OFFLOAD}.ratio is {offload['ratio']!r}: the optimizer used here is offloaded as a whole or not at all: "
            "remove it"
        )
    if offload.get("device") == "nvme" and zero["stage"] < 3:
        raise RecipeError(
            f"{OFFLOAD}.device is nvme: in ZeRO-{zero['stage']} DeepSpeed would leave the optimizer where it is: set "
            "train.zero_stage to 3, or device to cpu"
        )


def check_readable(config: dict[str, Any]) -> None:
    """Raises RecipeError: DeepSpeed does not know a key, has removed it, or cannot read a value."""
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        deepspeed.DeepSpeedConfig(copy.deepcopy(config))
    except ValidationError as e:
        fault = e.errors()[0]
        raise RecipeError(f"{_place(config, fault['loc'], fault['input'])}: {fault['msg']}") from e
    # what its other checks, and places without one, raise
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, AssertionError) as e:
        raise RecipeError(f"the recipe's deepspeed section: DeepSpeed cannot read it: {e}") from e


def _place(config: dict[str, Any], loc: tuple[int | str, ...], value: Any) -> str:
    """The key and value of which DeepSpeed tells only the part inside a section."""
    for section, inner in config.items():
        for part in loc:
            inner = inner.get(part, ...) if isinstance(inner, dict) else ...
        if loc and inner == value:
            return f"{'.'.join(map(str, ('deepspeed', section, *loc)))} is {value!r}"
    return "the recipe's deepspeed section"


def _required(train: TrainSection, ranks: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.accumulation(ranks),
        "gradient_clipping": train.clip_grad,
        "bf16": {"enabled": train.dtype == "bf16"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": train.zero_stage},
        "zero_allow_untested_optimizer": True,
        # Offloading works with the optimizer given here, too; DeepSpeed's own would be compiled at its first use.
        "zero_force_ds_cpu_optimizer": False,
    }


def _defaults(train: TrainSection, ranks: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        # What ZeRO works on at a time; DeepSpeed's own defaults (5e8, 1e9) are made for large GPUs.
        "zero_optimization": {"reduce_bucket_size": PIECE_ELEMENTS, "sub_group_size": PIECE_ELEMENTS},
        "steps_per_print": 1 << 40,
    }
    if train.dtype == "bf16" and train.accumulation(ranks) > 1:
        # summed in bf16, small gradients of later micro-batches would be lost
        defaults["data_types"] = {"grad_accum_dtype": "fp32"}
    return defaults


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _impose(config: dict[str, Any], required: dict[str, Any], path: str) -> None:
    for key, value in required.items():
        if isinstance(value, dict):
            section = config.setdefault(key, {})
            if not isinstance(section, dict):
                raise RecipeError(f"{path}.{key}: expected a mapping, got {section!r}")
            _impose(section, value, f"{path}.{key}")
        elif key in config and config[key] != value:
            raise RecipeError(f"{path}.{key} is {config[key]!r}, but the train section makes it {value!r}: remove it")
        else:
            config[key] = value
