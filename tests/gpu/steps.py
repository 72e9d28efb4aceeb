"""Models, and what one forward and backward pass of them gives; run as a script, references from the CPU.

    CUDA_VISIBLE_DEVICES= python -m tests.gpu.steps OUT

The CPU's share is a process of its own: where there is CUDA, Megatron-Core moves routers and rotary embeddings to it.
"""

import sys

import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, build, forward_logits, load_weights
from tests.model import tiny

# Sizes that are multiples of 16, as grouped GEMMs want them.
MODEL = tiny.section("qwen3_moe", vocab_size=1024, hidden_size=128, expert_hidden_size=64)
MODELS = {
    "top-2": MODEL,
    # Every token goes to every expert. Where a router chooses, rounding decides the choice for some tokens, and what
    # two models make of these has little in common.
    "to all": MODEL.model_copy(update={"top_k": MODEL.num_experts}),
    "odd width": MODEL.model_copy(update={"top_k": MODEL.num_experts, "expert_hidden_size": 60}),
    "one layer": MODEL.model_copy(update={"num_layers": 1}),
}
PARTITIONS = ((), (2, 3), (0, 2, 5), None)
LENGTH = 64


def made_of(implementation, name):
    return MODELS[name].model_copy(update={"implementation": implementation})


def gpt_on(device, owned, dtype, model, router=None, **train):
    """In training; `router` changes the routers' random weights."""
    gpt = build(tiny.recipe(model, dtype=dtype, **train), owned, device)
    weights = tiny.random_weights(model)
    if router is not None:
        weights |= {name: router(tensor) for name, tensor in weights.items() if name.endswith("mlp.gate.weight")}
    load_weights(gpt, model, weights.__getitem__)
    return gpt.train()


def step_of(gpt, device, model):
    """Logits, and the gradients there are by canonical name, in fp32 on the CPU."""
    ids = tiny.tokens(model, length=LENGTH).to(device)
    logits = forward_logits(gpt, ids).float()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {}
    for entry in WeightMap(model, gpt).entries:
        if entry.parameter.grad is not None:
            gradients.update(entry.split(entry.parameter.grad.float().cpu()))
    return logits.detach().cpu(), gradients


def logits_and_gradients(device, owned, dtype, model):
    return step_of(gpt_on(device, owned, dtype, model), device, model)


if __name__ == "__main__":
    wanted = [("to all", owned) for owned in PARTITIONS] + [("top-2", (2, 3)), ("odd width", (2, 3))]
    torch.save({(name, o): logits_and_gradients("cpu", o, "fp32", MODELS[name]) for name, o in wanted}, sys.argv[1])
