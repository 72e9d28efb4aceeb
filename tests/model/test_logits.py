"""Logits and gradients against transformers: an implementation that shares no code with ours."""

import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, export_weights, forward_logits
from tests.model import tiny

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
CASES = {
    "qwen3_moe renormalized": tiny.section("qwen3_moe", norm_topk_prob=True),
    "qwen3_moe not renormalized": tiny.section("qwen3_moe", norm_topk_prob=False),
    "qwen3_moe tied": tiny.section("qwen3_moe", tie_embeddings=True),
    "qwen3_moe top-1": tiny.section("qwen3_moe", top_k=1, norm_topk_prob=False),
    "qwen3_moe with a dense layer": tiny.section("qwen3_moe", dense_layers=(0,), ffn_hidden_size=72, num_layers=3),
    "mixtral": tiny.section("mixtral", norm_eps=1e-3),
    "qwen3": tiny.section("qwen3"),
    "qwen3 tied": tiny.section("qwen3", tie_embeddings=True),
    "llama": tiny.section("llama", norm_eps=1e-3),
    "llama tied, no grouped queries": tiny.section("llama", tie_embeddings=True, num_kv_heads=4),
    "llama, 9 heads of 3 groups": tiny.section("llama", num_heads=9, num_kv_heads=3, head_dim=16, hidden_size=72),
    # wavelengths below, between and above the bounds of the scaling
    "llama 3 rope": tiny.section("llama", rope_scaling=LLAMA3_ROPE, head_dim=64, rope_theta=5e5),
    "qwen2": tiny.section("qwen2"),
    "qwen2 tied": tiny.section("qwen2", tie_embeddings=True, head_dim=16),
    "mistral": tiny.section("mistral"),
    "mistral with a sliding window": tiny.section("mistral", sliding_window=9),
    "mixtral with a sliding window": tiny.section("mixtral", sliding_window=9),
    "olmo2": tiny.section("olmo2", norm_eps=1e-3),
    "qwen2_moe": tiny.section("qwen2_moe"),
    "qwen2_moe with a dense layer": tiny.section("qwen2_moe", dense_layers=(1,), ffn_hidden_size=72),
    "olmoe": tiny.section("olmoe", norm_topk_prob=False),
    "flex_olmo": tiny.section("flex_olmo", norm_eps=1e-3),
}


@pytest.mark.parametrize("model", CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(model, tmp_path):
    hf = tiny.transformers_model(model)
    weights = tiny.saved_weights(hf, model, tmp_path)
    gpt = tiny.loaded(tiny.recipe(model), weights).eval()
    ids = tiny.tokens(model)
    with torch.no_grad():
        ours, theirs = forward_logits(gpt, ids), hf(ids).logits
    assert ours.shape == (*ids.shape, 1003)
    assert theirs.std() > 0.5  # large enough for the tolerance to mean something
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    exported = dict(export_weights(gpt, model))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "case",
    ["qwen3_moe renormalized", "qwen3_moe not renormalized", "qwen3 tied", "qwen2_moe", "olmoe", "flex_olmo", "qwen2"],
)
def test_gradients_equal_those_of_transformers(case, tmp_path):
    model = CASES[case]
    hf = tiny.transformers_model(model)
    gpt = tiny.loaded(tiny.recipe(model), tiny.saved_weights(hf, model, tmp_path / "weights")).train()
    ids = tiny.tokens(model)
    for logits in (forward_logits(gpt, ids), hf(ids).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(parameter.grad)
    theirs = tiny.saved_weights(hf, model, tmp_path / "gradients")  # transformers' own code sorts gradients by name
    for entry in WeightMap(model, gpt).entries:
        for name, gradient in entry.split(entry.parameter.grad).items():
            # fp32 sums in another order: relative to the tensor's own scale
            torch.testing.assert_close(gradient, theirs[name], atol=1e-4 * theirs[name].abs().max().item(), rtol=1e-3)


def test_a_token_does_not_see_later_ones():
    model = CASES["qwen3_moe renormalized"]
    gpt = tiny.loaded(tiny.recipe(model), tiny.random_weights(model)).eval()
    ids = tiny.tokens(model)
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % model.vocab_size
    with torch.no_grad():
        before, after = forward_logits(gpt, ids), forward_logits(gpt, changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax() > 0.1
