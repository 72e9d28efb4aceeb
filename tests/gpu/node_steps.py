"""Run by test_gpu_node.py, once a configuration: steps of a lone node on one GPU. Prints one line of JSON.

python -m tests.gpu.node_steps RECIPE OWNED
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from spes_mega.layout import initial_tensor
from spes_mega.node.launch.command import free_port
from spes_mega.node.main import prepare_process
from spes_mega.recipe import load_recipe

WARM_UP, MEASURED = 3, 10


class OneBatch:
    """The same samples at every step; what the trainer asks of a node's data."""

    def __init__(self, recipe):
        train, self.samples_per_step = recipe.train, recipe.train.micro_batch_size
        shape = (train.micro_batch_size, train.seq_len + 1)
        self.accumulation = 1
        self.tokens = np.random.default_rng(0).integers(0, recipe.model.vocab_size, shape)

    def batch(self, done, micro_step):
        return self.tokens


def measure(recipe, owned):
    from spes_mega.node.distributed.process_group import process_group
    from spes_mega.node.distributed.ranks import Ranks
    from spes_mega.node.stop import StopRequest
    from spes_mega.node.sync.weight_source import Position
    from spes_mega.node.trainer import Trainer
    from spes_mega.node.zero.local_model import LocalModel

    with tempfile.TemporaryDirectory() as folder, process_group():
        ranks, stop = Ranks(60), StopRequest()
        model = LocalModel(recipe, tuple(range(owned)), ranks, stop, Path(folder))
        shapes = model.shapes
        model.assign(shapes, lambda name: initial_tensor(recipe.model, name, shapes[name], recipe.train.seed))
        trainer = Trainer(recipe, model, OneBatch(recipe), ranks, stop)
        losses = [trainer.step(Position(0, step, samples=0)).lm_loss for step in range(WARM_UP)]
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses += [trainer.step(Position(0, WARM_UP + step, samples=0)).lm_loss for step in range(MEASURED)]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        names = [name for name, _ in model.gpt.named_parameters()]
    return {
        "tokens_per_s": MEASURED * recipe.train.seq_len * recipe.train.micro_batch_size / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "transformer_engine": any(name.endswith("linear_qkv.layer_norm_weight") for name in names),
        "losses": losses,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    prepare_process(1)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": str(free_port())})
    figures = measure(load_recipe(Path(sys.argv[1])), int(sys.argv[2]))
    sys.stdout.write(json.dumps(figures) + "\n")
