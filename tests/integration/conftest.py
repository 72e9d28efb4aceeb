"""Recipes, data and processes for the integration tests."""

import os
import random

import deepspeed
import numpy as np
import pytest
import torch
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from spes_mega.model import ensure_parallel_state
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.recipe import load_recipe
from tests.integration import processes

VOCAB = 48
MODEL = {
    "family": "qwen3_moe", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "num_experts": 4, "top_k": 2, "expert_hidden_size": 24, "vocab_size": VOCAB, "max_seq_len": 64,
}  # fmt: skip
TRAIN = {
    "steps": 6,
    "seq_len": 16,
    "micro_batch_size": 4,
    "lr": 0.01,
    "warmup_steps": 2,
    "dtype": "fp32",
    "log_every": 1,
}
SPES = {"sync_every": 2, "snapshot_every": 100, "join_deadline_s": 240, "round_deadline_s": 240, "rpc_deadline_s": 60}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Text that can be learned: every token is the last one plus 1, 2 or 3, modulo the vocabulary."""
    prefix = tmp_path_factory.mktemp("data") / "data"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    draw = random.Random(0)
    for _ in range(40):
        tokens = [draw.randrange(VOCAB)]
        while len(tokens) < 100:
            tokens.append((tokens[-1] + draw.choice((1, 2, 3))) % VOCAB)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="session")
def write_recipe(dataset):
    """Write a recipe file; sections are overlaid on the defaults above (a model takes the place of the default)."""

    def write(folder, name="recipe", model=MODEL, **sections):
        raw = {"model": model, "train": TRAIN, "spes": SPES, "data": {"train": str(dataset)}}
        raw = {key: value | sections.pop(key, {}) for key, value in raw.items()} | sections
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(raw))
        load_recipe(path)
        return path

    return write


@pytest.fixture(scope="session")
def ranks():
    """This process as the only rank of a node."""
    torch.set_num_threads(1)  # as the processes that it is compared with: sums of two threads are rounded otherwise
    ensure_parallel_state()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    return Ranks(60)


@pytest.fixture
def running():
    """Collects processes: `running(Hub(...))`; what still runs at the end is killed."""
    started = []

    def add(process):
        started.append(process)
        return process

    yield add
    for process in started:
        process.end()


@pytest.fixture
def start_hub(running):
    return lambda *arguments: running(processes.Hub(*arguments))


@pytest.fixture
def start_node(running):
    return lambda *arguments, **options: running(processes.launch(*arguments, **options))
