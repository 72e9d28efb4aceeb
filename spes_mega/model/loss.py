"""Logits and the language-model losses. Axes: B batch, S sequence, V vocabulary."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PART_ELEMENTS = 1 << 22
"""Logits that are worked on at a time: 16 MiB in fp32."""


def forward_logits(gpt: nn.Module, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] for whole sequences of token ids, under causal attention; `gpt` may be wrapped by an engine."""
    positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    return gpt(tokens_BS, positions, None)


def language_model_loss(
    logits_BSV: torch.Tensor, labels_BS: torch.Tensor, logit_z_loss_coeff: float, *, use_up: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy, and the weighted z-loss on the output logits; fp32 scalars, their sum is to be minimized.

    `labels_BS` are the next tokens (already shifted). Both losses come from one logsumexp Z over the vocabulary:
    cross entropy is mean(Z - logit of the label), z-loss is `logit_z_loss_coeff` * mean(Z^2). They are computed in
    fp32, some positions at a time: no fp32 copy of all logits is made, and no intermediate result of their size kept.

    With `use_up` the backward pass, which can then be run but once, writes the logits' gradient over the logits.
    """
    losses = _Losses.apply(logits_BSV.flatten(0, -2), labels_BS.flatten(), logit_z_loss_coeff, use_up)  # type: ignore[no-untyped-call]
    return losses[0], losses[1]


class _Losses(torch.autograd.Function):
    """N positions, each with logits over V tokens."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, coefficient: float, use_up: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalizer_N = torch.cat([part.float().logsumexp(-1) for (part,) in _parts(logits_NV)])
        chosen_N = logits_NV.gather(-1, labels_N.unsqueeze(-1)).squeeze(-1).float()
        ctx.save_for_backward(logits_NV, labels_N, normalizer_N)
        ctx.coefficient, ctx.use_up = coefficient, use_up
        return (normalizer_N - chosen_N).mean(), coefficient * normalizer_N.square().mean()

    @staticmethod
    def backward(ctx: Any, d_lm: torch.Tensor, d_z: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_NV, labels_N, normalizer_N = ctx.saved_tensors
        count = len(labels_N)
        d_normalizer_N = (d_lm + 2 * ctx.coefficient * d_z * normalizer_N) / count
        gradient_NV = logits_NV if ctx.use_up else torch.empty_like(logits_NV)
        parts = _parts(gradient_NV, logits_NV, labels_N, normalizer_N, d_normalizer_N)
        for out, logits, labels, normalizer, d_normalizer in parts:
            part = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
            torch.sub(logits, normalizer.unsqueeze(-1), out=part).exp_().mul_(d_normalizer.unsqueeze(-1))
            part.scatter_add_(-1, labels.unsqueeze(-1), (-d_lm / count).expand(len(labels), 1))
            if part is not out:
                out.copy_(part)
        return gradient_NV, None, None, None


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Rows of the first, which are `PART_ELEMENTS` elements, with the same rows of the others."""
    rows = max(1, PART_ELEMENTS // tensors[0].shape[1])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
