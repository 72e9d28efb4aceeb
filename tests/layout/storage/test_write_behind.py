import os

import pytest
import torch

from spes_mega.layout import CheckpointWriter, expected_tensors, open_checkpoint
from spes_mega.layout.storage.write_behind import WriteBehind
from spes_mega.recipe import ModelSection

MIB = 1 << 20


@pytest.fixture
def advised(monkeypatch):
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: calls.append(call))
    return calls


def test_writing_starts_at_once_except_for_small_parts(advised):
    behind = WriteBehind(drop=False)
    behind.wrote(3, 100, 2 * MIB)
    behind.wrote(3, 500, 1000)
    behind.wrote(4, 0, 600 * MIB)
    behind.wrote(4, 0, 600 * MIB)
    dont_need = os.POSIX_FADV_DONTNEED
    assert advised == [(3, 100, 2 * MIB, dont_need), (4, 0, 600 * MIB, dont_need), (4, 0, 600 * MIB, dont_need)]


def test_what_was_written_long_ago_is_dropped_once(advised):
    behind = WriteBehind(drop=True)
    for i in range(8):
        behind.wrote(5, i * 100 * MIB, 100 * MIB)
    starts = [offset // MIB for _, offset, _, _ in advised]
    assert starts == [0, 100, 200, 300, 400, 500, 0, 600, 100, 700, 200]


@pytest.mark.parametrize("cached", [True, False])
def test_what_is_on_the_disk_is_what_was_written(tmp_path, cached):
    model = ModelSection(
        family="llama", num_layers=2, hidden_size=512, num_heads=4, num_kv_heads=4, head_dim=128,
        ffn_hidden_size=1024, vocab_size=2000, max_seq_len=64,
    )  # fmt: skip
    shapes = expected_tensors(model)
    rng = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    with CheckpointWriter(tmp_path / "out", model, torch.float32, cached=cached) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    with open_checkpoint(tmp_path / "out") as written:
        for name, tensor in tensors.items():
            assert torch.equal(written.read(name), tensor)
