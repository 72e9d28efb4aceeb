"""What a family is: how one Hugging Face model_type names its tensors, writes its config.json, and what it can hold."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from spes_mega.recipe import ModelSection

QKNorm = Literal["none", "head", "full"]
_QK_NORMS: dict[QKNorm, str] = {
    "none": "has no norm on queries and keys",
    "head": "normalizes queries and keys over each head",
    "full": "normalizes queries and keys over their whole width",
}
_NORM_PLACEMENTS = {
    "pre": "normalizes the inputs of attention and feed-forward parts",
    "post": "normalizes the outputs of attention and feed-forward parts",
}


@dataclass(frozen=True)
class Family:
    """One model_type.

    Attributes:
        ffn_key: config.json's key for the width of a dense FFN; None where no layer can be dense.
        qk_norm: RMSNorm on queries and keys before RoPE: over each head ("head", weight [head_dim]), or over all
            heads together ("full", weights [num_heads * head_dim] and [num_kv_heads * head_dim]).
        qkv_bias: biases on the query, key and value projections.
        norm_placement: "pre": the inputs of attention and FFN are normalized (`input_layernorm`,
            `post_attention_layernorm`); "post": their outputs, before they are added to the residual stream
            (`post_attention_layernorm`, `post_feedforward_layernorm`).
        sliding_window: config.json's `sliding_window` holds for all layers: a query sees that many keys, its own
            among them.
        expert_keys: for an MoE family, ModelSection field -> config.json keys, the one we write first.
        can_mix_dense: single layers may be dense.
        always_renormalizes: the top-k router weights always sum to 1.
        even_heads: transformers takes num_heads * head_dim to be the hidden size.
        defaults: what transformers assumes when config.json leaves a key out; any other key must be there.
        fixed: key -> the value it must have (or leave out), since our model has no such part.
        renames: (canonical, on disk) parts of tensor names.
    """

    name: str
    architecture: str
    ffn_key: str | None = "intermediate_size"
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    norm_placement: Literal["pre", "post"] = "pre"
    sliding_window: bool = False
    expert_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    can_mix_dense: bool = False
    always_renormalizes: bool = False
    even_heads: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()

    @property
    def is_moe(self) -> bool:
        return bool(self.expert_keys)

    @property
    def has_shared_expert(self) -> bool:
        """Each MoE layer also has one expert that sees every token, weighted by a sigmoid gate."""
        return "shared_expert_hidden_size" in self.expert_keys

    def to_disk(self, name: str) -> str:
        """Name on disk of a canonical name."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return name

    def refuses(self, model: ModelSection, source: "Family", unused: Collection[str] = ()) -> str | None:
        """Why a model of the family `source` cannot become one of this family without a change; None if it can.

        A dense model may go to an MoE family: what becomes of its FFN is the caller's business.

        Args:
            unused: optional parts ("qkv_bias", "shared_expert") of which the model's weights are known to do nothing.
        """
        reasons = (
            self._attention_reason(source, unused),
            self._layer_reason(model, source),
            self._expert_reason(model, source, unused),
        )
        return next((reason for reason in reasons if reason), None)

    def _attention_reason(self, source: "Family", unused: Collection[str]) -> str | None:
        if self.qk_norm != source.qk_norm:
            return f"{source.name} {_QK_NORMS[source.qk_norm]}, {self.name} {_QK_NORMS[self.qk_norm]}"
        if source.qkv_bias and not self.qkv_bias and "qkv_bias" not in unused:
            return f"{source.name} has biases on the query, key and value projections, {self.name} has none"
        return None

    def _layer_reason(self, model: ModelSection, source: "Family") -> str | None:
        if self.norm_placement != source.norm_placement:
            ours, theirs = _NORM_PLACEMENTS[self.norm_placement], _NORM_PLACEMENTS[source.norm_placement]
            return f"{source.name} {theirs}, {self.name} {ours}"
        if model.sliding_window is not None and not self.sliding_window:
            return f"the model has a sliding window of {model.sliding_window} positions, {self.name} has none"
        width = model.num_heads * model.head_dim
        if self.even_heads and width != model.hidden_size:
            return f"{self.name} needs num_heads * head_dim ({width}) to be hidden_size ({model.hidden_size})"
        return None

    def _expert_reason(self, model: ModelSection, source: "Family", unused: Collection[str]) -> str | None:
        if not model.is_moe:
            return None
        if not self.is_moe:
            return f"{source.name} is a Mixture-of-Experts, {self.name} is dense"
        if source.has_shared_expert and not self.has_shared_expert and "shared_expert" not in unused:
            return f"{source.name} has a shared expert in every layer, {self.name} has none"
        if model.dense_layers and not self.can_mix_dense:
            return f"layers {', '.join(map(str, model.dense_layers))} are dense, {self.name} has experts in all layers"
        if not model.norm_topk_prob and self.always_renormalizes:
            return f"{self.name} always renormalizes the router's weights, and the model does not (norm_topk_prob)"
        return None
