import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import (
    forward_logits,
    language_model_loss,
    loss,
    set_router_loss_scale,
    take_router_losses,
    weigh_owned_experts,
)
from tests.model import tiny

MODEL = tiny.section("qwen3_moe", num_experts=4)


def test_language_model_loss_is_cross_entropy_and_squared_logsumexp():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    labels = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    lm_loss, z_loss = language_model_loss(logits, labels, 0.5)
    torch.testing.assert_close(lm_loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    torch.testing.assert_close(z_loss, 0.5 * logits.exp().sum(-1).log().square().mean())
    assert language_model_loss(logits, labels, 0.0)[1].item() == 0


@pytest.mark.parametrize("part_elements", [1, 22, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_autograd_however_the_logits_are_parted(monkeypatch, part_elements, dtype):
    monkeypatch.setattr(loss, "PART_ELEMENTS", part_elements)
    logits = (3 * torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    labels = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    lm_loss, z_loss = language_model_loss(logits, labels, 0.3)
    (2 * lm_loss + 5 * z_loss).backward()
    reference = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(reference.flatten(0, 1), labels.flatten())
    expected_z = 0.3 * reference.logsumexp(-1).square().mean()
    (2 * expected + 5 * expected_z).backward()
    assert (lm_loss.item(), z_loss.item()) == pytest.approx((expected.item(), expected_z.item()), rel=1e-6)
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, reference.grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_used_up_hold_their_gradient_which_is_the_same_and_only_once_to_be_had(monkeypatch, dtype):
    monkeypatch.setattr(loss, "PART_ELEMENTS", 22)
    leaf = (3 * torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    labels = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    sum(language_model_loss(leaf, labels, 0.3)).backward()
    expected, leaf.grad = leaf.grad, None
    logits = leaf * 1
    total = sum(language_model_loss(logits, labels, 0.3, use_up=True))
    total.backward(retain_graph=True)
    assert torch.equal(leaf.grad, expected)
    assert torch.equal(logits, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_of_the_logits_no_copy_is_kept():
    kept = []
    logits = torch.randn(1, 6, 1003, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        language_model_loss(logits, torch.zeros(1, 6, dtype=torch.int64), 1e-5)
    assert [t.data_ptr() for t in kept if t.numel() > 100] == [logits.data_ptr()]


def test_bf16_logits_give_an_fp32_loss():
    logits = torch.randn(1, 4, 1003, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.tensor([[0, 5, 1002, 7]])
    lm_loss, z_loss = language_model_loss(logits, labels, 1e-5)
    assert lm_loss.dtype == z_loss.dtype == torch.float32
    assert torch.equal(lm_loss, language_model_loss(logits.float(), labels, 1e-5)[0])


def _router_gradient(weights, prepare=lambda gpt: None, owned=None, **train):
    gpt = tiny.loaded(tiny.recipe(MODEL, **train), weights, owned).train()
    prepare(gpt)
    ids = tiny.tokens(MODEL)
    language_model_loss(forward_logits(gpt, ids)[:, :-1], ids[:, 1:], 0.0)[0].backward()
    return gpt.decoder.layers[1].mlp.router.weight.grad


@pytest.mark.parametrize("coefficient", ["aux_loss_coeff", "router_z_loss_coeff"])
def test_router_losses_reach_the_router_in_proportion_to_their_coefficient(coefficient):
    weights = tiny.random_weights(MODEL)
    without = _router_gradient(weights)
    once = _router_gradient(weights, **{coefficient: 0.5}) - without
    twice = _router_gradient(weights, **{coefficient: 1.0}) - without
    assert once.norm() > 1e-3 * without.norm()
    torch.testing.assert_close(twice, 2 * once, atol=1e-5, rtol=1e-3)


def test_the_scale_applies_to_the_router_losses_alone():
    weights = tiny.random_weights(MODEL)
    without, full = _router_gradient(weights), _router_gradient(weights, aux_loss_coeff=0.5)
    set_router_loss_scale(0.25)
    try:
        quarter = _router_gradient(weights, aux_loss_coeff=0.5)
    finally:
        set_router_loss_scale(1.0)
    torch.testing.assert_close(quarter - without, 0.25 * (full - without), atol=1e-5, rtol=1e-3)


def test_router_losses_are_means_over_layers_and_passes_without_coefficients():
    weights = tiny.random_weights(MODEL)
    gpt = tiny.loaded(tiny.recipe(MODEL, aux_loss_coeff=0.01, router_z_loss_coeff=0.001), weights).train()
    logits = []
    for layer in gpt.decoder.layers:
        layer.mlp.router.register_forward_pre_hook(
            lambda router, args: logits.append(args[0].detach().flatten(0, 1) @ router.weight.detach().t())
        )
    forward_logits(gpt, tiny.tokens(MODEL, seed=1))
    forward_logits(gpt, tiny.tokens(MODEL, seed=2))
    losses = take_router_losses(num_moe_layers=2, num_forwards=2)
    assert losses.z == pytest.approx(
        torch.stack([x.logsumexp(-1).square().mean() for x in logits]).mean().item(), rel=1e-4
    )
    assert losses.balance == pytest.approx(torch.stack([_balance(x) for x in logits]).mean().item(), rel=1e-4)
    assert take_router_losses(num_moe_layers=2, num_forwards=2) == (0, 0)


def _balance(logits, weights=1.0):
    """E * sum of (share of the routed tokens) * (mean probability) over experts."""
    chosen = F.one_hot(logits.topk(2).indices, 4).sum(1).float()
    return 4 * (weights * chosen.mean(0) / 2 * logits.softmax(-1).mean(0)).sum()


def test_owned_experts_can_weigh_less_in_the_balance_loss():
    """As the reference's using_decayed_aux_loss, from the logits of each router; the gradient, too."""
    recipe = tiny.recipe(MODEL, aux_loss_coeff=0.5)
    gpt = tiny.loaded(recipe, tiny.random_weights(MODEL), owned=[1, 2]).train()
    weigh_owned_experts(gpt, 0.5)
    weigh_owned_experts(gpt, 0.7)  # takes the place of the former
    routers, inputs = [layer.mlp.router for layer in gpt.decoder.layers], []
    for router in routers:
        router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().flatten(0, 1)))
    (0 * forward_logits(gpt, tiny.tokens(MODEL)).sum()).backward()
    expected = []
    for router, x in zip(routers, inputs, strict=True):
        weight = router.weight.detach().clone().requires_grad_()
        loss = _balance(x @ weight.t(), torch.tensor([1.0, 0.7, 0.7, 1.0]))
        (0.5 / 2 * loss).backward()
        expected.append(loss.item())
    # Of the last router alone: lower ones also move what those above them see. The language model's part is 0.
    torch.testing.assert_close(routers[-1].weight.grad, weight.grad, atol=1e-6, rtol=1e-4)
    assert take_router_losses(num_moe_layers=2, num_forwards=1).balance == pytest.approx(sum(expected) / 2, rel=1e-5)


def _balance_loss(skew):
    """The load-balancing loss of one layer, all of whose tokens look the same to its router but for a little noise."""
    model = MODEL.model_copy(update={"num_layers": 1})
    weights = tiny.random_weights(model)
    weights["model.embed_tokens.weight"][:, 0] = 4.0
    weights["model.layers.0.mlp.gate.weight"] *= 0.01
    weights["model.layers.0.mlp.gate.weight"][:, 0] = torch.tensor([skew, skew / 2, 0.0, -skew])
    gpt = tiny.loaded(tiny.recipe(model, aux_loss_coeff=0.01), weights).train()
    forward_logits(gpt, tiny.tokens(model))
    return take_router_losses(num_moe_layers=1, num_forwards=1).balance


def test_a_skewed_router_is_clearly_above_the_minimum_of_the_balance_loss():
    assert _balance_loss(0.0) == pytest.approx(1.0, abs=0.05)
    assert _balance_loss(10.0) > 1.8  # 2 where all tokens go to 2 of 4 experts; about 1 if the softmax came twice
