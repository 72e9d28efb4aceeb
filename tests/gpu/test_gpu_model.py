"""The model on a CUDA device: against the CPU's, Transformer Engine's modules against the local ones, and experts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from spes_mega.model import build, export_weights, load_weights, tokens_per_expert
from spes_mega.model import grouped_experts as grouped
from spes_mega.model.grouped_experts import GroupedExperts
from spes_mega.model.partitioned_experts import partitioned_experts
from tests.gpu.steps import LENGTH, MODEL, PARTITIONS, gpt_on, logits_and_gradients, made_of, step_of
from tests.model import tiny

pytestmark = pytest.mark.requires_gpu


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """(model, owned) -> logits and gradients of the CPU in fp32; frozen experts are in bf16 there, too."""
    out = tmp_path_factory.mktemp("cpu") / "steps.pt"
    command = [sys.executable, "-m", "tests.gpu.steps", out]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out)


def assert_close(found, expected, of_logits=0.03, of_gradients=0.06):
    """Within what bf16's 8 bits leave, of each tensor as a whole."""
    (logits, gradients), (expected_logits, reference) = found, expected
    assert (logits - expected_logits).norm() < of_logits * expected_logits.norm()
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert (gradient - reference[name]).norm() <= of_gradients * reference[name].norm(), name


def test_the_default_device_is_the_gpu_and_round_trips(implementation):
    weights = tiny.random_weights(MODEL, dtype=torch.bfloat16)
    gpt = build(tiny.recipe(made_of(implementation, "top-2"), dtype="bf16"), (2, 3))
    load_weights(gpt, MODEL, weights.__getitem__)
    assert {parameter.device.type for parameter in gpt.parameters()} == {"cuda"}
    for name, tensor in export_weights(gpt, MODEL):
        assert torch.equal(tensor.cpu(), weights[name]), name


def test_auto_takes_transformer_engine_here(transformer_engine):
    parameters = dict(build(tiny.recipe(made_of("auto", "top-2"), dtype="bf16"), (2, 3)).named_parameters())
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in parameters


@pytest.mark.parametrize("owned", PARTITIONS)
def test_logits_and_gradients_are_the_cpu_models(on_the_cpu, implementation, owned):
    found = logits_and_gradients("cuda", owned, "bf16", made_of(implementation, "to all"))
    assert_close(found, on_the_cpu["to all", owned])


@pytest.mark.parametrize("owned", PARTITIONS)
def test_transformer_engine_computes_what_the_local_modules_do(transformer_engine, owned):
    local = logits_and_gradients("cuda", owned, "bf16", made_of("local", "to all"))
    assert_close(logits_and_gradients("cuda", owned, "bf16", made_of("transformer_engine", "to all")), local)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_frozen_experts_in_bf16_train_what_is_below_them(on_the_cpu, implementation, dtype):
    found = logits_and_gradients("cuda", (2, 3), dtype, made_of(implementation, "to all"))
    assert {int(name.split(".")[5]) for name in found[1] if ".experts." in name} == {2, 3}
    assert_close(found, on_the_cpu["to all", (2, 3)])


def test_most_tokens_are_routed_as_on_the_cpu(on_the_cpu, implementation):
    gpt = gpt_on("cuda", (2, 3), "bf16", made_of(implementation, "top-2"))
    logits, _ = step_of(gpt, "cuda", MODEL)
    expected, _ = on_the_cpu["top-2", (2, 3)]
    close = (logits - expected).norm(dim=-1) < 0.05 * expected.norm(dim=-1)
    assert close.float().mean() > 0.9
    assert tokens_per_expert(gpt).sum(1).tolist() == [2 * LENGTH * MODEL.top_k] * MODEL.num_layers


def products_of_a_step(monkeypatch, module, name, owned, model):
    """How often `module.name`, the grouped matrix product, is called in one forward and backward pass."""
    calls, product = [], getattr(module, name)
    gpt = gpt_on("cuda", owned, "bf16", model)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *a, **k: calls.append(name) or product(*a, **k))
        step_of(gpt, "cuda", model)
    return len(calls)


@pytest.mark.parametrize("owned", PARTITIONS)
def test_frozen_groups_have_no_products_for_weight_gradients(monkeypatch, implementation, owned):
    module, name = F, "grouped_mm"
    if implementation == "transformer_engine":
        module, name = pytest.importorskip("transformer_engine.pytorch.module.grouped_linear"), "general_grouped_gemm"
    model = made_of(implementation, "top-2")
    (experts, *_) = partitioned_experts(gpt_on("cuda", owned, "bf16", model))
    # of two matrices: forward, and the gradients of their input and of themselves
    expected = sum(6 if run.owned else 4 for run in experts.runs) * MODEL.num_layers
    assert products_of_a_step(monkeypatch, module, name, owned, model) == expected


def kinds(gpt):
    return {type(group) for experts in partitioned_experts(gpt) for group in experts.groups}


@pytest.mark.parametrize("owned", PARTITIONS)
def test_grouped_products_give_what_sequential_experts_give(owned):
    """In one layer, below which nothing differs, so that the router chooses alike."""
    model = made_of("local", "one layer")
    grouped, sequential = (gpt_on("cuda", owned, "bf16", model, zero_stage=stage) for stage in (1, 3))
    assert kinds(grouped) == {GroupedExperts}
    assert kinds(sequential).isdisjoint({GroupedExperts})
    found, expected = step_of(grouped, "cuda", model), step_of(sequential, "cuda", model)
    assert torch.equal(tokens_per_expert(grouped), tokens_per_expert(sequential))
    assert_close(found, expected)


@pytest.mark.parametrize("owned", [(2, 3), None])
def test_experts_without_tokens_take_part(implementation, owned):
    """Routers that cannot tell tokens apart send all of them to the same experts; the others' products have no rows."""
    gpt = gpt_on("cuda", owned, "bf16", made_of(implementation, "top-2"), router=torch.zeros_like)
    _, gradients = step_of(gpt, "cuda", MODEL)
    counts = tokens_per_expert(gpt)
    assert ((counts > 0).sum(1) < MODEL.num_experts).all()
    for name, gradient in gradients.items():
        assert torch.isfinite(gradient).all(), name
        if ".experts." in name:
            layer, expert = int(name.split(".")[2]), int(name.split(".")[5])
            assert (gradient.abs().sum() > 0) == (counts[layer, expert] > 0), name


def test_widths_that_the_grouped_product_does_not_take_go_one_by_one(on_the_cpu, monkeypatch):
    answers, asked = [], grouped.products_are_grouped
    monkeypatch.setattr(grouped, "products_are_grouped", lambda *a: answers.append(asked(*a)) or answers[-1])
    found = logits_and_gradients("cuda", (2, 3), "bf16", made_of("local", "odd width"))
    assert answers
    assert not any(answers)
    assert_close(found, on_the_cpu["odd width", (2, 3)])
