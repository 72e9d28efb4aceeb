"""The noise is normal, on the asked share of entries, of its own for each expert, and the same however it is drawn."""

import math

import pytest
import torch

from spes_mega.recipe import UpcycleSection
from tests.upcycle.making import run
from upcycle.methods.noise_draws import _BLOCK, _FEW, _TAILS, _slices, add_noise, noisy_rows

NAME = "model.layers.0.mlp.experts.{}.up_proj.weight"


def noise(shape=(2000, 3000), expert=0, **settings):
    return add_noise(torch.zeros(shape), NAME.format(expert), UpcycleSection(noise_std=1.0, **settings))


@pytest.mark.parametrize("fraction", [0.003, 0.1, 0.5, 1.0])
def test_chosen_entries_have_normal_noise(fraction):
    drawn = noise(noise_fraction=fraction)
    values = drawn[drawn != 0].double()
    count = len(values)
    share = round(fraction * 65536) / 65536
    assert count / drawn.numel() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / drawn.numel()))
    # Four standard deviations of the estimates from `count` normal numbers.
    assert float(values.mean()) == pytest.approx(0, abs=4 / math.sqrt(count))
    assert float(values.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / count))
    assert float((values**4).mean()) == pytest.approx(3, abs=4 * math.sqrt(96 / count))
    for bound in (1, 2, 3, 4):
        beyond = math.erfc(bound / math.sqrt(2))
        seen = float((values.abs() > bound).double().mean())
        assert seen == pytest.approx(beyond, abs=4 * math.sqrt(beyond / count))
    # Kolmogorov and Smirnov: 1.95 is exceeded by chance once in a thousand draws.
    expected = torch.special.ndtr(values.sort().values)
    assert float((expected - torch.arange(1, count + 1) / count).abs().max()) * math.sqrt(count) < 1.95


@pytest.mark.parametrize("fraction", [0.02, 0.5, 1.0])
def test_slices_have_the_variance_that_the_ends_leave(fraction):
    table = _slices(fraction, _TAILS).double()
    slices = table[: round(65536 * (fraction - _TAILS) / (1 - _TAILS))]
    assert not table[len(slices) :].any()
    assert torch.allclose(slices, -slices.flip(0), rtol=0, atol=1e-7)
    share = _TAILS / fraction
    edge = -float(torch.special.ndtri(torch.tensor(share / 2, dtype=torch.float64)))
    of_ends = share + 2 * edge * math.exp(-(edge**2) / 2) / math.sqrt(
        2 * math.pi
    )  # the part of E[x^2] beyond the edges
    assert float(slices.square().mean()) * (1 - share) + of_ends == pytest.approx(1, abs=2e-5 / fraction**1.5)
    assert float(slices.diff().min()) > 0


def test_slices_of_the_default_are_finer_than_a_ten_thousandth():
    slices = _slices(0.5, _TAILS)
    assert float(slices[16000:16700].diff().max()) < 1e-4


def test_few_chosen_entries_have_no_value_twice():
    drawn = noise(noise_fraction=_FEW)
    values = drawn[drawn != 0]
    assert len(values) > 90_000
    assert len(values.unique()) > 0.98 * len(values)


def test_it_is_drawn_and_added_in_the_dtype_of_the_matrix():
    dense = torch.randn(600, 900, generator=torch.Generator().manual_seed(1))
    settings = UpcycleSection(noise_std=0.25)
    zeros = torch.zeros_like(dense)
    for dtype in (torch.bfloat16, torch.float16):
        drawn = add_noise(zeros, NAME, settings).to(dtype)
        made = add_noise(dense.to(dtype), NAME, settings)
        assert made.dtype == dtype
        assert torch.equal(made, (dense.to(dtype).float() + drawn.float()).to(dtype))
    assert torch.equal(add_noise(dense, NAME, settings), dense + add_noise(zeros, NAME, settings))


def test_experts_are_independent():
    first, second = noise(expert=0), noise(expert=1)
    both = (first != 0) & (second != 0)
    count = int(both.sum())
    # Of 6 000 000 entries a quarter, with a std of 0.0002; the correlation has a std of 1 / sqrt(count).
    assert count / first.numel() == pytest.approx(0.25, abs=0.0008)
    assert float((first[both] * second[both]).mean()) == pytest.approx(0, abs=4 / math.sqrt(count))


def test_neighbours_and_blocks_are_independent():
    flat = noise(noise_fraction=1.0).view(-1)
    for lag in (1, 2, 3, 4, 3000, _BLOCK // 3000 * 3000):
        correlation = float((flat[:-lag] * flat[lag:]).mean())
        assert correlation == pytest.approx(0, abs=4 / math.sqrt(len(flat) - lag))


def test_pieces_are_the_whole_and_small():
    dense = torch.randn(7000, 700, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = add_noise(dense, NAME, UpcycleSection())
    starts = []
    for start, rows in noisy_rows(dense, NAME, UpcycleSection()):
        assert torch.equal(rows, whole[start : start + len(rows)])
        starts.append(start)
    assert starts == [0, _BLOCK // 700, 2 * (_BLOCK // 700)]
    assert len(whole) == 7000


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 3_000_000), (3, 1_400_001)])
def test_shapes_that_do_not_fit_the_blocks(shape):
    drawn = noise(shape, noise_fraction=1.0)
    assert drawn.shape == shape
    assert drawn.all()


def test_the_same_bytes_whatever_the_threads_and_shards(make_dense, tmp_path):
    before = torch.get_num_threads()
    results = []
    for threads, shard in ((1, "5GB"), (2, "40KB"), (5, "20KB")):
        src = make_dense(name=f"dense-{threads}", max_shard_size=shard, dtype=torch.bfloat16)
        torch.set_num_threads(threads)
        try:
            run(src, tmp_path / f"moe-{threads}", num_experts=3)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        results.append((tmp_path / f"moe-{threads}/model.safetensors").read_bytes())
    assert [len(list((tmp_path / f"dense-{i}").glob("*.safetensors"))) for i in (1, 2, 5)] == [1, 2, 4]
    assert results[0] == results[1] == results[2]


def test_the_draws_of_a_seed_stay_the_same():
    """A change here changes every result that was ever made."""
    drawn = noise((4, 4), noise_fraction=0.5, seed=7)
    expected = [
        [0.0, -3.1115, 0.0, 0.0],
        [0.0, -0.1700, 0.0, 0.0],
        [0.0, 0.0, 0.0, -0.7828],
        [-0.2130, -0.0526, 0.0, -0.7141],
    ]
    assert torch.allclose(drawn, torch.tensor(expected), rtol=0, atol=1e-4)
