"""Frozen experts in bf16 beside fp32."""

import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, export_weights, forward_logits, partitioned_experts
from tests.model import tiny

OWNED = (2, 3)
MODEL = tiny.section("qwen3_moe")


def gpt_of(frozen_dtype, weights=None, **train):
    model = MODEL.model_copy(update={"frozen_dtype": frozen_dtype})
    return tiny.loaded(tiny.recipe(model, **train), weights or tiny.random_weights(MODEL), OWNED).train()


def test_weights_of_frozen_experts_are_held_once_in_their_own_dtype():
    weights = tiny.random_weights(MODEL)
    gpt = gpt_of("bf16", weights)
    for entry in WeightMap(MODEL, gpt).entries:
        frozen = ".experts." in entry.names[0] and int(entry.names[0].split(".")[5]) not in OWNED
        assert entry.parameter.dtype == (torch.bfloat16 if frozen else torch.float32), entry.parameter_name
        assert entry.parameter.requires_grad != frozen
    for name, tensor in export_weights(gpt, MODEL):
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name
    assert {p.dtype for p in gpt_of("fp32").parameters()} == {torch.float32}
    assert {p.dtype for p in gpt_of("train", dtype="bf16").parameters()} == {torch.bfloat16}


def logits_and_gradients(gpt):
    ids = tiny.tokens(MODEL)
    logits = forward_logits(gpt, ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {n: p.grad for n, p in gpt.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("fast", [True, False])
def test_logits_and_gradients_are_those_of_fp32_as_far_as_bf16_holds_them(monkeypatch, zero_stage, fast):
    """bf16 keeps 8 bits: half a unit of the last is 0.2 %, and each of 2 layers rounds weights and activations."""
    monkeypatch.setattr(partitioned_experts, "bf16_is_fast", lambda device: fast)
    expected, reference = logits_and_gradients(gpt_of("fp32", zero_stage=zero_stage))
    logits, gradients = logits_and_gradients(gpt_of("bf16", zero_stage=zero_stage))
    assert logits.dtype == torch.float32
    assert 0 < (logits - expected).norm() < 0.01 * expected.norm()
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert (gradient - reference[name]).norm() < 0.05 * reference[name].norm(), name


def test_products_of_frozen_experts_are_in_bf16_where_that_is_fast(monkeypatch):
    seen = []
    for fast in (True, False):
        monkeypatch.setattr(partitioned_experts, "bf16_is_fast", lambda device, fast=fast: fast)
        gpt = gpt_of("bf16")
        for group in next(partitioned_experts.partitioned_experts(gpt)).groups:
            group.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
        forward_logits(gpt, tiny.tokens(MODEL))
    bf16, fp32 = torch.bfloat16, torch.float32
    assert seen == [bf16, fp32, bf16, fp32, fp32, fp32]
