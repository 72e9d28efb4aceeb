"""Core attention by torch's fused kernels, where Transformer Engine is not at hand.

Axes: S sequence, B batch, H query heads, G key-value heads, D head_dim.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SDPAttention(MegatronModule):
    """Causal grouped-query attention; takes the place of Megatron's `DotProductAttention`.

    That one writes out the S x S scores, and repeats keys and values for grouped queries; this one does neither.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, f"only causal attention is built here, not {attn_mask_type}"
        assert attention_type == "self", f"only self-attention is built here, not {attention_type}"
        assert config.attention_dropout == 0.0, "attention dropout is not part of any recipe"
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self,
        query_SBHD: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend causally over whole sequences: [S, B, H*D]. The mask is implied by position and not read."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBHD, key_SBGD, value_SBGD))
        mask = self._window_mask(query.shape[2], query.device)
        context_BHSD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context_BHSD.permute(2, 0, 1, 3).flatten(2)

    def _window_mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """True [S, S] where a query sees a key: at most `window` positions that end with its own."""
        if self.window is None or length <= self.window:
            return None
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return causal.triu(1 - self.window)
