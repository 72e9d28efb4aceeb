"""The DeepSpeed engine of a node: optimizer, ZeRO, precision, clipping."""

import copy
import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from spes_mega.errors import RecipeError
from spes_mega.model.cpu_support import without_compiling
from spes_mega.recipe import Recipe, TrainSection

# Sections of DeepSpeed's config that would take over what the recipe's train section says.
OWN_SECTIONS = {
    "optimizer": "train.lr, train.adam_*, train.weight_decay",
    "scheduler": "train.lr, train.warmup_steps, train.min_lr_ratio",
    "train_batch_size": "train.micro_batch_size and train.grad_accumulation",
    "amp": "train.dtype",
}

OFFLOAD = "deepspeed.zero_optimization.offload_optimizer"
PIECE_ELEMENTS, PIECE_ELEMENTS_CPU = 32 << 20, 4 << 20
"""What ZeRO works on at a time. On the CPU flat gradients of this size come from memory that has been used before."""


def _new(parameter: nn.Parameter) -> int:
    return 0


def create_engine(recipe: Recipe, gpt: nn.Module, age: Callable[[nn.Parameter], int] = _new) -> Any:
    """A DeepSpeedEngine for a model whose frozen parameters have requires_grad False.

    `age` says how often Adam has updated a parameter before, for `moments.assign_moments`.

    Raises:
        RecipeError: the recipe's deepspeed section contradicts what is set here, or cannot be had; names the key.
    """
    import deepspeed

    groups = parameter_groups(gpt.parameters(), recipe.train.weight_decay, age)
    on_cpu = next(gpt.parameters()).device.type == "cpu"
    optimizer = torch.optim.AdamW(
        in_pieces(groups, PIECE_ELEMENTS_CPU if on_cpu else PIECE_ELEMENTS),
        lr=recipe.train.lr,
        betas=(recipe.train.adam_beta1, recipe.train.adam_beta2),
        eps=recipe.train.adam_eps,
        fused=True,
    )
    config = deepspeed_config(recipe, dist.get_world_size())
    _check_nvme(config["zero_optimization"])
    # Some of its optimizers print the memory in use at every step of their making.
    with without_compiling(), redirect_stdout(io.StringIO()):
        try:
            engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config, dist_init_required=False)
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise RecipeError(f"the recipe's deepspeed section: {where}: {first['msg']}, got {first['input']!r}") from e
    _measure_norms_in_parts(engine.optimizer)
    _share_masters(engine.optimizer)
    if dist.get_world_size() == 1 and hasattr(engine.optimizer, "buffered_reduce_fallback"):
        engine.optimizer.buffered_reduce_fallback = _reduce_nothing
    return engine


def _reduce_nothing(*_: Any, **__: Any) -> None:
    """For a rank without others: stages 1 and 2 would copy all gradients into a buffer and back."""


def _share_masters(zero: Any) -> None:
    """Let weights in fp32 be their own masters, of which stages 1 and 2 keep a copy and copy it back at each step."""
    if not hasattr(zero, "parallel_partitioned_bit16_groups") or zero.cpu_offload or zero.dtype != torch.float32:
        return
    for master, parts in zip(zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True):
        master.data = parts[dist.get_rank()]
    zero._link_all_hp_params()  # by which parameters find their masters


def _measure_norms_in_parts(zero: Any) -> None:
    """Stages 1 and 2 convert a gradient to fp64 for its norm, as a whole: that of an embedding is the step's peak.

    Instead they get fp32 norms of its parts, of which they take the norm.
    """
    if not hasattr(zero, "get_grad_norm_direct"):
        return
    norm = zero.get_grad_norm_direct

    def norm_in_parts(gradients: Any, parameters: Any, **options: Any) -> torch.Tensor:
        own = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        return norm([norms_of_parts(gradient) for gradient in own], parameters, **options)  # type: ignore[no-any-return]

    zero.get_grad_norm_direct = norm_in_parts


def norms_of_parts(gradient: torch.Tensor) -> torch.Tensor:
    """Norms of as many elements as can be added up in fp32, on the CPU one after the other: fp32."""
    parts = gradient.detach().reshape(-1).split(1 << 16 if gradient.device.type == "cpu" else 1 << 20)
    return torch.stack(torch._foreach_norm(parts, dtype=torch.float32))


def parameter_groups(
    parameters: Iterable[nn.Parameter], weight_decay: float, age: Callable[[nn.Parameter], int] = _new
) -> list[dict[str, Any]]:
    """Trainable parameters in groups: matrices, which decay, and norms and biases, which do not.

    Each in one group an age, oldest first, because ZeRO keeps one step count a group.
    """
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault((parameter.ndim > 1, age(parameter)), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": weight_decay if key[0] else 0.0} for key in sorted(groups, reverse=True)
    ]


def in_pieces(groups: Iterable[dict[str, Any]], elements: int) -> list[dict[str, Any]]:
    """The same groups, cut where they have more than `elements` elements.

    ZeRO 1 and 2 take the optimizer's step group by group, and make fp32 gradients of a whole group for it.
    """
    pieces: list[dict[str, Any]] = []
    for group in groups:
        size = elements
        for parameter in group["params"]:
            if size + parameter.numel() > elements:
                pieces.append(group | {"params": []})
                size = 0
            pieces[-1]["params"].append(parameter)
            size += parameter.numel()
    return pieces


def deepspeed_config(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """DeepSpeed's own config for a node of `ranks`: the recipe's deepspeed section, with what the train section says.

    Raises:
        RecipeError: a key of the deepspeed section has another value than the train section gives it, or asks for an
            offload that DeepSpeed does not have for it.
    """
    for key, instead in OWN_SECTIONS.items():
        if key in recipe.deepspeed:
            raise RecipeError(f"deepspeed.{key}: cannot be set here; use {instead}")
    config = _merged(_defaults(recipe.train), recipe.deepspeed)
    _impose(config, _required(recipe.train), "deepspeed")
    zero = config["zero_optimization"]
    _refuse_unfit(config, ranks)
    _check_offload(zero)
    if ranks == 1 and zero["stage"] < 3 and not zero.get("offload_optimizer"):
        # Gradients would be copied for a reduction of which there is none.
        zero.setdefault("contiguous_gradients", False)
    return config


def _refuse_unfit(config: dict[str, Any], ranks: int) -> None:
    """What DeepSpeed has and what would go wrong here, some of it without a word."""
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


def _check_nvme(zero: dict[str, Any]) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[attr-defined]

    sections = [key for key in ("offload_optimizer", "offload_param") if (zero.get(key) or {}).get("device") == "nvme"]
    if sections and not AsyncIOBuilder().is_compatible(verbose=False):
        raise RecipeError(
            f"deepspeed.zero_optimization.{sections[0]}.device is nvme: DeepSpeed's async_io cannot be built on this "
            "machine, which needs a compiler and libaio with its headers (`ds_report` says more): install them, or set "
            "device to cpu"
        )


def _required(train: TrainSection) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": train.grad_accumulation,
        "gradient_clipping": train.clip_grad,
        "bf16": {"enabled": train.dtype == "bf16"},
        "fp16": {"enabled": False},
        "zero_optimization": {"stage": train.zero_stage},
        "zero_allow_untested_optimizer": True,
        # Offloading works with the optimizer given here, too; DeepSpeed's own would be compiled at its first use.
        "zero_force_ds_cpu_optimizer": False,
    }


def _defaults(train: TrainSection) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        # What ZeRO works on at a time; DeepSpeed's own defaults (5e8, 1e9) are made for large GPUs.
        "zero_optimization": {"reduce_bucket_size": PIECE_ELEMENTS, "sub_group_size": PIECE_ELEMENTS},
        "steps_per_print": 1 << 40,
    }
    if train.dtype == "bf16" and train.grad_accumulation > 1:
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
