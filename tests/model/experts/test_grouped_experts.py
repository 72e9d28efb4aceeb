"""Our experts against Megatron's own SequentialMLP, which ZeRO-3 keeps."""

import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, forward_logits, grouped_experts
from spes_mega.model.grouped_experts import ExpertMatrices, GroupedExperts, stacked
from spes_mega.model.partitioned_experts import expert_runs, partitioned_experts
from tests.model import tiny

# Widths that are multiples of 8, as the grouped product wants them.
MODEL = tiny.section("qwen3_moe", frozen_dtype="train")
OWNED = (2, 3)


def logits_and_gradients(grouped, dtype, owned=OWNED):
    recipe = tiny.recipe(MODEL, dtype=dtype, zero_stage=1 if grouped else 3, aux_loss_coeff=0.01)
    gpt = tiny.loaded(recipe, tiny.random_weights(MODEL), owned).train()
    kinds = {type(group) for experts in partitioned_experts(gpt) for group in experts.groups}
    assert (kinds == {GroupedExperts}) == grouped
    ids = tiny.tokens(MODEL)
    logits = forward_logits(gpt, ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    gradients = {}
    for entry in WeightMap(MODEL, gpt).entries:
        if entry.parameter.grad is not None:
            gradients.update(entry.split(entry.parameter.grad))
    return logits.detach(), gradients


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 0.02)])
@pytest.mark.parametrize("owned", [OWNED, (0, 2, 3, 5), None])
def test_outputs_and_gradients_are_those_of_sequential_experts(dtype, tolerance, owned):
    """In bf16, Megatron's backward pass rounds between its steps where ours does not."""
    (ours, gradients), (logits, expected) = (logits_and_gradients(g, dtype, owned) for g in (True, False))
    assert torch.equal(ours, logits)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == expected[name].dtype
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm(), name


@pytest.mark.parametrize("owned", [OWNED, None])
def test_the_grouped_product_gives_the_same(monkeypatch, owned):
    logits, expected = logits_and_gradients(True, "bf16", owned)
    monkeypatch.setattr(grouped_experts, "products_are_grouped", lambda *_: True)
    calls = []
    monkeypatch.setattr(F, "grouped_mm", lambda *a, _mm=F.grouped_mm, **k: calls.append(a) or _mm(*a, **k))
    ours, gradients = logits_and_gradients(True, "bf16", owned)
    # Of two matrices a group: forward, the gradient of its input, and where it is trained that of the matrix.
    a_layer = sum(6 if run.owned else 4 for run in expert_runs(MODEL.num_experts, owned or range(MODEL.num_experts)))
    assert len(calls) == a_layer * MODEL.num_layers
    # sums in another order, rounded to bf16
    assert (ours - logits).norm() < 0.02 * logits.norm()
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_matrices_are_stacked_without_a_copy_where_they_are_neighbours():
    made = list(ExpertMatrices(3, (4, 8), torch.float32).parameters())
    for values, matrix in enumerate(made):
        matrix.data.fill_(values)
    view = stacked(made)
    assert view.data_ptr() == made[0].data_ptr()
    assert torch.equal(view, torch.stack([m.detach() for m in made]))
    padded = torch.arange(3 * 40.0).view(3, 40)[:, :32].view(3, 4, 8)  # as ZeRO's flat buffer may have them
    assert stacked(list(padded)).data_ptr() == padded.data_ptr()
    assert torch.equal(stacked(list(padded)), padded)


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0), (0, 0, 0), (0, 1, 3)])
def test_matrices_that_are_not_neighbours_are_stacked_all_the_same(order):
    whole = torch.arange(4 * 6.0).view(4, 2, 3)
    matrices = [whole[i] for i in order]
    assert torch.equal(stacked(matrices), torch.stack(matrices))
    elsewhere = [whole[0], whole[1].clone(), whole[2]]
    assert torch.equal(stacked(elsewhere), whole[:3])
    assert torch.equal(stacked([whole[1].t()]), whole[1].t()[None])


def test_rows_are_padded_to_few_different_numbers_in_bf16_alone():
    padded = {count: count + grouped_experts._padding(count, torch.bfloat16) for count in range(5000)}
    assert padded[0] == 0
    assert all(count <= rows <= count + max(31, count / 8) for count, rows in padded.items())
    assert len(set(padded.values())) < 60
    assert {grouped_experts._padding(count, torch.float32) for count in range(100)} == {0}


def test_what_is_kept_for_the_backward_pass():
    """Of a frozen group not even its input; of none the activations after the first product."""
    group = next(partitioned_experts(tiny.loaded(tiny.recipe(MODEL), tiny.random_weights(MODEL), (0,)))).groups
    hidden, probs = torch.randn(24, 64, requires_grad=True), torch.rand(24)
    kept = {}
    for run, sizes in ((0, [24]), (1, [16, 8, 0, 0, 0])):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=shapes: s.append(tuple(t.shape)) or t, lambda t: t):
            group[run](hidden, torch.tensor(sizes), probs)
        weights = [tuple(p.shape) for p in group[run].parameters()]
        kept[run] = sorted(shape for shape in shapes if shape not in weights)
    assert kept[0] == [(24,), (24, 64), (24, 96)]
    assert kept[1] == [(0, 96), (0, 96), (0, 96), (8, 96), (16, 96), (24,)]
