from contextlib import closing

import pytest
import torch

from spes_mega.hub.close import merge_layer
from spes_mega.hub.close.merge_layer import Merge, merge_of
from spes_mega.hub.close.next_state import write_next_state
from spes_mega.hub.close.round_average import RoundAverage
from spes_mega.hub.state.round_state import Published, publishing
from spes_mega.layout.initialize import initial_tensor
from spes_mega.layout.names import expected_tensors, expert_name
from spes_mega.layout.storage import rows as rows_module
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.wire.payload import StoredPayload, write_payload
from spes_mega.wire.policy import WirePolicy
from spes_mega.wire.tensor_specs import in_fp32
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, ownership, read_state, shapes_of


def aggregated(tmp_path, recipe, pushes, merge=None):
    """(state before, state after, similarity) through files, as the hub does it."""
    policy = WirePolicy(recipe.spes)
    with CheckpointWriter(tmp_path / "old", recipe.model, torch.float32, fsync=False) as writer:
        for name, shape in expected_tensors(recipe.model).items():
            writer.write(name, initial_tensor(recipe.model, name, shape, 5))
    stored = {}
    for node, tensors in pushes.items():
        path = tmp_path / f"push-{node}"
        with path.open("wb") as file:
            write_payload(file, in_fp32(shapes_of(recipe, node)), tensors.items(), {})
        stored[node] = StoredPayload.open(path, f"push {node}")
    with closing(Published(tmp_path / "old", 0, policy)) as previous:
        average = RoundAverage(previous, stored, ownership(recipe), policy)
        with (
            CheckpointWriter(tmp_path / "new", recipe.model, torch.float32, fsync=False) as writer,
            publishing(writer, policy, average.names) as out,
        ):
            similarity = write_next_state(out, average, recipe.model, merge, lambda: None)
    return read_state(tmp_path / "old"), read_state(tmp_path / "new"), similarity


@pytest.mark.parametrize(
    ("assignment", "nodes"),
    [
        ("equal", (0, 1, 2)),
        ("equal", (0, 2)),  # nobody pushed node 1's experts: they stay
        ("all", (0, 1, 2)),
        ([[0, 1], [1, 2], [3, 0]], (0, 1)),
    ],
)
def test_shared_is_the_mean_and_experts_are_their_owners(tmp_path, assignment, nodes):
    recipe = make_recipe(num_nodes=3, ownership=assignment)
    pushes = {node: fabricate(recipe, node, 0) for node in nodes}
    old, new, _ = aggregated(tmp_path, recipe, dict(reversed(pushes.items())))
    assert_same(new, next_state(recipe, old, pushes))


@pytest.mark.parametrize("experts", [2, 3, 4, 7])
@pytest.mark.parametrize("budget", [rows_module.SLICE_BYTES, 600])
def test_merging_equals_the_same_on_whole_tensors(tmp_path, monkeypatch, experts, budget):
    monkeypatch.setattr(
        merge_layer, "row_slices", lambda *args, **kw: rows_module.row_slices(*args, **kw | {"budget": budget})
    )
    recipe = make_recipe(
        {
            "num_experts": experts,
            "top_k": 1,
            "norm_topk_prob": False,
            "num_layers": 3,
            "dense_layers": [1],
            "ffn_hidden_size": 20,
        }
    )
    pushes = {node: fabricate(recipe, node, 0) for node in (0, 1)}
    old, new, similarity = aggregated(tmp_path, recipe, pushes, Merge(0.3, 4))
    before_merge = next_state(recipe, old, pushes)
    expected = next_state(recipe, old, pushes, alpha=0.3)
    for name, tensor in expected.items():
        # means in fp32 against fp64
        torch.testing.assert_close(new[name], tensor, rtol=1e-5, atol=1e-6)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    assert not torch.allclose(new[name], before_merge[name], atol=1e-3)
    assert similarity.keys() == {0, 2}
    first, second = torch.triu_indices(experts, experts, offset=1)
    for layer, values in similarity.items():
        gates = [before_merge[expert_name(layer, e, "gate_proj")].flatten().double() for e in range(experts)]
        pairs = torch.nn.functional.cosine_similarity(torch.stack(gates)[first], torch.stack(gates)[second])
        assert values == pytest.approx((pairs.mean().item(), pairs.max().item()), rel=1e-12)


def test_when_a_merge_is_due_and_how_strong_it_is():
    recipe = make_recipe(train={"steps": 95}, sync_every=10, merge_interval=25, merge_steps=80, merge_alpha=0.4)
    due = {round_: merge_of(recipe, round_) for round_ in range(recipe.num_rounds)}
    # multiples of 25 lie in (20, 30], (40, 50], (70, 80]; at step 80 merging has ended
    assert {round_: merge.alpha for round_, merge in due.items() if merge} == pytest.approx({2: 0.25, 4: 0.15})
    assert due[2].num_donors == 4
    assert merge_of(make_recipe(), 0) is None
    one = {"num_experts": 1, "top_k": 1, "norm_topk_prob": False}
    assert merge_of(make_recipe(one, merge_interval=10, merge_steps=100), 0) is None
