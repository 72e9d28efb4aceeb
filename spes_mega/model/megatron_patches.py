"""Everything that patches Megatron-Core or relies on its internals: no other module does.

Written against the releases 0.16.1 to 0.19.0 unless a function names another. Where a patch does not fit the installed
release, an optional one is left out with a line that says so; one that is needed raises IncompatibleError.

Megatron-Core takes a GPU for granted in a few places. `prepare_megatron` closes those gaps on a host without CUDA or
without Transformer Engine. (One more gap, the all-to-all token dispatcher that makes CUDA streams, is avoided by
configuration: see `config.py`.)

Axes: T tokens of a micro-batch, E experts.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from spes_mega.internals import IncompatibleError, Library, optional_patch
from spes_mega.model.rope import apply_rotary

MEGATRON = Library("megatron-core", "0.16.1 to 0.19.0")

# What Megatron says of its optional packages on import, and of its own defaults; none is a fault of the user's.
_EXPECTED_WARNINGS = ("Apex is not installed", "Transformer Engine", "full scope is deprecated")
_LAYER_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_RANDOM = "megatron.core.tensor_parallel.random"
_ROPE_UTILS = "megatron.core.models.common.embeddings.rope_utils"


def prepare_megatron() -> None:
    """Make Megatron-Core importable and usable on this host; may be called any number of times."""
    if not torch.cuda.is_available():
        _answer_current_device_with_cpu()
    with without_expected_warnings(), without_compiling():
        for name in (_LAYER_SPECS, _MOE_UTILS, _RANDOM, _ROPE_UTILS):
            importlib.import_module(name)
    _rotate_by_our_kernel()
    if not torch.cuda.is_available():
        _keep_no_gpu_random_state()
    _define_te_general_gemm()


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


@optional_patch("queries and keys are rotated by its own code, which is slower")
def _rotate_by_our_kernel() -> None:
    MEGATRON.check_reads(MEGATRON.resolve(f"{_ROPE_UTILS}:apply_rotary_pos_emb"), "fused_apply_rotary_pos_emb")
    importlib.import_module(_ROPE_UTILS).fused_apply_rotary_pos_emb = apply_rotary  # type: ignore[attr-defined]


def rotates_by_our_kernel() -> bool:
    """Return whether queries and keys can be rotated by `rope.py`, in place of Megatron-Core's own code."""
    return getattr(importlib.import_module(_ROPE_UTILS), "fused_apply_rotary_pos_emb", None) is apply_rotary


@optional_patch("activations cannot be recomputed (train.recompute) on this host, which has no GPU")
def _keep_no_gpu_random_state() -> None:
    # Activation recomputation saves and restores the random state of the CPU, and of a GPU.
    MEGATRON.check_reads(MEGATRON.resolve(f"{_RANDOM}:_get_all_rng_states"), "_get_cuda_rng_state")
    MEGATRON.check_reads(MEGATRON.resolve(f"{_RANDOM}:_set_all_rng_states"), "_set_cuda_rng_state")
    random = importlib.import_module(_RANDOM)
    random._get_cuda_rng_state, random._set_cuda_rng_state = _no_state, _ignore_state  # type: ignore[attr-defined]


def _no_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _ignore_state(*_: Any, **__: Any) -> None:
    pass


def check_recomputation(device: torch.device) -> None:
    """Raise IncompatibleError if Megatron-Core cannot recompute activations on the device."""
    patched = getattr(importlib.import_module(_RANDOM), "_get_cuda_rng_state", None) is _no_state
    if device.type == "cpu" and not (torch.cuda.is_available() or patched):
        raise MEGATRON.error("without a GPU it cannot recompute activations (set train.recompute to none)")


def _define_te_general_gemm() -> None:
    # Written against 0.16.1: without Transformer Engine it leaves the name undefined, yet the router compares it with
    # None. A release that does not read the name is not changed by it.
    moe_utils = importlib.import_module(_MOE_UTILS)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def stay_on_cpu(gpt: nn.Module) -> None:
    """Keep a model on the CPU: at their first use, routers and rotary embeddings go to the GPU where there is one.

    Raises:
        IncompatibleError: they have other methods for it in the installed release.
    """
    embeddings = "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
    methods = (
        (MEGATRON.resolve("megatron.core.transformer.moe.router:Router"), "gating"),
        (MEGATRON.resolve(embeddings), "get_emb"),
    )
    for kind, method in methods:
        MEGATRON.attribute(kind, method)
    for module in gpt.modules():
        for kind, method in methods:
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


@optional_patch("logits are copied into their order, and their gradient again, which takes memory")
def compute_logits_by_sample(gpt: nn.Module) -> None:
    """Give the output layer its input [S, B, D] as [B, S, D]: it is GPTModel's logits that are large to transpose.

    GPTModel brings them into this order by a copy, and another one of their gradient, which is then none.
    """
    layer = MEGATRON.attribute(gpt, "output_layer")
    MEGATRON.check_parameters(layer.forward, "input_")
    MEGATRON.check_reads(MEGATRON.attribute(type(gpt), "_postprocess"), "output_layer")
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].transpose(0, 1).contiguous(), *inputs[1:]))
    layer.register_forward_hook(lambda _, inputs, output: (output[0].transpose(0, 1), *output[1:]))


def mlp_submodules(layer_spec: Any) -> Any:
    """Return the submodules of a layer spec's MLP: in 0.16 that is a ModuleSpec, in 0.19 a functools.partial."""
    mlp = MEGATRON.attribute(layer_spec.submodules, "mlp")
    if not isinstance(mlp, partial):
        return MEGATRON.attribute(mlp, "submodules")
    if "submodules" not in mlp.keywords:
        raise MEGATRON.error("a layer spec's MLP has no submodules")
    return mlp.keywords["submodules"]


def weigh_balance_loss(router: nn.Module, weights_E: torch.Tensor) -> None:
    """Multiply each expert's term in a router's balance loss by its weight, from the next pass on.

    Raises:
        IncompatibleError: the router has another method for that loss in the installed release.
    """
    plain = MEGATRON.attribute(type(router), "_apply_aux_loss")
    MEGATRON.check_parameters(plain, "self", "probs", "scores_for_aux_loss")

    def weighted(probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        scores_TE = scores_for_aux_loss * weights_E.to(scores_for_aux_loss)
        return plain(router, probs, scores_TE, *rest, **options)  # type: ignore[no-any-return]

    router._apply_aux_loss = weighted  # type: ignore[assignment]


def router_loss_sums() -> dict[str, torch.Tensor]:
    """Return Megatron-Core's own sums of the routers' losses, by name of the loss; zero them in place to take them.

    Raises:
        IncompatibleError: they are kept in another way in the installed release.
    """
    return {name: _values(entry) for name, entry in _tracked_losses().items()}


def forget_router_losses() -> None:
    """Drop those sums: they have the number of layers of the model that ran first in this process."""
    _tracked_losses().clear()


def _tracked_losses() -> dict[str, Any]:
    try:  # 0.18 and later
        tracker = MEGATRON.resolve("megatron.core.transformer.moe.moe_logging:get_moe_metrics_tracker")
    except IncompatibleError:
        return MEGATRON.resolve(f"{_MOE_UTILS}:get_moe_layer_wise_logging_tracker")()  # type: ignore[no-any-return]
    return MEGATRON.attribute(tracker(), "metrics")  # type: ignore[no-any-return]


def _values(entry: Any) -> torch.Tensor:
    if isinstance(entry, dict):
        if "values" not in entry:
            raise MEGATRON.error("its table of the routers' losses has no values")
        return entry["values"]  # type: ignore[no-any-return]
    return MEGATRON.attribute(entry, "values")  # type: ignore[no-any-return]
