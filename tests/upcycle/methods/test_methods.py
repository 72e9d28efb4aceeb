"""What each method makes of a matrix, to the value."""

import pytest
import torch
from torch.nn.functional import silu

from spes_mega.errors import RecipeError
from spes_mega.layout import EXPERT_MATRICES, ExpertKey, dense_name, generator
from spes_mega.recipe import UpcycleSection
from upcycle.methods import METHODS
from upcycle.methods.drop import dropped_units
from upcycle.methods.noise_draws import add_noise
from upcycle.methods.scaling import factors

NAME = "model.layers.0.mlp.experts.1.up_proj.weight"
H, F = 12, 24


def dense():
    return torch.randn(700, 900, generator=generator(5, "dense"))


def ffn_weights(layer=0, width=F):
    shapes = {"gate_proj": (width, H), "up_proj": (width, H), "down_proj": (H, width)}
    return {dense_name(layer, m): torch.randn(s, generator=generator(8, f"{layer}{m}")) for m, s in shapes.items()}


def experts(settings, weights=None, layer=0):
    """All experts of a layer, each as its three matrices."""
    method, weights = METHODS[settings.method], weights or ffn_weights(layer)
    shared = method.prepare(layer, weights.__getitem__, settings)
    return [
        [method.make(weights[dense_name(layer, m)], ExpertKey(layer, e, m), settings, shared) for m in EXPERT_MATRICES]
        for e in range(method.num_experts(settings))
    ]


def run_ffn(matrices, x):
    gate, up, down = (matrix.double() for matrix in matrices)
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def inputs():
    return torch.randn(5, H, generator=generator(1, "x"), dtype=torch.float64)


def dense_output(x, weights=None):
    return run_ffn((weights or ffn_weights()).values(), x)


class TestNoise:
    @pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
    def test_touches_the_asked_share_with_the_asked_std(self, fraction):
        drawn = add_noise(dense(), NAME, UpcycleSection(noise_fraction=fraction, noise_std=0.3)) - dense()
        touched = drawn != 0
        # 630 000 entries: the share has a std of at most 0.0007, the std of the noise one of 0.1 % or less
        assert float(touched.float().mean()) == pytest.approx(fraction, abs=0.004)
        if fraction:
            assert float(drawn[touched].std()) == pytest.approx(0.3, rel=0.02)
            assert float(drawn[touched].mean()) == pytest.approx(0, abs=0.006)
            halves = touched.float().mean(dim=1)
            assert float(halves.std()) < 2 * (fraction * (1 - fraction) / 900) ** 0.5 + 1e-6

    def test_entries_without_noise_keep_their_bits(self):
        source = dense().bfloat16()
        drawn = add_noise(source, NAME, UpcycleSection())
        assert drawn.dtype == torch.bfloat16
        kept = drawn == source
        assert 0.49 < float(kept.float().mean()) < 0.7  # some of the noise is rounded away in bf16

    def test_is_keyed_by_seed_and_name(self):
        draw = lambda seed, name: add_noise(dense(), name, UpcycleSection(seed=seed))  # noqa: E731
        first = draw(1, NAME)
        assert torch.equal(draw(1, NAME), first)
        assert not torch.equal(draw(2, NAME), first)
        assert not torch.equal(draw(1, NAME.replace("experts.1", "experts.2")), first)

    def test_leaves_its_source_alone_also_across_chunks(self):
        source = torch.zeros(3000, 3000)
        drawn = add_noise(source, NAME, UpcycleSection(noise_fraction=1.0, noise_std=1.0))
        assert not source.any()
        chunk = 1 << 22
        flat = drawn.view(-1)
        assert not torch.equal(flat[:chunk], flat[chunk : 2 * chunk])
        assert float(flat[-1000:].abs().min()) > 0


def test_copies_are_the_dense_matrices():
    weights = list(ffn_weights().values())
    for made in experts(UpcycleSection(method="copy", num_experts=3)):
        assert all(torch.equal(a, b) for a, b in zip(made, weights, strict=True))


class TestDrop:
    settings = UpcycleSection(method="drop", num_experts=3, drop_ratio=0.25)

    def test_the_same_units_in_all_three_matrices_and_only_those(self):
        gate, up, down = ffn_weights().values()
        for e, made in enumerate(experts(self.settings)):
            units = dropped_units(ExpertKey(0, e, "gate_proj"), F, self.settings)
            assert len(set(units.tolist())) == 6
            for new, old in ((made[0], gate), (made[1], up), (made[2].T, down.T)):
                changed = (new != old).all(dim=1)
                assert changed.nonzero()[:, 0].tolist() == units.tolist()
                assert torch.equal(new[~changed], old[~changed])

    def test_experts_and_layers_drop_different_units(self):
        drawn = [
            tuple(dropped_units(ExpertKey(layer, e, "up_proj"), 4000, self.settings).tolist())
            for layer in range(2)
            for e in range(3)
        ]
        assert len(set(drawn)) == 6
        shared = len(set(drawn[0]) & set(drawn[1]))
        assert shared == pytest.approx(250, abs=60)  # 1000 of 4000 each: 250 by chance, std 12
        other = self.settings.model_copy(update={"seed": 5})
        assert tuple(dropped_units(ExpertKey(0, 0, "up_proj"), 4000, other).tolist()) != drawn[0]

    def test_new_values_have_mean_and_std_of_the_whole_matrix(self):
        weights = {name: matrix * 0.3 + 2 for name, matrix in ffn_weights(width=4000).items()}
        made = experts(self.settings, weights)[1]
        units = dropped_units(ExpertKey(0, 1, "gate_proj"), 4000, self.settings)
        for new, old in zip((made[0], made[1], made[2].T), weights.values(), strict=True):
            # 12 000 draws: the mean has a std of 0.003, the std one of 0.002
            assert float(new[units].mean()) == pytest.approx(float(old.mean()), abs=0.012)
            assert float(new[units].std()) == pytest.approx(float(old.std()), abs=0.01)

    def test_nothing_dropped_is_a_copy(self):
        settings = UpcycleSection(method="drop", drop_ratio=0.0)
        assert METHODS["drop"].changes_experts(settings) is None
        assert all(torch.equal(a, b) for a, b in zip(experts(settings)[0], ffn_weights().values(), strict=True))


class TestSplit:
    @pytest.mark.parametrize("granularity", [2, 3, 4, 8])
    def test_the_mean_of_a_group_is_the_dense_output(self, granularity):
        settings = UpcycleSection(method="split", num_experts=2, top_k=1, granularity=granularity, router_init="normal")
        made = experts(settings)
        assert len(made) == 2 * granularity
        assert [list(m.shape) for m in made[0]] == [[F // granularity, H], [F // granularity, H], [H, F // granularity]]
        x = inputs()
        for group in range(2):
            outputs = [run_ffn(m, x) for m in made[group * granularity : (group + 1) * granularity]]
            # fp32 weights times an fp32 root: a few units of 2^-24
            assert torch.allclose(sum(outputs) / granularity, dense_output(x), rtol=0, atol=3e-5)

    def test_the_factor_is_on_up_and_down_and_never_on_gate(self):
        settings = UpcycleSection(method="split", num_experts=2, granularity=4, router_init="normal")
        gate, up, down = ffn_weights().values()
        for e, made in enumerate(experts(settings)):
            part = slice(e % 4 * 6, e % 4 * 6 + 6)
            assert torch.equal(made[0], gate[part])
            assert torch.equal(made[1], up[part] * 2)
            assert torch.equal(made[2], down[:, part] * 2)

    def test_with_the_factor_on_gate_it_would_not_be_the_dense_output(self):
        settings = UpcycleSection(method="split", num_experts=2, granularity=4, router_init="normal")
        x = inputs()
        wrong = [run_ffn((gate * 2, up / 2, down), x) for gate, up, down in experts(settings)[:4]]
        assert float((sum(wrong) / 4 - dense_output(x)).abs().max()) > 0.1

    def test_a_width_that_cannot_be_cut(self):
        settings = UpcycleSection(method="split", granularity=5, router_init="normal")
        with pytest.raises(RecipeError, match="granularity 5: the FFN of width 24 cannot be cut"):
            METHODS["split"].expert_width(24, settings)


@pytest.mark.parametrize(
    ("scale", "up", "down"), [(1, 1, 1), (2, 2, 1), (4, 2, 2), (8, 4, 2), (16, 4, 4), (3, 3**0.5, 3**0.5)]
)
def test_factors(scale, up, down):
    assert factors(scale) == (up, down)
    assert up * down == pytest.approx(scale)


class TestPartition:
    @pytest.mark.parametrize("by", ["random", "kmeans"])
    @pytest.mark.parametrize("num_experts", [2, 3, 4, 6])
    def test_every_unit_is_in_one_expert_and_all_together_are_the_dense_output(self, by, num_experts):
        settings = UpcycleSection(method="partition", num_experts=num_experts, top_k=2, partition_by=by)
        made = experts(settings)
        rows = torch.cat([matrices[0] for matrices in made])
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, next(iter(ffn_weights().values())).tolist()))
        x = inputs()
        mean = sum(run_ffn(matrices, x) for matrices in made) / num_experts
        assert torch.allclose(mean, dense_output(x), rtol=0, atol=3e-5)

    def test_k_experts_give_e_over_k_times_their_parts(self):
        """Two of four, with the weights 1/2 that a router of zeros gives, against the parts themselves."""
        settings = UpcycleSection(method="partition", num_experts=4, top_k=2)
        made = experts(settings)
        units = METHODS["partition"].prepare(0, ffn_weights().__getitem__, settings)["units"]
        gate, up, down = ffn_weights().values()
        x, chosen = inputs(), torch.cat([units[1], units[3]])
        parts = run_ffn((gate[chosen], up[chosen], down[:, chosen]), x)
        layer = (run_ffn(made[1], x) + run_ffn(made[3], x)) / 2
        assert torch.allclose(layer, parts * 4 / 2, rtol=0, atol=3e-5)

    def test_random_parts_differ_by_layer_and_seed(self):
        def units(layer, seed):
            settings = UpcycleSection(method="partition", num_experts=4, seed=seed)
            return METHODS["partition"].prepare(layer, ffn_weights(layer).__getitem__, settings)["units"].tolist()

        assert units(0, 1) == units(0, 1)
        assert units(0, 1) != units(1, 1) != units(0, 2)

    def test_clusters_find_units_that_react_alike(self):
        centers = torch.eye(H)[:3]
        kinds = torch.tensor([0, 1, 2] * 8)
        weights = ffn_weights()
        noise = torch.randn(F, H, generator=generator(2, "near")) * 0.05
        weights[dense_name(0, "gate_proj")] = (centers[kinds] + noise) * torch.linspace(0.1, 3, F)[:, None]
        settings = UpcycleSection(method="partition", num_experts=3, partition_by="kmeans")
        units = METHODS["partition"].prepare(0, weights.__getitem__, settings)["units"]
        assert sorted({tuple(kinds[row].tolist()) for row in units}) == [(0,) * 8, (1,) * 8, (2,) * 8]

    def test_a_width_that_cannot_be_divided(self):
        with pytest.raises(RecipeError, match="num_experts 7: the FFN of width 24 cannot be divided"):
            METHODS["partition"].expert_width(24, UpcycleSection(method="partition", num_experts=7))


def test_which_settings_compute_what_the_source_does():
    def why(**settings):
        section = UpcycleSection(**settings)
        return METHODS[section.method].changes_model(section)

    assert why(method="copy") is None
    assert why(method="copy", router_init="normal") is None
    assert why(method="noise", noise_std=0) is None
    assert why(method="noise", noise_fraction=0) is None
    assert "noise of std 0.02 on 50% of the entries" in why(method="noise")
    assert "50% of the units" in why(method="drop")
    assert why(method="split", router_init="normal") is None
    assert why(method="split", router_init="zeros", num_experts=2, top_k=2) is None
    assert why(method="partition", num_experts=4, top_k=4) is None
    assert "2 of the 4 parts" in why(method="partition", num_experts=4, top_k=2)
    assert "router_init normal" in why(method="partition", num_experts=4, top_k=4, router_init="normal")
    assert "different checkpoints" in why(method="mix")


def test_every_method_of_the_recipe_exists_and_names_its_paper():
    assert set(METHODS) == set(UpcycleSection.model_fields["method"].annotation.__args__)
    for method in METHODS.values():
        assert "arXiv" in type(method).__doc__
