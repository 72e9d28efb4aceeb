"""Each patch of Megatron-Core on a release that is not as it was written for: left out, or refused by name."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import Router, TopKRouter
from torch import nn

from spes_mega import internals
from spes_mega.internals import IncompatibleError
from spes_mega.model import build, forward_logits, megatron_patches, weigh_owned_experts
from spes_mega.model.rope import apply_rotary
from tests.model import tiny

MODEL = tiny.section("qwen3_moe")


@pytest.fixture(autouse=True)
def every_line_is_said():
    internals._say_once.cache_clear()


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "spes_mega"]


def logits(**train):
    gpt = tiny.loaded(tiny.recipe(MODEL, **train), tiny.random_weights(MODEL))
    return gpt, forward_logits(gpt, tiny.tokens(MODEL)).detach()


def test_all_patches_fit_the_installed_release(caplog):
    megatron_patches.prepare_megatron()
    build(tiny.recipe(MODEL))
    assert megatron_patches.rotates_by_our_kernel()
    assert said(caplog) == []


def test_without_a_place_for_our_rotation_megatrons_own_is_used(monkeypatch, caplog):
    _, expected = logits()
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", None)
    plain = rope_utils.apply_rotary_pos_emb
    monkeypatch.setattr(rope_utils, "apply_rotary_pos_emb", lambda *args, **options: plain(*args, **options))
    gpt, other = logits()
    assert rope_utils.fused_apply_rotary_pos_emb is not apply_rotary
    assert not gpt.config.apply_rope_fusion
    assert not torch.equal(expected, other)  # it rounds elsewhere
    torch.testing.assert_close(expected, other, rtol=1e-4, atol=1e-5)
    (line,) = said(caplog)
    assert "does not use fused_apply_rotary_pos_emb;" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU there is its random state")
def test_without_a_place_for_the_random_state_recomputation_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(random, "_get_cuda_rng_state", None)
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: None)
    build(tiny.recipe(MODEL))
    with pytest.raises(IncompatibleError, match=r"megatron-core .*recompute activations \(set train\.recompute to"):
        build(tiny.recipe(MODEL, recompute="full"))
    (line,) = said(caplog)
    assert "does not use _get_cuda_rng_state;" in line


@pytest.mark.parametrize(
    ("owner", "name"), [(Router, "gating"), (torch.nn.Module, None)], ids=["another method", "another class"]
)
def test_a_router_that_goes_to_the_gpu_by_another_way_is_refused(monkeypatch, owner, name):
    if name is None:
        monkeypatch.delattr("megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding")
        name = "RotaryEmbedding"
    else:
        monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleError, match=f"has no attribute {name};"):
        megatron_patches.stay_on_cpu(nn.Module())


def test_an_output_layer_of_another_kind_keeps_its_order(monkeypatch, caplog):
    gpt, expected = logits()
    hooks = len(gpt.output_layer._forward_hooks)
    plain = type(gpt.output_layer).forward
    monkeypatch.setattr(type(gpt.output_layer), "forward", lambda self, x, **options: plain(self, x, **options))
    gpt, other = logits()
    assert (hooks, len(gpt.output_layer._forward_hooks)) == (1, 0)
    (line,) = said(caplog)
    assert "takes (x, options), not (input_, …);" in line
    torch.testing.assert_close(expected, other, rtol=1e-5, atol=1e-6)  # products of other shapes


def test_a_balance_loss_of_another_signature_is_refused(monkeypatch):
    gpt = build(tiny.recipe(MODEL), (2, 3))
    monkeypatch.setattr(TopKRouter, "_apply_aux_loss", lambda self, logits, probs: probs)
    with pytest.raises(IncompatibleError, match=r"not \(self, probs, scores_for_aux_loss, …\)"):
        weigh_owned_experts(gpt, 0.7)


def test_a_layer_spec_of_another_kind_is_refused():
    spec = SimpleNamespace(submodules=SimpleNamespace(mlp=SimpleNamespace()))
    with pytest.raises(IncompatibleError, match="SimpleNamespace has no attribute submodules"):
        megatron_patches.mlp_submodules(spec)


def test_a_table_of_router_losses_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(moe_utils, "get_moe_layer_wise_logging_tracker")
    monkeypatch.setitem(__import__("sys").modules, "megatron.core.transformer.moe.moe_logging", None)
    with pytest.raises(IncompatibleError, match="has no attribute get_moe_layer_wise_logging_tracker"):
        megatron_patches.router_loss_sums()


def test_the_table_of_router_losses_of_either_release_is_read(monkeypatch):
    sums = {"z_loss": torch.ones(2)}
    new = SimpleNamespace(metrics={"z_loss": SimpleNamespace(values=sums["z_loss"])})
    for tracked in ({"z_loss": {"values": sums["z_loss"]}}, new.metrics):
        monkeypatch.setattr(megatron_patches, "_tracked_losses", lambda table=tracked: table)
        assert megatron_patches.router_loss_sums()["z_loss"] is sums["z_loss"]
    monkeypatch.setattr(megatron_patches, "_tracked_losses", lambda: {"z_loss": {"sum": 1}})
    with pytest.raises(IncompatibleError, match="table of the routers' losses"):
        megatron_patches.router_loss_sums()


def test_a_name_that_the_release_leaves_undefined_is_defined_and_no_other_is_touched(monkeypatch):
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    megatron_patches.prepare_megatron()
    assert moe_utils.te_general_gemm is None
    monkeypatch.setattr(moe_utils, "te_general_gemm", len)
    megatron_patches.prepare_megatron()
    assert moe_utils.te_general_gemm is len
