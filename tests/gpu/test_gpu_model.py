"""The model on a CUDA device: against the CPU's, Transformer Engine's modules against the local ones, and experts."""

import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import WeightMap, build, export_weights, forward_logits, load_weights, tokens_per_expert
from spes_mega.model import grouped_experts as grouped
from spes_mega.model.grouped_experts import GroupedExperts
from spes_mega.model.partitioned_experts import partitioned_experts
from tests.model import tiny

pytestmark = pytest.mark.requires_gpu
# Sizes that are multiples of 16, as grouped GEMMs want them.
MODEL = tiny.section("qwen3_moe", vocab_size=1024, hidden_size=128, expert_hidden_size=64)
# Every token goes to every expert. Where a router chooses, rounding decides the choice for some tokens, and what two
# models make of these has little in common.
TO_ALL = MODEL.model_copy(update={"top_k": MODEL.num_experts})
PARTITIONS = [(), (2, 3), (0, 2, 5), None]


def gpt_on(device, owned, dtype, model, router=None, **train):
    gpt = build(tiny.recipe(model, dtype=dtype, **train), owned, device)
    weights = tiny.random_weights(model)
    if router is not None:
        weights |= {name: router(tensor) for name, tensor in weights.items() if name.endswith("mlp.gate.weight")}
    load_weights(gpt, model, weights.__getitem__)
    return gpt.train()


def logits_and_gradients(device, owned, dtype, model):
    """Logits, and the gradients there are by canonical name, in fp32 on the CPU."""
    return step_of(gpt_on(device, owned, dtype, model), device, model)


def step_of(gpt, device, model=MODEL):
    ids = tiny.tokens(MODEL, length=64).to(device)
    logits = forward_logits(gpt, ids).float()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {}
    for entry in WeightMap(model, gpt).entries:
        if entry.parameter.grad is not None:
            gradients.update(entry.split(entry.parameter.grad.float().cpu()))
    return logits.detach().cpu(), gradients


def assert_close(found, expected, of_logits=0.03, of_gradients=0.06):
    """Within what bf16's 8 bits leave, of each tensor as a whole."""
    (logits, gradients), (expected_logits, reference) = found, expected
    assert (logits - expected_logits).norm() < of_logits * expected_logits.norm()
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert (gradient - reference[name]).norm() <= of_gradients * reference[name].norm(), name


def made_of(implementation, model=MODEL):
    return model.model_copy(update={"implementation": implementation})


def test_the_default_device_is_the_gpu_and_round_trips(implementation):
    weights = tiny.random_weights(MODEL, dtype=torch.bfloat16)
    gpt = build(tiny.recipe(made_of(implementation), dtype="bf16"), (2, 3))
    load_weights(gpt, MODEL, weights.__getitem__)
    assert {parameter.device.type for parameter in gpt.parameters()} == {"cuda"}
    for name, tensor in export_weights(gpt, MODEL):
        assert torch.equal(tensor.cpu(), weights[name]), name


def test_auto_takes_transformer_engine_here(transformer_engine):
    parameters = dict(build(tiny.recipe(made_of("auto"), dtype="bf16"), (2, 3)).named_parameters())
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in parameters


@pytest.mark.parametrize("owned", PARTITIONS)
def test_logits_and_gradients_are_the_cpu_models(implementation, owned):
    expected = logits_and_gradients("cpu", owned, "fp32", TO_ALL)
    assert_close(logits_and_gradients("cuda", owned, "bf16", made_of(implementation, TO_ALL)), expected)


@pytest.mark.parametrize("owned", PARTITIONS)
def test_transformer_engine_computes_what_the_local_modules_do(transformer_engine, owned):
    local = logits_and_gradients("cuda", owned, "bf16", made_of("local", TO_ALL))
    assert_close(logits_and_gradients("cuda", owned, "bf16", made_of("transformer_engine", TO_ALL)), local)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_frozen_experts_in_bf16_train_what_is_below_them(implementation, dtype):
    expected = logits_and_gradients("cpu", (2, 3), "fp32", TO_ALL)
    found = logits_and_gradients("cuda", (2, 3), dtype, made_of(implementation, TO_ALL))
    assert {int(name.split(".")[5]) for name in found[1] if ".experts." in name} == {2, 3}
    assert_close(found, expected)


def test_most_tokens_are_routed_as_on_the_cpu(implementation):
    gpt = gpt_on("cuda", (2, 3), "bf16", made_of(implementation))
    logits, _ = step_of(gpt, "cuda")
    expected, _ = logits_and_gradients("cpu", (2, 3), "fp32", MODEL)
    close = (logits - expected).norm(dim=-1) < 0.05 * expected.norm(dim=-1)
    assert close.float().mean() > 0.9
    assert tokens_per_expert(gpt).sum(1).tolist() == [2 * 64 * MODEL.top_k] * MODEL.num_layers


def products_of_a_step(monkeypatch, module, name, owned, model):
    """How often `module.name`, the grouped matrix product, is called in one forward and backward pass."""
    calls, product = [], getattr(module, name)
    gpt = gpt_on("cuda", owned, "bf16", model)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *a, **k: calls.append(name) or product(*a, **k))
        step_of(gpt, "cuda")
    return len(calls)


@pytest.mark.parametrize("owned", PARTITIONS)
def test_frozen_groups_have_no_products_for_weight_gradients(monkeypatch, implementation, owned):
    module, name = F, "grouped_mm"
    if implementation == "transformer_engine":
        module, name = pytest.importorskip("transformer_engine.pytorch.module.grouped_linear"), "general_grouped_gemm"
    model = made_of(implementation)
    (experts, *_) = partitioned_experts(gpt_on("cuda", owned, "bf16", model))
    # of two matrices: forward, and the gradients of their input and of themselves
    expected = sum(6 if run.owned else 4 for run in experts.runs) * MODEL.num_layers
    assert products_of_a_step(monkeypatch, module, name, owned, model) == expected


def kinds(gpt):
    return {type(group) for experts in partitioned_experts(gpt) for group in experts.groups}


@pytest.mark.parametrize("owned", PARTITIONS)
def test_grouped_products_give_what_sequential_experts_give(owned):
    """In one layer, below which nothing differs, so that the router chooses alike."""
    model = made_of("local", MODEL.model_copy(update={"num_layers": 1}))
    grouped, sequential = (gpt_on("cuda", owned, "bf16", model, zero_stage=stage) for stage in (1, 3))
    assert kinds(grouped) == {GroupedExperts}
    assert kinds(sequential).isdisjoint({GroupedExperts})
    found, expected = step_of(grouped, "cuda", model), step_of(sequential, "cuda", model)
    assert torch.equal(tokens_per_expert(grouped), tokens_per_expert(sequential))
    assert_close(found, expected)


@pytest.mark.parametrize("owned", [(2, 3), None])
def test_experts_without_tokens_take_part(implementation, owned):
    """Routers that cannot tell tokens apart send all of them to the same experts; the others' products have no rows."""
    gpt = gpt_on("cuda", owned, "bf16", made_of(implementation), router=torch.zeros_like)
    _, gradients = step_of(gpt, "cuda")
    counts = tokens_per_expert(gpt)
    assert ((counts > 0).sum(1) < MODEL.num_experts).all()
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        if ".experts." in name:
            layer, expert = int(name.split(".")[2]), int(name.split(".")[5])
            assert (gradient.abs().sum() > 0) == (counts[layer, expert] > 0), name


def test_widths_that_the_grouped_product_does_not_take_go_one_by_one(monkeypatch):
    model = tiny.section("qwen3_moe", hidden_size=128, expert_hidden_size=60, top_k=6, implementation="local")
    gpt = gpt_on("cuda", (2, 3), "bf16", model)
    answers, asked = [], grouped.products_are_grouped
    monkeypatch.setattr(grouped, "products_are_grouped", lambda *a: answers.append(asked(*a)) or answers[-1])
    ids = tiny.tokens(model).to("cuda")
    logits = forward_logits(gpt, ids).float().cpu()
    assert answers
    assert not any(answers)
    expected = forward_logits(gpt_on("cpu", (2, 3), "fp32", model), ids.cpu())
    assert (logits - expected).norm() < 0.03 * expected.norm()
