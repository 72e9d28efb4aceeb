"""The learning rate as a function of the step alone, so that it follows the round after a pause or a skip."""

import math

from spes_mega.recipe import TrainSection


def learning_rate(step: int, train: TrainSection) -> float:
    """Rate of optimizer step `step` (the first is 1): linear warm-up, then cosine down to `min_lr_ratio`.

    The peak is reached at step `warmup_steps`, the minimum at the last step.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    progress = (min(step, train.steps) - train.warmup_steps) / (train.steps - train.warmup_steps)
    lowest = train.lr * train.min_lr_ratio
    return lowest + (train.lr - lowest) * (1 + math.cos(math.pi * progress)) / 2
