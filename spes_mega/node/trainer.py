"""One optimizer step of a node: forward and backward over the micro-batches, update, figures.

Axes: B micro-batch, S sequence, V vocabulary.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from spes_mega.data.samples import NodeData
from spes_mega.data.token_stream import Tokens
from spes_mega.model import (
    forward_logits,
    language_model_loss,
    reset_tokens_per_expert,
    set_router_loss_scale,
    take_router_losses,
    tokens_per_expert,
    weigh_owned_experts,
)
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.metrics import StepMetrics
from spes_mega.node.schedule import learning_rate, owned_balance_weight
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.weight_source import Position
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.recipe import Recipe


@dataclass
class Trainer:
    """Takes optimizer steps; data and learning rate of a step follow from the position before it alone."""

    recipe: Recipe
    model: LocalModel
    data: NodeData
    ranks: Ranks
    stop: StopRequest

    @property
    def engine(self) -> Any:
        return self.model.engine  # another one after a change of ownership

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks of the node train on in one step."""
        return self.data.samples_per_step * self.recipe.train.seq_len

    def after(self, at: Position) -> Position:
        """Return where the node is when the step that follows `at` is done."""
        assert at.samples is not None
        samples = at.samples + self.data.samples_per_step
        return Position(at.round, at.step + 1, at.tokens + self.tokens_per_step, samples)

    def step(self, at: Position) -> StepMetrics:
        """Take the optimizer step that follows `at` on all ranks.

        Raises:
            DataError: a token is outside the vocabulary. Stopped: a signal has come. Both before anything changes.
        """
        start, step = time.monotonic(), at.step + 1
        batches = self.ranks.agree(lambda: self._batches(at))
        rate = learning_rate(step, self.recipe.train)
        self._set_learning_rate(rate)
        if self.recipe.train.aux_loss_warmup:
            weigh_owned_experts(self.engine.module, owned_balance_weight(step, self.recipe.train))
        losses = self._train_on(batches)
        means = self._average(losses)
        return StepMetrics(
            step=step,
            round=at.round,
            **means,
            grad_norm=float(self.engine.get_global_grad_norm()),
            lr=rate,
            tokens_per_s=self.tokens_per_step / (time.monotonic() - start),
        )

    def _batches(self, at: Position) -> list[Tokens]:
        self.stop.check()
        assert at.samples is not None, "Resume has worked it out"
        return [self.data.batch(at.samples, micro_step) for micro_step in range(self.data.accumulation)]

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate

    def _train_on(self, batches: list[Tokens]) -> torch.Tensor:
        """Forward, backward and update; sums over micro-batches of lm loss and z-loss on the logits: fp64 [2]."""
        train = self.recipe.train
        set_router_loss_scale(1 / self.data.accumulation)  # the engine divides the loss that it is given alike
        self.engine.train()
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        for batch in batches:
            tokens = torch.from_numpy(batch).to(self.ranks.device)
            inputs_BS, labels_BS = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            logits_BSV = forward_logits(self.engine, inputs_BS)
            lm_loss, z_loss = language_model_loss(logits_BSV, labels_BS, train.logit_z_loss_coeff, use_up=True)
            del logits_BSV
            self.engine.backward(lm_loss + z_loss)
            self.engine.step()
            sums += torch.stack([lm_loss.detach(), z_loss.detach()])
        return sums

    def _average(self, sums: torch.Tensor) -> dict[str, Any]:
        """Figures of a step: losses averaged over micro-batches and ranks, tokens per expert summed over them."""
        train, model = self.recipe.train, self.recipe.model
        router = take_router_losses(model.num_moe_layers, self.data.accumulation)
        module = self.engine.module
        counts = tokens_per_expert(module)
        means = torch.cat([sums.cpu() / self.data.accumulation, torch.tensor([router.balance, router.z])])
        total = self.ranks.sum(torch.cat([means / self.ranks.size, counts.flatten().double()]))
        reset_tokens_per_expert(module)
        lm_loss, logit_z_loss, balance, router_z = total[:4].tolist()
        return {
            "lm_loss": lm_loss,
            "aux_loss": balance,
            "z_loss": router_z,
            "logit_z_loss": logit_z_loss / train.logit_z_loss_coeff if train.logit_z_loss_coeff else 0.0,
            "tokens_per_expert": total[4:].long().view(counts.shape).tolist(),
        }
