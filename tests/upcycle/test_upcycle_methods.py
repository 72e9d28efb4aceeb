import pytest
import torch

from spes_mega.layout import generator
from spes_mega.recipe import UpcycleSection
from upcycle.methods import METHODS, is_exact, noise
from upcycle.router import router, standard_deviation

NAME = "model.layers.0.mlp.experts.1.up_proj.weight"


def dense():
    return torch.randn(700, 900, generator=generator(5, "dense"))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_noise_touches_the_asked_share_with_the_asked_std(fraction):
    drawn = noise(dense(), NAME, UpcycleSection(noise_fraction=fraction, noise_std=0.3)) - dense()
    touched = drawn != 0
    # 630 000 entries: the share has a std of at most 0.0007, the std of the noise one of 0.1 % or less
    assert float(touched.float().mean()) == pytest.approx(fraction, abs=0.004)
    if fraction:
        assert float(drawn[touched].std()) == pytest.approx(0.3, rel=0.02)
        assert float(drawn[touched].mean()) == pytest.approx(0, abs=0.006)
        halves = touched.float().mean(dim=1)
        assert float(halves.std()) < 2 * (fraction * (1 - fraction) / 900) ** 0.5 + 1e-6


def test_entries_without_noise_keep_their_bits():
    source = dense().bfloat16()
    drawn = noise(source, NAME, UpcycleSection())
    assert drawn.dtype == torch.float32
    kept = drawn.bfloat16() == source
    assert 0.49 < float(kept.float().mean()) < 0.7  # some of the noise is rounded away in bf16


def test_noise_is_keyed_by_seed_and_name():
    draw = lambda seed, name: noise(dense(), name, UpcycleSection(seed=seed))  # noqa: E731
    first = draw(1, NAME)
    assert torch.equal(draw(1, NAME), first)
    assert not torch.equal(draw(2, NAME), first)
    assert not torch.equal(draw(1, NAME.replace("experts.1", "experts.2")), first)


def test_noise_leaves_its_source_alone_also_across_chunks():
    source = torch.zeros(3000, 3000)
    drawn = noise(source, NAME, UpcycleSection(noise_fraction=1.0, noise_std=1.0))
    assert not source.any()
    chunk = 1 << 22
    flat = drawn.view(-1)
    assert not torch.equal(flat[:chunk], flat[chunk : 2 * chunk])
    assert float(flat[-1000:].abs().min()) > 0


def test_which_settings_are_exact():
    assert is_exact(UpcycleSection(method="copy"))
    assert is_exact(UpcycleSection(noise_std=0))
    assert is_exact(UpcycleSection(noise_fraction=0))
    assert not is_exact(UpcycleSection())


def test_every_method_of_the_recipe_exists():
    assert set(METHODS) == set(UpcycleSection.model_fields["method"].annotation.__args__)


@pytest.mark.parametrize(("kind", "std"), [("zeros", 0.0), ("normal", 0.02), ("mlp_std", 0.7)])
def test_router(kind, std):
    down = torch.randn(500, 500, generator=generator(1, "down")) * 0.7 + 3
    drawn = router(UpcycleSection(router_init=kind), "model.layers.0.mlp.gate.weight", (64, 512), lambda: down)
    assert drawn.shape == (64, 512)
    assert drawn.dtype == torch.float32
    assert float(drawn.std()) == pytest.approx(std, rel=0.03)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03 * std + 1e-12)


def test_standard_deviation():
    matrix = torch.randn(40, 50, generator=generator(1, "x")) + 2
    assert standard_deviation(matrix) == pytest.approx(float(matrix.double().std(correction=0)), rel=1e-12)
    assert standard_deviation(torch.full((3, 3), 0.1)) == pytest.approx(0, abs=1e-8)
