import pytest
import torch

from spes_mega.layout import generator
from spes_mega.recipe import UpcycleSection
from upcycle.methods.statistics import mean_and_std
from upcycle.router.kmeans import spherical_kmeans
from upcycle.router.matrix import router

NAME = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(("kind", "std"), [("zeros", 0.0), ("normal", 0.02), ("mlp_std", 0.7)])
def test_distributions(kind, std):
    down = torch.randn(500, 500, generator=generator(1, "down")) * 0.7 + 3
    drawn = router(UpcycleSection(router_init=kind), NAME, (64, 512), 1, lambda: down, None)
    assert drawn.shape == (64, 512)
    assert drawn.dtype == torch.float32
    assert float(drawn.std()) == pytest.approx(std, rel=0.03)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.03 * std + 1e-12)


@pytest.mark.parametrize("kind", ["normal", "kmeans"])
def test_rows_of_a_virtual_group_are_equal(kind):
    centers = torch.randn(4, 8, generator=generator(1, "c"))
    drawn = router(UpcycleSection(router_init=kind), NAME, (12, 8), 3, lambda: centers, centers)
    groups = drawn.view(4, 3, 8)
    assert torch.equal(groups, groups[:, :1].expand(4, 3, 8))
    assert len({tuple(row) for row in groups[:, 0].tolist()}) == 4
    if kind == "kmeans":
        assert torch.equal(groups[:, 0], centers)


def test_ties_are_not_broken_by_index():
    """Why zeros cannot go with split: which experts torch.topk takes of equal ones is nothing to build on."""
    chosen = torch.topk(torch.zeros(2, 8), 2).indices.tolist()
    assert chosen[0] == chosen[1]
    assert sorted(chosen[0]) != [0, 1]


@pytest.mark.parametrize("granularity", [2, 3, 8])
def test_equal_rows_make_top_k_pick_whole_groups(granularity):
    settings = UpcycleSection(router_init="normal")
    rows = router(settings, NAME, (8 * granularity, 33), granularity, lambda: torch.empty(0), None)
    logits = torch.randn(2000, 33, generator=generator(3, "h")) @ rows.T
    values, chosen = logits.softmax(dim=-1).topk(2 * granularity)
    counts = torch.zeros(2000, 8).scatter_add_(1, chosen // granularity, torch.ones_like(chosen, dtype=torch.float))
    assert set(counts.unique().tolist()) == {0.0, float(granularity)}
    # and the weights within a group are equal
    for group in range(8):
        mine = torch.where(chosen // granularity == group, values, torch.nan)
        spread = mine.nan_to_num(-1).amax(1) - mine.nan_to_num(2).amin(1)
        assert float(spread[counts[:, group] > 0].max()) <= 1e-7


def blobs(per_cluster, seed=4):
    """Points around 4 orthogonal directions, of very different lengths."""
    kinds = torch.arange(4).repeat(per_cluster)
    noise = torch.randn(len(kinds), 16, generator=generator(seed, "blobs")) * 0.08
    lengths = torch.rand(len(kinds), 1, generator=generator(seed, "lengths")) * 50 + 0.1
    return (torch.eye(16)[kinds] + noise) * lengths, kinds


@pytest.mark.parametrize("balanced", [False, True])
def test_kmeans_finds_directions(balanced):
    points, kinds = blobs(50)
    clusters = spherical_kmeans(points, 4, generator(1, "k"), balanced=balanced)
    assert len({(a, b) for a, b in zip(kinds.tolist(), clusters.assignment.tolist(), strict=True)}) == 4
    best = clusters.centers @ torch.eye(16, dtype=torch.float64)[:4].T
    assert float(best.max(dim=1).values.min()) > 0.99
    assert torch.allclose(clusters.centers.norm(dim=1), torch.ones(4, dtype=torch.float64), atol=1e-3)
    if not balanced:
        assert torch.equal(clusters.assignment, clusters.cosines.argmax(dim=1))


def test_balanced_clusters_are_of_one_size_and_close_to_the_free_ones():
    points = torch.randn(96, 8, generator=generator(6, "p"))
    clusters = spherical_kmeans(points, 6, generator(1, "k"), balanced=True)
    assert torch.bincount(clusters.assignment).tolist() == [16] * 6
    own = clusters.cosines.gather(1, clusters.assignment[:, None]).mean()
    assert float(own) > float(clusters.cosines.mean()) + 0.3


def test_kmeans_gives_the_same_bits_whatever_the_threads_and_fails_on_no_input():
    points, before = torch.randn(5000, 64, generator=generator(9, "p")), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(spherical_kmeans(points, 7, generator(1, "k")))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert torch.equal(other.assignment, found[0].assignment)
        assert torch.equal(other.centers, found[0].centers)


def test_kmeans_of_equal_points_and_of_zeros():
    same = spherical_kmeans(torch.ones(20, 4), 3, generator(1, "k"))
    assert torch.allclose(same.centers, torch.full((3, 4), 0.5, dtype=torch.float64))
    assert not spherical_kmeans(torch.zeros(20, 4), 3, generator(1, "k")).centers.any()


def test_mean_and_std():
    matrix = torch.randn(600, 50, generator=generator(1, "x")) + 2
    mean, std = mean_and_std(matrix)
    assert mean == pytest.approx(float(matrix.double().mean()), rel=1e-12)
    assert std == pytest.approx(float(matrix.double().std(correction=0)), rel=1e-12)
    assert mean_and_std(torch.full((3, 3), 0.1))[1] == pytest.approx(0, abs=1e-8)
