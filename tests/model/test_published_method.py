"""What one optimizer step minimizes, with the recipes' settings, against transformers' models and loss functions.

    python -m pytest tests/model/test_published_method.py

Axes: T tokens, E experts.
"""

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_utils import PreTrainedModel

from spes_mega.layout import make_config
from spes_mega.layout.names import expected_tensors
from spes_mega.model import WeightMap, forward_logits, language_model_loss, take_router_losses
from spes_mega.recipe import MOE_FAMILIES, load_recipe
from tests.model import tiny

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {"olmoe": "study-1b", "qwen3_moe": "9b"}


def losses_of_transformers(hf: PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Without coefficients; `balance` is transformers' own function on one layer at a time, `router_z` a list."""
    logits_TE = []
    for layer in hf.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, args, output: logits_TE.append(output[0]))
    logits = hf(ids[:, :-1]).logits
    balance = importlib.import_module(type(hf).__module__).load_balancing_loss_func
    config = hf.config
    top_k, experts = config.num_experts_per_tok, logits_TE[0].shape[-1]
    return {
        "logits": logits,
        "lm": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()),
        "logit_z": logits.logsumexp(-1).square().mean(),
        # it counts a token once for each of its experts
        "balance": torch.stack([balance((layer,), experts, top_k) / top_k for layer in logits_TE]),
        "router_z": torch.stack([layer.logsumexp(-1).square().mean() for layer in logits_TE]),
    }


def gradients_of_transformers(hf, model, folder):
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(parameter.grad)
    return tiny.saved_weights(hf, model, folder)  # transformers' own code sorts gradients by name


def assert_same_gradients(gpt, model, theirs, tolerance):
    for entry in WeightMap(model, gpt).entries:
        for name, gradient in entry.split(entry.parameter.grad).items():
            scale = theirs[name].abs().max().item()
            assert (gradient - theirs[name]).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", RECIPES)
def test_forward_losses_and_gradients_are_those_of_transformers(family, num_layers, tmp_path):
    published = load_recipe(CONFIGS / f"{RECIPES[family]}.yaml")
    keep = ("norm_topk_prob", "rope_theta", "norm_eps", "tie_embeddings")
    model = tiny.section(family, num_layers=num_layers, **{name: getattr(published.model, name) for name in keep})
    coefficients = {
        name: getattr(published.train, name) for name in ("aux_loss_coeff", "router_z_loss_coeff", "logit_z_loss_coeff")
    }
    hf = tiny.transformers_model(model).train()
    gpt = tiny.loaded(tiny.recipe(model, **coefficients), tiny.saved_weights(hf, model, tmp_path / "weights")).train()
    ids = tiny.tokens(model)

    logits = forward_logits(gpt, ids[:, :-1])
    lm_loss, logit_z = language_model_loss(logits, ids[:, 1:], coefficients["logit_z_loss_coeff"])
    (lm_loss + logit_z).backward()
    router = take_router_losses(num_layers, num_forwards=1)

    theirs = losses_of_transformers(hf, ids)
    assert theirs["logits"].std() > 0.5
    torch.testing.assert_close(logits, theirs["logits"], atol=1e-5 * theirs["logits"].abs().max().item(), rtol=0)
    assert lm_loss.item() == pytest.approx(theirs["lm"].item(), rel=1e-5)
    assert logit_z.item() == pytest.approx(1e-5 * theirs["logit_z"].item(), rel=1e-5)
    assert router.balance == pytest.approx(theirs["balance"].mean().item(), rel=1e-5)
    assert router.z == pytest.approx(theirs["router_z"].mean().item(), rel=1e-5)

    balance = coefficients["aux_loss_coeff"] * theirs["balance"].mean()  # a mean over layers
    router_z = coefficients["router_z_loss_coeff"] * theirs["router_z"].sum()  # a sum
    (theirs["lm"] + 1e-5 * theirs["logit_z"] + balance + router_z).backward()
    assert_same_gradients(gpt, model, gradients_of_transformers(hf, model, tmp_path / "gradients"), tolerance=1e-5)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_balance_loss_is_the_mean_over_layers_of_the_familys_own(family, tmp_path):
    """By far the largest loss here, so that nothing else can hide it."""
    model = tiny.section(family, num_layers=3)
    hf = tiny.transformers_model(model).train()
    recipe = tiny.recipe(model, aux_loss_coeff=100.0, router_z_loss_coeff=0.0)
    gpt = tiny.loaded(recipe, tiny.saved_weights(hf, model, tmp_path / "weights")).train()
    ids = tiny.tokens(model)
    (0 * forward_logits(gpt, ids[:, :-1]).sum()).backward()
    theirs = losses_of_transformers(hf, ids)["balance"]
    assert take_router_losses(3, num_forwards=1).balance == pytest.approx(theirs.mean().item(), rel=1e-5)
    assert theirs.mean() > 1.01
    (100.0 * theirs.mean()).backward()
    for layer, block in enumerate(gpt.decoder.layers):
        gradient = hf.model.layers[layer].mlp.gate.weight.grad
        assert gradient.abs().max() > 0.1
        torch.testing.assert_close(
            block.mlp.router.weight.grad, gradient, atol=1e-5 * gradient.abs().max().item(), rtol=1e-4
        )


# config.json of the released SPES-7B, as far as it says what a model computes.
SPES_7B = {
    "model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 32, "intermediate_size": 2048, "num_experts_per_tok": 4,
    "norm_topk_prob": False, "rope_theta": 32_000, "max_position_embeddings": 2048, "vocab_size": 151_665,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def test_the_7b_recipe_is_the_released_model():
    from transformers import AutoConfig, AutoModelForCausalLM

    model = load_recipe(CONFIGS / "7b.yaml").model
    config = make_config(model, None, torch.bfloat16)
    assert {key: config.get(key) for key in SPES_7B} == SPES_7B
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SPES_7B))
    shapes = {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    ours = expected_tensors(model)
    experts = {name for name in ours if ".mlp.experts." in name}
    assert {name: tuple(shape) for name, shape in ours.items() if name not in experts} == {
        name: shape for name, shape in shapes.items() if ".mlp.experts." not in name
    }
    # transformers stacks a layer's experts in memory: gate and up projections in one tensor, down projections in one
    numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == numbers
    assert {tuple(ours[name]) for name in experts} == {(2048, 2048)}
    assert len(experts) == 16 * 32 * 3
