"""Decoder layers in plain torch and fp32, for checking results and for seeing what a layer's FFN receives.

Nothing here is shared with the model that trains, so that agreement means something. Weights are read when they are
used and dropped again: memory holds one matrix and the activations. Axes: B sequences, S positions, H hidden size,
F FFN width, E experts, D head dimension.
"""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from spes_mega.layout import FAMILIES, dense_name, expert_name, router_name
from spes_mega.layout.names import shared_expert_gate_name, shared_expert_name
from spes_mega.recipe import ModelSection
from upcycle.methods import Read
from upcycle.verify.rope import rotate, rotations


class Reference:
    """The layers of one model, dense or Mixture-of-Experts."""

    def __init__(self, model: ModelSection, read: Read) -> None:
        """`read` gives a tensor by its canonical name, in any dtype."""
        self.model = model
        self._family = FAMILIES[model.family]
        self._read = read

    def layer(self, layer: int, x_BSH: torch.Tensor) -> torch.Tensor:
        """A whole decoder layer, residual stream to residual stream."""
        x_BSH = self.after_attention(layer, x_BSH)
        h_BSH = self.ffn_input(layer, x_BSH)
        moe = self.model.is_moe_layer(layer)
        return self.after_ffn(layer, x_BSH, self.moe(layer, h_BSH) if moe else self.dense_ffn(layer, h_BSH))

    def after_attention(self, layer: int, x_BSH: torch.Tensor) -> torch.Tensor:
        """The residual stream after the attention part."""
        prefix = f"model.layers.{layer}"
        if self._family.norm_placement == "post":
            return x_BSH + self._norm(f"{prefix}.post_attention_layernorm", self._attention(layer, x_BSH))
        return x_BSH + self._attention(layer, self._norm(f"{prefix}.input_layernorm", x_BSH))

    def ffn_input(self, layer: int, x_BSH: torch.Tensor) -> torch.Tensor:
        """What the FFN and the router see of the residual stream after attention."""
        if self._family.norm_placement == "post":
            return x_BSH
        return self._norm(f"model.layers.{layer}.post_attention_layernorm", x_BSH)

    def after_ffn(self, layer: int, x_BSH: torch.Tensor, y_BSH: torch.Tensor) -> torch.Tensor:
        """The residual stream after the FFN's output `y_BSH` was added to it."""
        if self._family.norm_placement == "post":
            y_BSH = self._norm(f"model.layers.{layer}.post_feedforward_layernorm", y_BSH)
        return x_BSH + y_BSH

    def dense_ffn(self, layer: int, h_BSH: torch.Tensor) -> torch.Tensor:
        return self._ffn([dense_name(layer, m) for m in ("gate_proj", "up_proj", "down_proj")], h_BSH)

    def expert(self, layer: int, expert: int, h_BSH: torch.Tensor) -> torch.Tensor:
        return self._ffn([expert_name(layer, expert, m) for m in ("gate_proj", "up_proj", "down_proj")], h_BSH)

    def moe(self, layer: int, h_BSH: torch.Tensor) -> torch.Tensor:
        """The MoE part: the chosen experts by their weights, and the shared expert where there is one."""
        weights = self.router_weights(layer, h_BSH)
        y_BSH = self.shared_expert(layer, h_BSH)
        for expert in range(self.model.num_experts):
            y_BSH = y_BSH + weights[..., expert, None] * self.expert(layer, expert, h_BSH)
        return y_BSH

    def router_weights(self, layer: int, h_BSH: torch.Tensor) -> torch.Tensor:
        """Weights of all experts, [B, S, E]: softmax, of which all but the top-k are zero, renormalized if so asked."""
        probabilities = linear(h_BSH, self._weight(router_name(layer))).softmax(dim=-1)
        values, chosen = probabilities.topk(self.model.top_k, dim=-1)
        if self.model.norm_topk_prob:
            values = values / values.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter_(-1, chosen, values)

    def shared_expert(self, layer: int, h_BSH: torch.Tensor) -> torch.Tensor:
        """The output of the expert that sees every token; zeros where the model has none."""
        if self.model.shared_expert_hidden_size is None:
            return torch.zeros_like(h_BSH)
        names = [shared_expert_name(layer, m) for m in ("gate_proj", "up_proj", "down_proj")]
        return linear(h_BSH, self._weight(shared_expert_gate_name(layer))).sigmoid() * self._ffn(names, h_BSH)

    def _attention(self, layer: int, x_BSH: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{layer}.self_attn"
        q, k, v = (self._projected(f"{prefix}.{part}_proj", x_BSH) for part in "qkv")
        if self._family.qk_norm == "full":
            q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
        q, k, v = (part.unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2) for part in (q, k, v))
        if self._family.qk_norm == "head":
            q, k = self._norm(f"{prefix}.q_norm", q), self._norm(f"{prefix}.k_norm", k)
        cos, sin = rotations(self.model, x_BSH.shape[1])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mask = self._visible(x_BSH.shape[1])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return linear(out.transpose(1, 2).flatten(2), self._weight(f"{prefix}.o_proj.weight"))

    def _projected(self, name: str, x_BSH: torch.Tensor) -> torch.Tensor:
        bias = self._weight(f"{name}.bias") if self._family.qkv_bias else None
        return linear(x_BSH, self._weight(f"{name}.weight"), bias)

    def _visible(self, length: int) -> torch.Tensor:
        """Which keys (columns) a query (row) sees: none after it, and none before its sliding window."""
        distance = torch.arange(length)[:, None] - torch.arange(length)
        window = self.model.sliding_window or length
        return (distance >= 0) & (distance < window)

    def _ffn(self, names: list[str], h_BSH: torch.Tensor) -> torch.Tensor:
        inner_BSF = silu(linear(h_BSH, self._weight(names[0])))
        inner_BSF *= linear(h_BSH, self._weight(names[1]))
        return linear(inner_BSF, self._weight(names[2]))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(dim=-1, keepdim=True) + self.model.norm_eps).rsqrt()
        return x * scale * self._weight(f"{name}.weight")

    def _weight(self, name: str) -> torch.Tensor:
        return self._read(name).float()
