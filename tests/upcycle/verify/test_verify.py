"""Verification without transformers: what it finds, what it lets pass, and what it costs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spes_mega.errors import VerificationError
from tests.upcycle.making import run, verified

ROOT = Path(__file__).parents[3]
SPLIT = {"method": "split", "num_experts": 3, "granularity": 4, "router_init": "normal"}
PARTITION = {"method": "partition", "num_experts": 4, "top_k": 4}


def edit(folder, name, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state[name])
    save_file(state, path, {"format": "pt"})


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "copy"},
        {"method": "copy", "router_init": "mlp_std"},
        {"method": "noise", "noise_std": 0},
        SPLIT,
        SPLIT | {"granularity": 3},
        PARTITION,
        PARTITION | {"partition_by": "kmeans"},
        {"method": "drop", "drop_ratio": 0.0},
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "olmo2"])
def test_exact_methods_are_found_exact(make_dense, tmp_path, family, settings):
    plan = run(make_dense(family), tmp_path / "moe", **settings)
    found = verified(tmp_path / "dense", tmp_path / "moe", plan)
    assert found.difference is None
    assert len(found.layers) == 2
    assert found.max_difference <= 1e-5
    assert all(layer.kind == "experts" and layer.experts <= 1e-5 for layer in found.layers)


@pytest.mark.parametrize(
    ("settings", "least", "experts_equal"),
    [
        ({"method": "noise", "noise_std": 0.1}, 0.05, False),
        ({"method": "drop", "drop_ratio": 0.3}, 0.05, False),
        (PARTITION | {"top_k": 2}, 0.05, True),
        (PARTITION | {"router_init": "mlp_std"}, 0.01, True),
    ],
)
def test_the_gap_of_other_methods_is_reported(make_dense, tmp_path, settings, least, experts_equal):
    plan = run(make_dense(), tmp_path / "moe", **settings)
    found = verified(tmp_path / "dense", tmp_path / "moe", plan)
    assert found.difference == plan.difference()
    for layer in found.layers:
        assert layer.output > least
        assert (layer.experts <= 1e-5) == experts_equal


@pytest.mark.parametrize(
    ("dtype", "settings", "allowed"),
    [
        (torch.bfloat16, {"method": "copy"}, 1e-4),  # bf16 to bf16 loses nothing
        (torch.bfloat16, SPLIT, 1e-4),  # nor does a factor of 2
        (torch.bfloat16, SPLIT | {"granularity": 3}, 1e-4 + 4 * 2**-7),
        (torch.float32, {"method": "copy", "dtype": "bf16"}, 1e-4 + 4 * 2**-7),
        (torch.float32, {"method": "copy", "dtype": "fp16"}, 1e-4 + 4 * 2**-10),
    ],
)
def test_what_rounding_is_allowed(make_dense, tmp_path, dtype, settings, allowed):
    plan = run(make_dense(dtype=dtype), tmp_path / "moe", **settings)
    found = verified(tmp_path / "dense", tmp_path / "moe", plan)
    assert found.allowed == pytest.approx(allowed)
    assert (found.difference is None) == (allowed == 1e-4)
    assert found.max_difference <= 1e-5 if allowed == 1e-4 else 1e-5 < found.max_difference < allowed / 2


def test_dense_layers_of_the_result_are_compared_as_such(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", method="noise", moe_layers="1")
    first, second = verified(tmp_path / "dense", tmp_path / "moe", plan).layers
    assert (first.kind, first.experts, first.output) == ("dense", None, 0.0)
    assert (second.kind, second.output > 1e-3) == ("experts", True)


def test_every_expert_is_checked_even_those_that_the_router_never_takes(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", method="copy", num_experts=8)
    chosen = set(torch.topk(torch.zeros(8), 2).indices.tolist())
    expert = next(e for e in range(8) if e not in chosen)
    name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
    edit(tmp_path / "moe", name, lambda tensor: tensor[4].add_(0.1))
    with pytest.raises(VerificationError, match=rf"moe: layer 1, expert {expert}: differs .* don't use it"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


def test_a_part_of_a_group_is_named_by_the_groups_first_expert(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", **SPLIT)
    edit(tmp_path / "moe", "model.layers.0.mlp.experts.6.down_proj.weight", lambda tensor: tensor.mul_(1.05))
    with pytest.raises(VerificationError, match=r"layer 0, expert 4: differs from the FFN"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


def test_a_router_that_mixes_groups_is_found(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", **SPLIT)
    edit(tmp_path / "moe", "model.layers.1.mlp.gate.weight", lambda tensor: tensor.copy_(torch.randn(tensor.shape)))
    with pytest.raises(VerificationError, match=r"layer 1: its output differs from the source's"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_norm.weight"],
)
def test_what_was_carried_over_is_compared_bit_for_bit(make_dense, tmp_path, name):
    plan = run(make_dense(), tmp_path / "moe", method="copy")
    assert verified(tmp_path / "dense", tmp_path / "moe", plan).equal_tensors == 2 * 8 + 3
    edit(tmp_path / "moe", name, lambda tensor: tensor.view(-1)[-1:].view(torch.int32).add_(1))
    with pytest.raises(VerificationError, match=f"{name}: not what the source has"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


def test_a_shared_expert_that_does_something_is_found(make_dense, tmp_path):
    plan = run(make_dense("qwen2"), tmp_path / "moe", method="copy")
    name = "model.layers.1.mlp.shared_expert.up_proj.weight"
    edit(tmp_path / "moe", name, lambda tensor: tensor.fill_(0.1))
    with pytest.raises(VerificationError, match=f"{name}: not zero"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


def test_nan_in_the_result_is_never_within_the_expected(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", method="noise")
    name = "model.layers.1.mlp.experts.7.up_proj.weight"
    edit(tmp_path / "moe", name, lambda tensor: tensor[0, 0].fill_(float("nan")))
    with pytest.raises(VerificationError, match=r"layer 1, expert 7: differs .* by inf"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


def test_a_changed_config_is_found(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", method="copy")
    path = tmp_path / "moe/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_topk_prob": False}))
    with pytest.raises(VerificationError, match="norm_topk_prob: True expected, False found"):
        verified(tmp_path / "dense", tmp_path / "moe", plan)


def test_it_works_where_transformers_is_not_installed(make_dense, tmp_path):
    src = make_dense()
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from spes_mega.cli import main\n"
        f"main(['upcycle', {str(src)!r}, '--out', {str(tmp_path / 'moe')!r}, '--method', 'copy', '--verify'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"^ +1 +experts +\S+ +\S+$", done.stdout, re.MULTILINE)
    assert "(equal: rounding explains up to 0.0001)" in done.stdout
