"""What each family holds, and why it refuses the rest."""

import pytest
import torch
from pydantic import ValidationError

from spes_mega.errors import CheckpointError
from spes_mega.layout import FAMILIES, MOE_OF, expected_tensors, parse_config
from spes_mega.layout.families.config_json import make_config
from spes_mega.layout.families.optional_parts import (
    check_holds,
    optional_part,
    shared_expert_width,
    unused_parts,
)
from spes_mega.recipe import MIXED_FAMILIES, MOE_FAMILIES

# Which dense or MoE model can become which MoE model without a change of what it computes.
HOLDS = {
    "qwen3": {"qwen3_moe"},
    "qwen2": {"qwen2_moe"},
    "llama": {"mixtral", "qwen2_moe"},
    "mistral": {"mixtral", "qwen2_moe"},
    "olmo2": {"flex_olmo"},
    "qwen3_moe": {"qwen3_moe"},
    "mixtral": {"mixtral", "qwen2_moe"},
    "qwen2_moe": {"qwen2_moe"},
    "olmoe": {"olmoe"},
    "flex_olmo": {"flex_olmo"},
}


@pytest.mark.parametrize("source", FAMILIES)
@pytest.mark.parametrize("to", MOE_FAMILIES)
def test_who_holds_whom(section, source, to):
    reason = FAMILIES[to].refuses(section(source, head_dim=8), FAMILIES[source])
    assert (reason is None) == (to in HOLDS[source]), reason


def test_the_natural_family_holds_its_source(section):
    assert set(MOE_OF) == {name for name, family in FAMILIES.items() if not family.is_moe}
    assert all(MOE_OF[source] in HOLDS[source] for source in MOE_OF)


@pytest.mark.parametrize(
    ("source", "to", "changes", "reason"),
    [
        ("qwen3", "mixtral", {}, "qwen3 normalizes queries and keys over each head, mixtral has no norm"),
        ("llama", "olmoe", {}, "llama has no norm on queries and keys, olmoe normalizes .* over their whole width"),
        ("qwen3", "olmoe", {}, "over each head, olmoe normalizes queries and keys over their whole width"),
        ("olmo2", "qwen3_moe", {}, "over their whole width, qwen3_moe normalizes queries and keys over each head"),
        ("olmo2", "olmoe", {}, "olmo2 normalizes the outputs of attention .*, olmoe normalizes the inputs"),
        ("qwen2", "mixtral", {}, "qwen2 has biases on the query, key and value projections"),
        ("qwen2_moe", "mixtral", {}, "qwen2_moe has biases"),
        ("mistral", "qwen2_moe", {"sliding_window": 64}, "a sliding window of 64 positions, qwen2_moe has none"),
        ("mixtral", "llama", {}, "mixtral is a Mixture-of-Experts, llama is dense"),
    ],
)
def test_reasons(section, source, to, changes, reason):
    with pytest.raises(CheckpointError, match=f"{to} cannot hold this {source} model: .*{reason}"):
        check_holds(section(source, **changes), to)


def test_reasons_that_depend_on_the_weights_and_on_other_settings(section):
    model = section("qwen2_moe")
    family = FAMILIES["mixtral"].refuses
    assert "shared expert" in family(model, FAMILIES["qwen2_moe"], {"qkv_bias"})
    assert family(model, FAMILIES["qwen2_moe"], {"qkv_bias", "shared_expert"}) is None
    dense = section("qwen2_moe", dense_layers=(1,), ffn_hidden_size=40)
    assert "layers 1 are dense" in family(dense, FAMILIES["qwen2_moe"], {"qkv_bias", "shared_expert"})
    plain = section("qwen2_moe", norm_topk_prob=False)
    assert "always renormalizes" in family(plain, FAMILIES["qwen2_moe"], {"qkv_bias", "shared_expert"})


def test_a_refusal_names_who_can(section):
    with pytest.raises(CheckpointError, match=r"; qwen3_moe can$"):
        check_holds(section("qwen3"), "mixtral")
    with pytest.raises(CheckpointError, match=r"; flex_olmo can$"):
        check_holds(section("olmo2"), "olmoe")


def test_unused_parts_are_seen_by_their_values(section):
    model = section("qwen2_moe")
    weights = {name: torch.ones(shape) for name, shape in expected_tensors(model).items()}
    asked = set()

    def read(name):
        asked.add(name)
        return weights[name]

    def silence(*endings):
        for name in weights:
            if name.endswith(endings):
                weights[name] = torch.zeros_like(weights[name])

    assert unused_parts(model, read) == set()
    assert {optional_part(name) for name in asked} <= {"qkv_bias", "shared_expert"}
    silence("k_proj.bias", "q_proj.bias", "shared_expert_gate.weight", "0.mlp.shared_expert.up_proj.weight")
    assert unused_parts(model, read) == set()  # sigmoid(0) is a half: a gate of zeros closes nothing
    silence("v_proj.bias")
    assert unused_parts(model, read) == {"qkv_bias"}
    silence("1.mlp.shared_expert.down_proj.weight")
    assert unused_parts(model, read) == {"qkv_bias", "shared_expert"}
    assert unused_parts(section("llama"), read) == set()


def test_width_of_shared_experts(section):
    assert shared_expert_width(section("llama"), "mixtral") is None
    assert shared_expert_width(section("qwen2"), "qwen2_moe") == 16
    assert shared_expert_width(section("qwen2_moe"), "qwen2_moe") == 20


def test_the_recipe_knows_the_same_families(section):
    assert set(MOE_FAMILIES) == {name for name, family in FAMILIES.items() if family.is_moe}
    assert set(MIXED_FAMILIES) == {name for name, family in FAMILIES.items() if family.can_mix_dense}
    for name, family in FAMILIES.items():
        model = section(name)
        assert (model.shared_expert_hidden_size is not None) == family.has_shared_expert
        for change, able in (
            ({"sliding_window": 8}, family.sliding_window),
            ({"head_dim": 16}, not family.even_heads),
            ({"shared_expert_hidden_size": 8}, family.has_shared_expert),
            ({"dense_layers": (0,), "ffn_hidden_size": 40}, family.can_mix_dense),
            ({"norm_topk_prob": False}, not family.always_renormalizes),
        ):
            if able:
                section(name, **change)
            elif family.is_moe or "dense_layers" not in change:
                with pytest.raises(ValidationError):
                    section(name, **change)


@pytest.mark.parametrize(("given", "read"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)])
def test_what_mistral_takes_a_missing_sliding_window_for(section, given, read):
    raw = make_config(section("mistral"), None, torch.float32)
    del raw["sliding_window"]
    assert parse_config(raw | given).sliding_window == read


def test_a_window_that_qwen_does_not_use_is_no_window(section):
    raw = make_config(section("qwen2"), None, torch.float32) | {"sliding_window": 32768, "use_sliding_window": False}
    assert parse_config(raw).sliding_window is None


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_rope_variants_are_carried_through_unchanged(section, kind, spelling):
    half = section("llama").head_dim // 2
    original = {"original_max_position_embeddings": 64}
    numbers = {"yarn": {"beta_fast": 32, "truncate": False, **original}, "llama3": LLAMA3}
    numbers["longrope"] = {"short_factor": [1.0] * half, "long_factor": [1.5] * half, **original}
    variant = {"rope_type": kind, "factor": 4.0, **numbers.get(kind, {})}
    raw = make_config(section("llama"), None, torch.float32)
    raw |= {"rope_scaling": None, "rope_parameters": None, "rope_theta": 5e5}
    model = parse_config(raw | {spelling: variant | ({"rope_theta": 5e5} if spelling == "rope_parameters" else {})})
    written = make_config(model, None, torch.float32)
    assert written["rope_scaling"] == variant
    assert written["rope_parameters"] == variant | {"rope_theta": 5e5}


def test_an_unknown_rope_variant_is_refused_by_name(section):
    raw = make_config(section("llama"), None, torch.float32)
    with pytest.raises(CheckpointError, match=r"RoPE variant 'mrope' is not supported .supported: default, linear"):
        parse_config(raw | {"rope_parameters": {"rope_type": "mrope", "rope_theta": 5e4}})


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias is False"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "'shared_expert_intermediate_size' is missing"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"head_dim": 16}, "olmoe needs num_heads . head_dim to be hidden_size 32"),
        ("olmo2", {"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_what_a_family_may_not_have_is_refused_by_name(section, family, changes, said):
    raw = make_config(section(family), None, torch.float32)
    with pytest.raises(CheckpointError, match=said):
        parse_config(raw | changes)
