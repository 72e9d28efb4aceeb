"""Logits and the language-model losses. Axes: B batch, S sequence, V vocabulary."""

import torch
from torch import nn


def forward_logits(gpt: nn.Module, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] for whole sequences of token ids, under causal attention; `gpt` may be wrapped by an engine."""
    positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    return gpt(tokens_BS, positions, None)


def language_model_loss(
    logits_BSV: torch.Tensor, labels_BS: torch.Tensor, logit_z_loss_coeff: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy, and the weighted z-loss on the output logits; fp32 scalars, their sum is to be minimized.

    `labels_BS` are the next tokens (already shifted). Both losses come from one logsumexp Z over the vocabulary:
    cross entropy is mean(Z - logit of the label), z-loss is `logit_z_loss_coeff` * mean(Z^2).
    """
    logits = logits_BSV.float()
    normalizer_BS = logits.logsumexp(-1)
    chosen_BS = logits.gather(-1, labels_BS.unsqueeze(-1)).squeeze(-1)
    lm_loss = (normalizer_BS - chosen_BS).mean()
    if logit_z_loss_coeff == 0:
        return lm_loss, torch.zeros_like(lm_loss)
    return lm_loss, logit_z_loss_coeff * normalizer_BS.square().mean()
