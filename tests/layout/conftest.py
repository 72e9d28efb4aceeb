"""Tiny models and checkpoints; nothing here needs transformers."""

import pytest
import torch

from spes_mega.layout import FAMILIES, CheckpointWriter, expected_tensors, initial_tensor
from spes_mega.recipe import ModelSection

# head_dim is not hidden / heads; two query heads share a key head; the vocabulary is no round number.
SHAPE = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "vocab_size": 103, "max_seq_len": 128, "rope_theta": 50_000.0,
}  # fmt: skip
DENSE = {"ffn_hidden_size": 48}
MOE = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 24}


def section(family, **changes):
    declared = FAMILIES[family]
    widths = {**(MOE if declared.is_moe else DENSE)}
    if declared.has_shared_expert:
        widths["shared_expert_hidden_size"] = 20
    if declared.even_heads:
        widths["head_dim"] = 8
    return ModelSection(**{"family": family, **SHAPE, **widths, **changes})


@pytest.fixture(name="section")
def section_fixture():
    return section


@pytest.fixture
def make_checkpoint(tmp_path):
    """Write a random checkpoint; returns its folder and its tensors by canonical name."""

    def make(model, name="checkpoint", dtype=torch.float32, **options):
        tensors = {n: initial_tensor(model, n, shape, 7).to(dtype) for n, shape in expected_tensors(model).items()}
        with CheckpointWriter(tmp_path / name, model, dtype, **options) as writer:
            for key, tensor in tensors.items():
                writer.write(key, tensor)
        return tmp_path / name, tensors

    return make
