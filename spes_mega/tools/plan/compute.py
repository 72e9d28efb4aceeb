"""Floating-point operations of training on one token, and the seconds that they take.

A product with a weight matrix costs 2 operations a weight and token. With P the weights of all matrices that a token
passes through (shared ones with the output head, routers, top-k experts; not the embedding, which is looked up):

    forward              2 P + attention            attention: 2 S A a layer (S x A products twice, half of them masked)
    to activations       2 P + 2 attention          everything, frozen experts too: the gradient flows through them
    weight gradients     2 P_trained                the shared weights, and the routed tokens' share of owned experts
    recomputation        full: forward once more; selective: the feed-forward networks' part of it
"""

from dataclasses import dataclass

from spes_mega.layout.counts import count_parameters
from spes_mega.recipe import ModelSection, Recipe


@dataclass(frozen=True)
class Flops:
    """Operations for one token, on average over a batch whose tokens spread evenly over the experts."""

    forward: float
    to_activations: float
    weight_gradients: float
    recomputation: float

    @property
    def total(self) -> float:
        return self.forward + self.to_activations + self.weight_gradients + self.recomputation


def flops_per_token(recipe: Recipe, owned: int) -> Flops:
    """Of a node that trains `owned` experts a layer."""
    model = recipe.model
    counts = count_parameters(model)
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    shared = counts.shared - embedding
    routed = counts.moe_layers * counts.top_k * counts.expert
    seen = min(recipe.train.seq_len, 2 * (model.sliding_window or recipe.train.seq_len))
    attention = 2 * seen * model.num_heads * model.head_dim * model.num_layers
    forward = 2 * (shared + routed) + attention
    return Flops(
        forward=forward,
        to_activations=2 * (shared + routed) + 2 * attention,
        weight_gradients=2 * (shared + routed * (owned / model.num_experts if model.is_moe else 0)),
        recomputation={"none": 0.0, "selective": 2 * (routed + _dense(model)), "full": forward}[recipe.train.recompute],
    )


def _dense(model: ModelSection) -> int:
    layers = sum(not model.is_moe_layer(layer) for layer in range(model.num_layers))
    return 3 * model.hidden_size * (model.ffn_hidden_size or 0) * layers


def tokens_per_step(recipe: Recipe, ranks: int) -> int:
    """Tokens that one node trains on in an optimizer step. Raises RecipeError: its batch cannot be divided so."""
    train = recipe.train
    return ranks * train.micro_batch_size * train.accumulation(ranks) * train.seq_len
