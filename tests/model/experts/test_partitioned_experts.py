import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, forward_logits, reset_tokens_per_expert, tokens_per_expert
from spes_mega.model.partitioned_experts import expert_runs, partitioned_experts
from tests.model import tiny

MODEL = tiny.section("qwen3_moe", num_layers=3, dense_layers=(1,), ffn_hidden_size=40, frozen_dtype="train")
PARTITIONS = [(), (2, 3), (0,), (0, 2, 3, 5), tuple(range(6))]


def test_runs_are_maximal_and_cover_all_experts():
    assert expert_runs(6, (2, 3)) == ((0, 2, False), (2, 4, True), (4, 6, False))
    assert expert_runs(6, (0, 2, 5)) == ((0, 1, True), (1, 2, False), (2, 3, True), (3, 5, False), (5, 6, True))
    assert expert_runs(4, ()) == ((0, 4, False),)
    assert expert_runs(4, range(4)) == ((0, 4, True),)


@pytest.fixture(scope="module")
def unpartitioned():
    return _logits_and_gradients(None)


def _logits_and_gradients(owned, dtype="fp32"):
    the_recipe = tiny.recipe(MODEL, dtype=dtype, aux_loss_coeff=0.01, router_z_loss_coeff=0.001)
    gpt = tiny.loaded(the_recipe, tiny.random_weights(MODEL), owned).train()
    ids = tiny.tokens(MODEL)
    logits = forward_logits(gpt, ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    gradients = {}
    for entry in WeightMap(MODEL, gpt).entries:
        parts = entry.split(entry.parameter.grad) if entry.parameter.grad is not None else dict.fromkeys(entry.names)
        gradients.update(parts)
    return logits.detach(), gradients


@pytest.mark.parametrize("owned", PARTITIONS)
def test_outputs_and_gradients_do_not_depend_on_the_partition(unpartitioned, owned):
    logits, gradients = _logits_and_gradients(owned)
    assert torch.equal(logits, unpartitioned[0])
    for name, gradient in gradients.items():
        if ".experts." in name and int(name.split(".")[5]) not in owned:
            assert gradient is None, f"{name} is frozen"
        else:
            assert gradient.abs().sum() > 0, name
            torch.testing.assert_close(gradient, unpartitioned[1][name], atol=1e-7, rtol=1e-5)


def test_frozen_groups_need_no_gradient_in_bf16_either():
    _, gradients = _logits_and_gradients((2, 3), dtype="bf16")
    trained = {int(name.split(".")[5]) for name, g in gradients.items() if ".experts." in name and g is not None}
    assert trained == {2, 3}


def test_a_group_frozen_in_part_is_noticed():
    gpt = tiny.loaded(tiny.recipe(MODEL), tiny.random_weights(MODEL), (2, 3))
    next(gpt.decoder.layers[0].mlp.experts.groups[1].parameters()).requires_grad_(False)
    with pytest.raises(AssertionError, match="owned or frozen as a whole"):
        forward_logits(gpt, tiny.tokens(MODEL))


def test_tokens_are_counted_in_training_alone():
    gpt = tiny.loaded(tiny.recipe(MODEL), tiny.random_weights(MODEL), (0, 4)).train()
    routed = []
    for layer in (0, 2):
        router = gpt.decoder.layers[layer].mlp.router
        router.register_forward_hook(lambda module, args, output: routed.append(output[1].sum(0)))
    ids = tiny.tokens(MODEL)
    forward_logits(gpt, ids)
    assert torch.equal(tokens_per_expert(gpt), torch.stack(routed))
    assert tokens_per_expert(gpt).sum(1).tolist() == [ids.numel() * 2] * 2
    forward_logits(gpt, ids)
    assert torch.equal(tokens_per_expert(gpt), 2 * torch.stack(routed[:2]))

    with torch.no_grad():  # as the first pass of activation recomputation does
        forward_logits(gpt, ids)
    forward_logits(gpt.eval(), ids)
    assert tokens_per_expert(gpt).sum().item() == 2 * 2 * ids.numel() * 2
    reset_tokens_per_expert(gpt)
    assert tokens_per_expert(gpt).tolist() == [[0] * 6] * 2


def test_experts_without_tokens_take_part():
    gpt = tiny.loaded(tiny.recipe(MODEL), tiny.random_weights(MODEL), (2, 3)).train()
    for layer in (0, 2):  # ties everywhere: torch.topk picks the same two experts for every token
        gpt.decoder.layers[layer].mlp.router.weight.data.zero_()
    forward_logits(gpt, tiny.tokens(MODEL)).square().mean().backward()
    assert ((tokens_per_expert(gpt) > 0).sum(1) == 2).all()
    for experts in partitioned_experts(gpt):
        for expert, count in enumerate(experts.token_counts):
            run = next(i for i, run in enumerate(experts.runs) if run.start <= expert < run.stop)
            matrices = experts.groups[run].linear_fc2
            gradient = matrices.get_parameter(f"weight{expert - experts.runs[run].start}").grad
            if experts.runs[run].owned:
                assert (gradient.abs().sum() > 0) == (count > 0)
            else:
                assert gradient is None
