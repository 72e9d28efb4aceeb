"""Models that take one training step on the same weights and batch: ours, with experts owned, and transformers'."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from spes_mega.layout import CheckpointWriter, initial_tensor, open_checkpoint
from spes_mega.layout.names import expected_tensors
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.weight_source import Position
from spes_mega.node.trainer import Trainer
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.recipe import Recipe

Step = Callable[[], float]
"""Takes one optimizer step; returns its language-model loss."""


class OneBatch:
    """The same samples at every step; what the trainer asks of a node's data."""

    def __init__(self, recipe: Recipe) -> None:
        train, self.samples_per_step = recipe.train, recipe.train.micro_batch_size
        shape = (train.micro_batch_size, train.seq_len + 1)
        self.accumulation = 1
        self.tokens = np.random.default_rng(0).integers(0, recipe.model.vocab_size, shape)

    def batch(self, done: int, micro_step: int) -> Any:
        return self.tokens


def write_weights(recipe: Recipe, folder: Path) -> None:
    """Freshly drawn weights as a checkpoint that both sides load."""
    with CheckpointWriter(folder, recipe.model, torch.float32) as writer:
        for name, shape in expected_tensors(recipe.model).items():
            writer.write(name, initial_tensor(recipe.model, name, shape, recipe.train.seed))


def ours(recipe: Recipe, folder: Path, owned: range, ranks: Ranks) -> Step:
    """A node that trains the experts `owned`, as `spes-mega launch` has it."""
    stop = StopRequest()
    model = LocalModel(recipe, tuple(owned), ranks, stop, folder)
    with open_checkpoint(folder) as checkpoint:
        model.assign(model.shapes, checkpoint.read)
    trainer = Trainer(recipe, model, OneBatch(recipe), ranks, stop)
    steps = iter(range(recipe.train.steps))

    def step() -> float:
        return trainer.step(Position(0, next(steps), samples=0)).lm_loss

    return step


def theirs(recipe: Recipe, folder: Path) -> Step:
    """`Qwen3MoeForCausalLM` with torch's fused AdamW, the load-balancing loss and clipping, as one would train it."""
    train = recipe.train
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.config.output_router_logits = True
    optimizer = torch.optim.AdamW(
        model.parameters(), train.lr, (train.adam_beta1, train.adam_beta2), weight_decay=train.weight_decay, fused=True
    )
    tokens = torch.from_numpy(OneBatch(recipe).tokens)

    def step() -> float:
        out = model(tokens[:, :-1], labels=tokens[:, :-1], shift_labels=tokens[:, 1:].contiguous())
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        return (out.loss - model.config.router_aux_loss_coef * out.aux_loss).item()

    return step
