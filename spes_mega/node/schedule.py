"""What changes in the course of training, as functions of the step alone: it follows the round after a pause."""

import math

from spes_mega.recipe import TrainSection

OWNED_BALANCE_FROM = 0.7
"""Weight of owned experts in the balance loss at step 0 (the reference's)."""


def learning_rate(step: int, train: TrainSection) -> float:
    """Rate of optimizer step `step` (the first is 1): linear warm-up, then cosine down to `min_lr_ratio`.

    Warm-up begins with `warmup_from` at step 0, which is never taken, and ends with the peak at step `warmup_steps`;
    the minimum is reached at the last step.
    """
    if step <= train.warmup_steps:
        return train.lr * (train.warmup_from + (1 - train.warmup_from) * step / train.warmup_steps)
    progress = (min(step, train.steps) - train.warmup_steps) / (train.steps - train.warmup_steps)
    lowest = train.lr * train.min_lr_ratio
    return lowest + (train.lr - lowest) * (1 + math.cos(math.pi * progress)) / 2


def owned_balance_weight(step: int, train: TrainSection) -> float:
    """Weight of owned experts in the balance loss: from 0.7 linearly to 1 over `aux_loss_warmup` of the steps."""
    warmup = train.aux_loss_warmup * train.steps
    return 1.0 if step >= warmup else OWNED_BALANCE_FROM + (1 - OWNED_BALANCE_FROM) * step / warmup
