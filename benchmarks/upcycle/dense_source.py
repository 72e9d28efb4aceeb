"""A random dense checkpoint to upcycle, in the shape of a Qwen3 model."""

from collections.abc import Iterable
from pathlib import Path

import torch

from spes_mega.layout import CheckpointWriter, expected_tensors
from spes_mega.recipe import ModelSection

_SHAPES = {
    "tiny": {"num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 1536, "num_heads": 8, "vocab_size": 8192},
    "0.6b": {"num_layers": 28, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_heads": 16, "vocab_size": 151936},
    "small": {"num_layers": 4, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_heads": 16, "vocab_size": 151936},
    "9b": {"num_layers": 28, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_heads": 16, "vocab_size": 151936},
}
SIZES = tuple(_SHAPES)
"""9b: Qwen3-1.7B, which gives 9B with 8 experts; small: four layers of it; 0.6b: Qwen3-0.6B."""

_DTYPE = torch.bfloat16
_VALUES_AT_ONCE = 1 << 22


def dense_model(size: str) -> ModelSection:
    return ModelSection.model_validate(
        {
            "family": "qwen3",
            "num_kv_heads": 8,
            "head_dim": 128,
            "tie_embeddings": True,
            "max_seq_len": 40960,
            "rope_theta": 1_000_000,
            **_SHAPES[size],
        }
    )


def make_source(folder: Path, size: str, shards: int) -> Path:
    """Write it in `shards` files, or take what is there from a run before. bf16, memory for one piece of a tensor."""
    out = folder / f"dense-{size}-{shards}"
    if out.exists():
        return out
    model, rng = dense_model(size), torch.Generator().manual_seed(1)
    bytes_of = [torch.Size(shape).numel() * _DTYPE.itemsize for shape in expected_tensors(model).values()]
    limit = sum(bytes_of) // shards
    while _shards(bytes_of, limit) > shards:
        limit = limit * 101 // 100
    with CheckpointWriter(out, model, _DTYPE, max_shard_bytes=limit) as writer:
        for name, shape in expected_tensors(model).items():
            step = max(1, _VALUES_AT_ONCE * shape[0] // torch.Size(shape).numel())
            for start in range(0, shape[0], step):
                rows = torch.randn(min(step, shape[0] - start), *shape[1:], generator=rng)
                writer.write_rows(name, start, rows * 0.02 + (len(shape) == 1))
    return out


def _shards(bytes_of: Iterable[int], limit: int) -> int:
    """How many files of at most `limit` bytes the tensors take, in their order."""
    count, filled = 0, limit + 1
    for size in bytes_of:
        if filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count
