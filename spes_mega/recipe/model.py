"""The model section: the shape of a decoder-only language model, dense or Mixture-of-Experts."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from spes_mega.recipe.section import LOCAL, Positive, Section, json_value

DenseFamily = Literal["qwen3", "qwen2", "llama", "mistral", "olmo2"]
MoEFamily = Literal["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "flex_olmo"]
MOE_FAMILIES = get_args(MoEFamily)
MIXED_FAMILIES = ("qwen3_moe", "qwen2_moe")
"""MoE families in which single layers may be dense."""
# Far above any model; a damaged config.json must not make names of tensors without end.
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000


class ModelSection(Section):
    """Shape of a decoder-only language model, dense or Mixture-of-Experts."""

    family: DenseFamily | MoEFamily = Field(description="Hugging Face model_type that the checkpoint has at rest")
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    hidden_size: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive = Field(description="its own number: need not be hidden_size / num_heads")
    ffn_hidden_size: Positive | None = Field(default=None, description="width of a dense FFN")
    num_experts: int = Field(default=0, ge=0, le=MAX_EXPERTS, description="experts a layer; 0: a dense model")
    top_k: int = Field(default=0, ge=0, description="experts a token is sent to")
    expert_hidden_size: Positive | None = Field(default=None, description="FFN width of one expert")
    shared_expert_hidden_size: Positive | None = Field(
        default=None, description="FFN width of the expert that sees every token (qwen2_moe)"
    )
    norm_topk_prob: bool = Field(default=True, description="renormalize the top-k router weights to sum to 1")
    dense_layers: tuple[int, ...] = Field(default=(), description="layers of an MoE model that stay dense")
    vocab_size: Positive
    max_seq_len: Positive = Field(default=4096, description="positions the model is declared for")
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: Annotated[dict[str, Any] | None, BeforeValidator(json_value)] = Field(
        default=None, description="a RoPE variant, as config.json has it"
    )
    sliding_window: Positive | None = Field(
        default=None, description="positions that a query sees, its own among them (mistral, mixtral); default: all"
    )
    norm_eps: float = Field(default=1e-6, gt=0)
    tie_embeddings: bool = False
    init: Literal["scaled", "truncated"] = Field(
        default="scaled",
        description="how fresh matrices are drawn. scaled: N(0, init_std), those that project into the residual stream "
        "with init_std / sqrt(2 * num_layers); truncated: all of them N(0, init_std) cut at 3 standard deviations, as "
        "the paper's models",
    )
    init_std: float = Field(default=0.02, ge=0, description="std of freshly drawn matrices")
    frozen_dtype: Literal["bf16", "fp32", "train"] = Field(
        default="bf16",
        json_schema_extra=LOCAL,
        description="of the weights of experts that a node does not train, which it holds once; train: train.dtype",
    )
    implementation: Literal["auto", "transformer_engine", "local"] = Field(
        default="auto",
        json_schema_extra=LOCAL,
        description="modules that the model is built of; auto: Transformer Engine's where they are installed and CUDA "
        "is there, else local ones",
    )

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - len(set(self.dense_layers)) if self.is_moe else 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.is_moe and layer not in self.dense_layers

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.is_moe != (self.family in MOE_FAMILIES):
            raise ValueError(f"family {self.family} does not go with num_experts {self.num_experts}")
        if self.is_moe:
            self._check_experts()
        elif self.ffn_hidden_size is None or self.top_k or self.dense_layers:
            raise ValueError(
                "a dense model (num_experts 0) needs ffn_hidden_size, and has neither top_k nor dense_layers"
            )
        if (self.shared_expert_hidden_size is not None) != (self.family == "qwen2_moe"):
            raise ValueError("shared_expert_hidden_size: family qwen2_moe needs it, and no other has it")
        if self.sliding_window is not None and self.family not in ("mistral", "mixtral"):
            raise ValueError(f"sliding_window: family {self.family} has none (mistral and mixtral have)")
        if self.family == "olmoe" and self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(f"family olmoe needs num_heads * head_dim to be hidden_size {self.hidden_size}")
        return self

    def _check_experts(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k {self.top_k} must be between 1 and num_experts {self.num_experts}")
        if self.expert_hidden_size is None:
            raise ValueError(f"an MoE model (num_experts {self.num_experts}) needs expert_hidden_size")
        if self.dense_layers and self.ffn_hidden_size is None:
            raise ValueError("dense_layers need ffn_hidden_size")
        if any(not 0 <= layer < self.num_layers for layer in self.dense_layers):
            raise ValueError(
                f"dense_layers {self.dense_layers} must lie in 0..{self.num_layers - 1} (num_layers {self.num_layers})"
            )
        if self.dense_layers and self.family not in MIXED_FAMILIES:
            raise ValueError(f"dense_layers: family {self.family} has experts in every layer")
        if self.family == "mixtral" and not self.norm_topk_prob:
            raise ValueError("family mixtral always renormalizes (norm_topk_prob: true)")
