"""Builds Megatron-Core's GPTModel from a recipe."""

from collections.abc import Iterable

import torch
from megatron.core.models.gpt import GPTModel

from spes_mega.errors import RecipeError
from spes_mega.model.config import rope_settings, transformer_config, use_transformer_engine
from spes_mega.model.layer_specs import block_spec
from spes_mega.model.megatron_patches import compute_logits_by_sample, forget_router_losses, stay_on_cpu
from spes_mega.model.parallel import ensure_parallel_state
from spes_mega.recipe import ModelSection, Recipe


def build(recipe: Recipe, owned: Iterable[int] | None = None, device: torch.device | str | None = None) -> GPTModel:
    """Build the recipe's model, dense or Mixture-of-Experts, with experts partitioned by ownership.

    Parameters are in `train.dtype`, those of frozen experts in the recipe's `frozen_dtype`, on `device` (default: the
    current CUDA device where there is one, else the CPU). None has its values yet: each is filled with NaN until
    `load_weights` fills it, so that no forgotten weight can pass for a trained one. On the device `meta` nothing is
    allocated.

    Args:
        recipe: model, and of `train` the dtype and the coefficients of the router's losses.
        owned: global numbers of the experts to train in every MoE layer; None: all of them.

    Raises:
        RecipeError: an owned expert does not exist, or the model asks for what is not supported; names the field.
    """
    ensure_parallel_state()
    model = recipe.model
    device = _device(device)
    te = use_transformer_engine(model, device)
    config = transformer_config(recipe, device=device, te=te)
    with device:
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, recipe, _checked(model, owned), te=te),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_seq_len,
            **rope_settings(model),
            share_embeddings_and_output_weights=model.tie_embeddings,
        )
    compute_logits_by_sample(gpt)
    gpt.to(device=device)  # routers ignore it
    _convert_trained(gpt, config.params_dtype)
    _poison(gpt)
    if device.type == "cpu":
        stay_on_cpu(gpt)
    forget_router_losses()
    return gpt


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _checked(model: ModelSection, owned: Iterable[int] | None) -> frozenset[int]:
    experts = frozenset(range(model.num_experts))
    chosen = experts if owned is None else frozenset(owned)
    if unknown := sorted(chosen - experts):
        raise RecipeError(f"owned experts: there is no expert {unknown[0]} (model.num_experts {model.num_experts})")
    return chosen


def _convert_trained(gpt: GPTModel, dtype: torch.dtype) -> None:
    for parameter in gpt.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:  # torch's own norms ignore Megatron's params_dtype
            parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def _poison(gpt: GPTModel) -> None:
    for parameter in gpt.parameters():
        parameter.fill_(float("nan"))
