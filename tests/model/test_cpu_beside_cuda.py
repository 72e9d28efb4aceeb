"""A model that is wanted on the CPU of a host with CUDA; here CUDA only says that it is there, and must not be used."""

import pytest
import torch

from spes_mega.model import build, forward_logits, load_weights
from tests.model import tiny

LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "moe": tiny.section("qwen3_moe"),
    "dense": tiny.section("qwen3"),
    "llama 3 rope": tiny.section("llama", rope_scaling=LLAMA_3),
}


@pytest.fixture
def beside_cuda(monkeypatch):
    """Returns what asked for the GPU."""
    asked = []

    def current_device():
        asked.append("torch.cuda.current_device")
        return torch.device("meta")  # tensors that go there are lost, as for the CPU those on a GPU are

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    return asked


def step(model, device, recompute):
    gpt = build(tiny.recipe(model, recompute=recompute), (2, 3) if model.is_moe else None, device)
    load_weights(gpt, model, tiny.random_weights(model).__getitem__)
    logits = forward_logits(gpt.train(), tiny.tokens(model))
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_it_computes_what_it_would_without_cuda(request, model, recompute):
    logits, gradients = step(model, None, recompute)
    asked = request.getfixturevalue("beside_cuda")
    logits_, gradients_ = step(model, "cpu", recompute)
    assert asked == []
    assert torch.equal(logits, logits_)
    assert gradients.keys() == gradients_.keys()
    assert all(torch.equal(gradients[name], gradients_[name]) for name in gradients)
