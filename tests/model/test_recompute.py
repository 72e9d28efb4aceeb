"""Activation recomputation: less is kept, and nothing else changes."""

import pytest
import torch

from spes_mega.model import (
    forward_logits,
    language_model_loss,
    partitioned_experts,
    take_router_losses,
    tokens_per_expert,
)
from tests.model import tiny

MODELS = {
    "moe": tiny.section("qwen3_moe", num_layers=3, dense_layers=(1,), ffn_hidden_size=40),
    "with a shared expert": tiny.section("qwen2_moe"),
    "outputs normalized": tiny.section("flex_olmo"),
    "dense": tiny.section("qwen3"),
}


def step(model, recompute, zero_stage=1):
    """Loss, gradients, tokens counted, the router's losses, and the bytes that were kept for the backward pass."""
    train = {"recompute": recompute, "zero_stage": zero_stage, "aux_loss_coeff": 0.1, "router_z_loss_coeff": 0.01}
    gpt = tiny.loaded(tiny.recipe(model, **train), tiny.random_weights(model), (2, 3) if model.is_moe else None).train()
    own = {parameter.data_ptr() for parameter in gpt.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    ids = tiny.tokens(model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = language_model_loss(forward_logits(gpt, ids)[:, :-1], ids[:, 1:], 0.0)[0]
    loss.backward()
    gradients = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
    moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    return loss.detach(), gradients, tokens_per_expert(gpt), take_router_losses(moe_layers, 1), sum(kept.values())


# Where three gradients meet, they may be summed in another order: some differ in the last bit of fp32. Those that go
# on through products in bf16 are then rounded to the other neighbour, 2**-8 of an element away.
TOLERANCE = {"products in fp32": 5e-6, "products in bf16": 1e-3}


@pytest.fixture(params=TOLERANCE)
def tolerance(request, monkeypatch):
    """Choose what frozen experts compute in, where the CPU would; return how far gradients may differ."""
    monkeypatch.setattr(partitioned_experts, "bf16_is_fast", lambda device: request.param == "products in bf16")
    return TOLERANCE[request.param]


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_gradients_counts_and_losses_are_the_same_with_and_without(model, recompute, tolerance):
    (loss, gradients, counts, router, kept), (loss_, gradients_, counts_, router_, kept_) = (
        step(model, how) for how in ("none", recompute)
    )
    assert torch.equal(loss, loss_)
    assert gradients.keys() == gradients_.keys()
    for name in gradients:
        assert (gradients[name] - gradients_[name]).norm() <= tolerance * gradients[name].norm(), name
    assert torch.equal(counts, counts_)
    assert router == router_
    if model.is_moe:
        assert counts.sum(1).unique().tolist() == [2 * 33 * model.top_k]
        assert router.balance > 0.9
        assert router.z > 0
    assert kept_ < (0.8 if recompute == "full" else 0.95) * kept


def test_full_keeps_less_than_selective():
    kept = [step(MODELS["moe"], how)[-1] for how in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3
