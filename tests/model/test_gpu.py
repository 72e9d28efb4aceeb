"""On a CUDA device: the model that is built there (Transformer Engine's modules where importable) against the CPU's."""

import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, build, export_weights, forward_logits, load_weights, tokens_per_expert
from spes_mega.model.config import use_transformer_engine
from tests.model import tiny

pytestmark = [
    pytest.mark.requires_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Sizes that are multiples of 16, as grouped GEMMs want them.
MODEL = tiny.section("qwen3_moe", vocab_size=1024, hidden_size=128, expert_hidden_size=64)


def gpt_on(device, owned, dtype):
    gpt = build(tiny.recipe(MODEL, dtype=dtype), owned, device)
    load_weights(gpt, MODEL, tiny.random_weights(MODEL).__getitem__)
    return gpt.train()


def loss_and_gradients(gpt, device):
    ids = tiny.tokens(MODEL, length=64).to(device)
    logits = forward_logits(gpt, ids).float()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {}
    for entry in WeightMap(MODEL, gpt).entries:
        if entry.parameter.grad is not None:
            gradients.update(entry.split(entry.parameter.grad.float().cpu()))
    return logits.detach().cpu(), gradients


def test_the_default_device_is_the_gpu_and_round_trips():
    weights = tiny.random_weights(MODEL, dtype=torch.bfloat16)
    gpt = build(tiny.recipe(MODEL, dtype="bf16"), (2, 3))
    load_weights(gpt, MODEL, weights.__getitem__)
    assert {parameter.device.type for parameter in gpt.parameters()} == {"cuda"}
    for name, tensor in export_weights(gpt, MODEL):
        assert torch.equal(tensor.cpu(), weights[name]), name
    grouped = any(name.endswith("linear_fc1.weight0") for name, _ in gpt.named_parameters())
    assert grouped == use_transformer_engine(MODEL, torch.device("cuda"))


@pytest.mark.parametrize("owned", [(), (2, 3), (0, 2, 5), None])
def test_logits_and_gradients_are_the_cpu_models(owned):
    expected, reference = loss_and_gradients(gpt_on("cpu", owned, "fp32"), "cpu")
    gpt = gpt_on("cuda", owned, "bf16")
    logits, gradients = loss_and_gradients(gpt, "cuda")
    # bf16 keeps 8 bits; a token whose router is nearly tied may go to another expert, so the comparison is of wholes
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert (gradient - reference[name]).norm() < 0.25 * reference[name].norm(), name
    assert tokens_per_expert(gpt).sum(1).tolist() == [2 * 64 * MODEL.top_k] * MODEL.num_layers
