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


def test_truncated_weights_have_one_width_and_none_lies_beyond_three_standard_deviations(section):
    model = section("qwen3_moe", num_layers=8, init_std=0.04, init="truncated")
    # The density that is cut off lowers the standard deviation to 0.98658 of the normal's.
    for name in ("mlp.gate", "mlp.experts.1.up_proj", "mlp.experts.1.down_proj", "self_attn.o_proj"):
        drawn = initial_tensor(model, f"model.layers.0.{name}.weight", (200, 200), 1)
        assert drawn.dtype == torch.float32
        assert float(drawn.std()) == pytest.approx(0.98658 * 0.04, rel=0.02)
        assert 0.95 * 0.12 < float(drawn.abs().max()) <= 0.12
    assert torch.equal(drawn, initial_tensor(model, "model.layers.0.self_attn.o_proj.weight", (200, 200), 1))
    assert torch.equal(initial_tensor(model, "model.norm.weight", (16,), 1), torch.ones(16))
