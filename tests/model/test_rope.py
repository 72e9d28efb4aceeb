"""Rotary embeddings: Llama 3's scaling to the last bit, other variants refused by name."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spes_mega.errors import RecipeError
from spes_mega.model import build
from tests.model import tiny

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_that_of_transformers(factor):
    scaling = LLAMA3 | {"factor": factor}
    model = tiny.section("llama", head_dim=128, rope_scaling=scaling, rope_theta=500_000.0)
    plain = build(tiny.recipe(model.model_copy(update={"rope_scaling": None}))).rotary_pos_emb.inv_freq
    ours = build(tiny.recipe(model)).rotary_pos_emb.inv_freq
    config = transformers.LlamaConfig(head_dim=128, rope_parameters=scaling | {"rope_theta": 500_000.0})
    theirs, attention_scaling = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert attention_scaling == 1.0
    assert torch.equal(ours, theirs)
    ratio = ours / plain
    # short wavelengths stay, long ones are divided by the factor, some lie between
    assert {1.0, 1 / factor} < set(ratio.tolist())


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 4.0},
        LLAMA3 | {"high_freq_factor": 8.0},
        LLAMA3 | {"original_max_position_embeddings": 4096},
        {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"},
    ],
)
def test_what_cannot_be_run_is_refused_by_name(scaling):
    model = tiny.section("llama", rope_scaling=scaling)
    with pytest.raises(RecipeError, match=rf"model.rope_scaling: RoPE variant '{scaling['rope_type']}'"):
        build(tiny.recipe(model))
