"""What Megatron-Core lacks on a host without CUDA, or without Transformer Engine.

The megatron-core releases 0.16.1 to 0.19.x take a GPU for granted in a few places. `prepare_megatron` closes
those gaps, and has queries and keys rotated by `rope.py`. (The third gap, the all-to-all token
dispatcher that makes CUDA streams, is avoided by configuration: see `config.py`.) `stay_on_cpu` is for models that are
wanted on the CPU of a host with CUDA.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from spes_mega.model.rope import apply_rotary

# What Megatron says of its optional packages on import, and of its own defaults; none is a fault of the user's.
_EXPECTED_WARNINGS = ("Apex is not installed", "Transformer Engine", "full scope is deprecated")


def prepare_megatron() -> None:
    """Make Megatron-Core importable and usable on this host; may be called any number of times."""
    if not torch.cuda.is_available():
        _answer_current_device_with_cpu()
    with without_expected_warnings(), without_compiling():
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        random = importlib.import_module("megatron.core.tensor_parallel.random")
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        rope_utils = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    rope_utils.fused_apply_rotary_pos_emb = apply_rotary  # type: ignore[attr-defined]
    if not torch.cuda.is_available():
        _keep_no_gpu_random_state(random)
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without Transformer Engine 0.16.1 leaves the name undefined, yet the router compares it with None.
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


@contextmanager
def without_expected_warnings() -> Iterator[None]:
    """Keep a node's console free of warnings that its user can do nothing about."""
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=f".*{message}")
        yield


@contextmanager
def without_compiling() -> Iterator[None]:
    """Without CUDA, leave functions that are decorated to be compiled (by torch.compile) as they are.

    Decorating them already loads Inductor, which takes seconds in every process, and calling one needs a compiler.
    """
    original = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _leave_as_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def _leave_as_is(function: Any = None, **options: Any) -> Any:
    return _leave_as_is if function is None else function


def _cpu() -> torch.device:
    return torch.device("cpu")


def _answer_current_device_with_cpu() -> None:
    # Megatron-Core allocates on, and moves router weights to, whatever torch.cuda.current_device() answers.
    torch.cuda.current_device = _cpu  # type: ignore[assignment]


def stay_on_cpu(gpt: nn.Module) -> None:
    """Keep a model on the CPU: at their first use, routers and rotary embeddings go to the GPU where there is one."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.moe.router import Router

    for module in gpt.modules():
        for kind, method in ((Router, "gating"), (RotaryEmbedding, "get_emb")):
            if isinstance(module, kind):
                setattr(module, method, _on_cpu(getattr(module, method)))


def _on_cpu(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def answered(*arguments: Any, **options: Any) -> torch.Tensor:
        original, torch.cuda.current_device = torch.cuda.current_device, _cpu  # type: ignore[assignment]
        try:
            return method(*arguments, **options)
        finally:
            torch.cuda.current_device = original

    return answered


def _keep_no_gpu_random_state(random: Any) -> None:
    # Activation recomputation saves and restores the random state of the CPU, and of a GPU.
    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_state(*_: Any, **__: Any) -> None:
        pass

    random._get_cuda_rng_state, random._set_cuda_rng_state = get_state, set_state
