"""Where tensors lie on CUDA, without a GPU: torch's fake tensors have a device, shape and dtype, and no values.

Devices that are mixed are found as on a GPU. The engine of autograd wants a device, so only the forward pass is run.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spes_mega.model import build, forward_logits, gpt, language_model_loss, partitioned_experts
from tests.model import tiny

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")

TOP_K, EXPERTS, OWNED = 2, 6, (2, 3)
CUDA = torch.device("cuda", 0)


class Counts(list):
    """Tokens per expert, which only values of the router's weights could tell."""

    def split(self, sizes):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [Counts(self[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def contiguous(self):
        return self

    def tolist(self):
        return list(self)

    def sum(self):
        return sum(self.tolist())

    def to(self, device, dtype):
        return torch.tensor(self.tolist(), device=device, dtype=dtype)


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(gpt, "stay_on_cpu", lambda model: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    # The tokens of all experts one after the other: how many there are, all values of the mask would have to tell.
    monkeypatch.setattr(torch.Tensor, "masked_select", lambda tensor, mask: tensor.new_empty(TOP_K * mask.shape[-1]))


def on_cuda(model, mode):
    """Put all that `Module.to` would move on the fake device."""
    for module in model.modules():
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            with mode:
                there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
            if isinstance(tensor, torch.nn.Parameter):
                there = torch.nn.Parameter(there, requires_grad=tensor.requires_grad)
            setattr(module, name, there)
    with mode:  # neither of both: Megatron moves it itself, at its first use
        model.rotary_pos_emb.inv_freq = torch.empty_like(model.rotary_pos_emb.inv_freq, device=CUDA)
    return model


def faked(dtype, frozen_dtype, mode, **train):
    model = tiny.section("qwen3_moe", frozen_dtype=frozen_dtype, num_experts=EXPERTS, top_k=TOP_K)
    return model, on_cuda(build(tiny.recipe(model, dtype=dtype, **train), OWNED, "cpu").train(), mode)


def losses(section, model, mode, seen):
    """Losses of a forward pass in which experts share the tokens evenly; `seen` gets device and dtype of products."""
    tokens = tiny.tokens(section)
    counts = Counts([tokens.numel() * TOP_K // EXPERTS] * EXPERTS)
    for experts in partitioned_experts.partitioned_experts(model):
        experts.register_forward_pre_hook(lambda module, args: (args[0], counts, args[2]))
        for group in experts.groups:
            group.register_forward_hook(lambda module, args, output: seen.append((output[0].device, output[0].dtype)))
    with mode:
        ids = torch.empty(tokens.shape, dtype=tokens.dtype, device=CUDA)
        logits = forward_logits(model, ids)
        return logits, language_model_loss(logits[:, :-1], ids[:, 1:], 1e-4)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(("dtype", "frozen_dtype"), [("bf16", "train"), ("bf16", "bf16"), ("fp32", "bf16")])
def test_a_forward_pass_stays_on_cuda(cuda, dtype, frozen_dtype, recompute):
    mode, seen = FakeTensorMode(allow_non_fake_inputs=True), []
    section, model = faked(dtype, frozen_dtype, mode, recompute=recompute)
    logits, both = losses(section, model, mode, seen)
    trained = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert (logits.device, logits.dtype, logits.shape) == (CUDA, trained, (2, 33, section.vocab_size))
    assert all((loss.device, loss.dtype, loss.requires_grad) == (CUDA, torch.float32, True) for loss in both)
    # frozen, owned, frozen, in each of two layers: on CUDA frozen experts compute in the dtype of their weights
    assert seen == [(CUDA, torch.bfloat16), (CUDA, trained), (CUDA, torch.bfloat16)] * 2


@pytest.mark.parametrize(
    "name", ["decoder.layers.1.mlp.router.weight", "decoder.layers.0.mlp.experts.groups.1.linear_fc1.weight0"]
)
def test_a_weight_that_is_left_on_the_cpu_is_found(cuda, name):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    section, model = faked("fp32", "bf16", mode)
    owner, _, attribute = name.rpartition(".")
    weight = model.get_parameter(name)
    setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(torch.zeros(weight.shape)))
    with pytest.raises(Exception, match="found at least two devices"):
        losses(section, model, mode, [])
