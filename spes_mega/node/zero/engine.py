"""The DeepSpeed engine of a node: optimizer, ZeRO, precision, clipping."""

import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spes_mega.errors import RecipeError
from spes_mega.model.megatron_patches import without_compiling
from spes_mega.node.zero.deepspeed_patches import async_io_is_usable, tune
from spes_mega.recipe import Recipe, TrainSection
from spes_mega.recipe.deepspeed_config import PIECE_ELEMENTS, PIECE_ELEMENTS_CPU, check_readable, deepspeed_config


def _new(parameter: nn.Parameter) -> int:
    return 0


def create_engine(recipe: Recipe, gpt: nn.Module, age: Callable[[nn.Parameter], int] = _new) -> Any:
    """A DeepSpeedEngine for a model whose frozen parameters have requires_grad False.

    `age` says how often Adam has updated a parameter before, for `moments.assign_moments`.

    Raises:
        RecipeError: the recipe's deepspeed section contradicts what is set here, or cannot be had; names the key.
    """
    import deepspeed

    groups = parameter_groups(gpt.parameters(), recipe.train, age)
    on_cpu = next(gpt.parameters()).device.type == "cpu"
    optimizer = torch.optim.AdamW(
        in_pieces(groups, PIECE_ELEMENTS_CPU if on_cpu else PIECE_ELEMENTS),
        lr=recipe.train.lr,
        betas=(recipe.train.adam_beta1, recipe.train.adam_beta2),
        eps=recipe.train.adam_eps,
        fused=True,
    )
    config = deepspeed_config(recipe, dist.get_world_size())
    check_readable(config)
    _check_nvme(config["zero_optimization"])
    # Some of its optimizers print the memory in use at every step of their making.
    with without_compiling(), redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config, dist_init_required=False)
    tune(engine.optimizer)
    return engine


def parameter_groups(
    parameters: Iterable[nn.Parameter], train: TrainSection, age: Callable[[nn.Parameter], int] = _new
) -> list[dict[str, Any]]:
    """Trainable parameters in groups: those that decay, and those that do not (norms and biases, unless decay_norms).

    Each in one group an age, oldest first, because ZeRO keeps one step count a group.
    """
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault((train.decay_norms or parameter.ndim > 1, age(parameter)), []).append(parameter)
    return [
        {"params": groups[key], "weight_decay": train.weight_decay if key[0] else 0.0}
        for key in sorted(groups, reverse=True)
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


def _check_nvme(zero: dict[str, Any]) -> None:
    sections = [key for key in ("offload_optimizer", "offload_param") if (zero.get(key) or {}).get("device") == "nvme"]
    if sections and not async_io_is_usable():
        raise RecipeError(
            f"deepspeed.zero_optimization.{sections[0]}.device is nvme: DeepSpeed's async_io cannot be built on this "
            "machine, which needs a compiler and libaio with its headers (`ds_report` says more): install them, or set "
            "device to cpu"
        )
