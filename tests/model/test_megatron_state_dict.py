"""What Megatron-Core's own GPTModel saves is a source like any other."""

import json

import pytest
import torch

from spes_mega.layout import make_config, open_checkpoint
from tests.model import tiny


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "olmo2"])
def test_a_saved_model_is_read_as_it_was_loaded(family, tmp_path):
    model = tiny.section(family)
    weights = tiny.random_weights(model)
    gpt = tiny.loaded(tiny.recipe(model), weights)
    (tmp_path / "config.json").write_text(json.dumps(make_config(model, None, torch.float32)))
    torch.save({"model": gpt.state_dict()}, tmp_path / "model.pt")
    with open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert list(checkpoint.names) == list(weights)
        for name in checkpoint.names:
            assert torch.equal(checkpoint.read(name), weights[name]), name
