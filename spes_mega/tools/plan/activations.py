"""Bytes that forward keeps for backward, term by term.

Per token; e is the bytes of train.dtype, H hidden, A num_heads * head_dim, K num_kv_heads * head_dim, F the width of an
expert, k top-k, E experts. Attention is computed in blocks and keeps no S x S scores. Two ways to compute:

- fused (CUDA): a norm keeps its input and one number a row, a gated unit its input and its output;
- composed (the CPU): a norm keeps an fp32 copy of its input and the normalized rows, in fp32 too.

Our own grouped experts keep their hidden layer before its activation, and compute the rest again.
"""

from dataclasses import dataclass

from spes_mega.layout.counts import count_parameters
from spes_mega.layout.families.catalog import FAMILIES
from spes_mega.recipe import ModelSection, Recipe

BYTES = {"fp32": 4, "bf16": 2}
LOSS_PART = 1 << 22
"""Logits that the loss works on at a time, in fp32."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank.

    kept: of all layers, until their backward; loss: at the start of the backward pass, beside what is kept; layer: what
    the backward of one layer has in use at once, besides.
    """

    kept: int
    loss: int
    layer: int

    @property
    def peak(self) -> int:
        return self.kept + max(self.loss, self.layer)


def activation_bytes(recipe: Recipe, owned: int, *, fused: bool) -> Activations:
    """Of a node that trains `owned` experts a layer; tokens are taken to be spread evenly over the experts."""
    model, train = recipe.model, recipe.train
    tokens = train.micro_batch_size * train.seq_len
    size = BYTES[train.dtype]
    inputs = size * model.hidden_size
    kept = top = 0.0
    for layer in range(model.num_layers):
        whole, inside = _layer_bytes(recipe, owned, moe=model.is_moe_layer(layer), fused=fused)
        kept += {"none": whole, "selective": whole - inside, "full": inputs}[train.recompute]
        top = max(top, whole if train.recompute == "none" else 2 * whole)
    kept += norm_bytes(model.hidden_size, size, fused=fused)
    return Activations(round(kept * tokens), loss_bytes(model.vocab_size * tokens, size), round(top * tokens))


def loss_bytes(logits: int, size: int) -> int:
    """All logits, which their gradient replaces, and a part of them in fp32 (beside bf16 twice)."""
    return size * logits + (8 if size == 2 else 4) * min(logits, LOSS_PART)


def norm_bytes(width: int, size: int, *, fused: bool) -> float:
    """Of an RMSNorm: its input, its statistics, and its output, which the next product keeps."""
    return (size * width if fused else 8 * width) + 4 + size * width


def _layer_bytes(recipe: Recipe, owned: int, *, moe: bool, fused: bool) -> tuple[float, float]:
    """(all that a layer keeps, that which lies inside its feed-forward network), a token."""
    model, size = recipe.model, BYTES[recipe.train.dtype]
    attention = attention_bytes(model, recipe.train.dtype, fused=fused)
    outside = 2 * norm_bytes(model.hidden_size, size, fused=fused) + attention
    inside = expert_bytes(recipe, owned, fused=fused) if moe else _dense(model.ffn_hidden_size, size, fused=fused)
    return outside + inside, inside


def attention_bytes(model: ModelSection, dtype: str, *, fused: bool) -> float:
    """Queries, keys and values as they come (one tensor), their norms, rotated, and the output with its statistics."""
    size, query, kv = BYTES[dtype], model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    total: float = size * (query + 2 * kv) + size * (query + kv) + size * query + 4 * model.num_heads
    if FAMILIES[model.family].qk_norm != "none":
        copies = 4 * kv if dtype == "bf16" else 0  # in fp32 the norm of the keys works on what is there already
        total += size * query if fused else 8 * query + 4 * kv + copies
    return total


def expert_bytes(recipe: Recipe, owned: int, *, fused: bool) -> float:
    """Router, routed tokens, and hidden layers of the experts that they are sent to (less for frozen ones)."""
    model, size = recipe.model, BYTES[recipe.train.dtype]
    assert model.expert_hidden_size is not None
    trained, frozen = _expert_widths(recipe, fused=fused)
    share = owned / model.num_experts
    # Frozen experts compute in the dtype of their weights (but on CPUs that are slow in bf16).
    widths = size * trained * share + BYTES[recipe.frozen_dtype] * frozen * (1 - share)
    router = 17 * model.num_experts + 36 * model.top_k
    routed = model.top_k * ((size * model.hidden_size if owned else 0) + widths * model.expert_hidden_size)
    return router + routed + _dense(model.shared_expert_hidden_size, size, fused=fused)


def _expert_widths(recipe: Recipe, *, fused: bool) -> tuple[int, int]:
    """Rows of expert width that a routed token leaves, in a trained and in a frozen expert."""
    # ZeRO-3 gathers matrix by matrix in Megatron's own experts; on CUDA `auto` may be Transformer Engine's.
    grouped = recipe.train.zero_stage < 3 and not (fused and recipe.model.implementation != "local")
    if grouped:
        return 2, 2
    return (3, 2) if fused else (6, 5)


def _dense(width: int | None, size: int, *, fused: bool) -> float:
    return 0 if width is None else size * width * (3 if fused else 5)


def largest_tensor(model: ModelSection) -> int:
    """Elements of the largest single parameter."""
    return max(model.vocab_size * model.hidden_size, 0 if not model.is_moe else count_parameters(model).expert * 2 // 3)
