"""Norms that Megatron-Core's layers lack.

Axes: S sequence, B batch, N heads, D head_dim, H hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

Norm = Callable[..., nn.Module]


def norm_over_all_heads(num_heads: int) -> type[nn.RMSNorm]:
    """A norm to stand for Megatron's norm of each head: one RMSNorm over all heads together (OLMo 2, OLMoE)."""

    class NormOverAllHeads(nn.RMSNorm):
        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
            """`hidden_size` is that of one head: what Megatron's attention asks for."""
            super().__init__(num_heads * hidden_size, eps=eps)

        def forward(self, heads_SBND: torch.Tensor) -> torch.Tensor:
            return super().forward(heads_SBND.flatten(2)).view(heads_SBND.shape)

    return NormOverAllHeads


class PostNormLayer(TransformerLayer):
    """A layer that normalizes what attention and MLP add to the residual stream (OLMo 2, arXiv 2501.00656, sec. 2).

    Its spec has no norms of the inputs.
    """

    def __init__(self, config: TransformerConfig, *args: Any, output_norm: Norm, **kwargs: Any) -> None:
        """`output_norm` builds a norm, as Megatron does: from config, hidden_size and eps."""
        super().__init__(config, *args, **kwargs)
        shape = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.attention_output_norm = output_norm(**shape)
        self.mlp_output_norm = output_norm(**shape)
        self.self_attn_bda: Any = _after(self.attention_output_norm, self.self_attn_bda)
        self.mlp_bda: Any = _after(self.mlp_output_norm, self.mlp_bda)


def _after(norm: nn.Module, add: Callable[..., Callable[..., torch.Tensor]]) -> Callable[..., Any]:
    """Megatron's bias-dropout-add, with the output normalized before it is added."""

    def make(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        def normalized(
            output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            assert bias is None, "no layer has a bias on its output"
            return add(training, fused)((norm(output), None), residual, dropout)

        return normalized

    return make
