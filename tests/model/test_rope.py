"""Rotary embeddings: Llama 3's scaling to the last bit, other variants refused by name."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spes_mega.errors import RecipeError
from spes_mega.model import build
from spes_mega.model.rope import apply_rotary
from tests.model import tiny

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_that_of_transformers(factor):
    scaling = LLAMA3 | {"factor": factor}
    model = tiny.section("llama", head_dim=128, rope_scaling=scaling, rope_theta=500_000.0)
    plain = build(tiny.recipe(model.model_copy(update={"rope_scaling": None}))).rotary_pos_emb.inv_freq
    ours = build(tiny.recipe(model)).rotary_pos_emb.inv_freq
    config = transformers.LlamaConfig(head_dim=128, rope_parameters=scaling | {"rope_theta": 500_000.0})
    theirs, attention_scaling = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert attention_scaling == 1.0
    assert torch.equal(ours, theirs)
    ratio = ours / plain
    # short wavelengths stay, long ones are divided by the factor, some lie between
    assert {1.0, 1 / factor} < set(ratio.tolist())


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3 | {"high_freq_factor": 8.0},
        LLAMA3 | {"original_max_position_embeddings": 4096},
        {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"},
    ],
)
def test_what_cannot_be_run_is_refused_by_name(scaling):
    model = tiny.section("llama", rope_scaling=scaling)
    with pytest.raises(RecipeError, match=rf"model.rope_scaling: RoPE variant '{scaling['rope_type']}'"):
        build(tiny.recipe(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_turn_as_in_megatron_forward_and_backward(dtype):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    angles = torch.rand(64, 1, 1, 8) * 64
    angles = torch.cat((angles, angles), -1)
    heads = torch.randn(64, 2, 5, 3, 16, dtype=dtype)[:, :, 1].requires_grad_()  # a view, as queries are
    gradient = torch.randn(64, 2, 3, 16, dtype=dtype)
    found, expected = (
        (rotated := rotate(heads, angles), *torch.autograd.grad(rotated, heads, gradient))
        for rotate in (apply_rotary, _apply_rotary_pos_emb_bshd)
    )
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=2 * eps, atol=8 * eps)  # theirs rounds each product, ours their sum


def test_the_model_rotates_by_it(monkeypatch):
    from megatron.core.models.common.embeddings import rope_utils

    model = build(tiny.recipe(tiny.section("qwen3_moe")))
    turned = []
    monkeypatch.setattr(
        rope_utils, "fused_apply_rotary_pos_emb", lambda heads, *rest, **named: turned.append(heads.shape) or heads
    )
    tokens = torch.arange(6)[None]
    model(tokens, tokens, None)
    assert len(turned) == 2 * model.config.num_layers
