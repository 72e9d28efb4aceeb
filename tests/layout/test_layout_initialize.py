import pytest
import torch

from spes_mega.layout import generator, initial_tensor


def test_draws_depend_on_seed_and_name_alone():
    draw = lambda seed, name: torch.randn(64, generator=generator(seed, name))  # noqa: E731
    first = draw(1, "a")
    draw(1, "b")
    assert torch.equal(draw(1, "a"), first)
    assert not torch.equal(draw(1, "b"), first)
    assert not torch.equal(draw(2, "a"), first)
    assert not torch.equal(draw(11, "a"), draw(1, "1/a"))


def test_initial_values(section):
    model = section("qwen3_moe", num_layers=8, init_std=0.04)
    layer = "model.layers.0."
    assert torch.equal(initial_tensor(model, layer + "self_attn.q_norm.weight", (16,), 1), torch.ones(16))
    assert torch.equal(initial_tensor(model, layer + "self_attn.q_proj.bias", (16,), 1), torch.zeros(16))
    # 40 000 draws: the sample's std is within 2 % of the true one, six sigma
    for name, std in (
        (layer + "mlp.gate.weight", 0.04),
        (layer + "mlp.experts.1.up_proj.weight", 0.04),
        (layer + "mlp.experts.1.down_proj.weight", 0.01),
        (layer + "self_attn.o_proj.weight", 0.01),
    ):
        drawn = initial_tensor(model, name, (200, 200), 1)
        assert drawn.dtype == torch.float32
        assert float(drawn.std()) == pytest.approx(std, rel=0.02)
