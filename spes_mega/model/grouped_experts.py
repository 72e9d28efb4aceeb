"""Gated experts of one group in a single autograd function, with one parameter for each expert matrix.

What is kept for the backward pass is the input (of trained experts alone) and the hidden layer before its activation;
everything between is cheap to compute again. On the CPU experts take their turns, so that what one computes stays in
the cache. On CUDA all go through torch's grouped matrix product, without a copy of the matrices where these are
neighbours in memory: they are when made here, and again once ZeRO has flattened the trained ones.

Axes: T routed tokens (token copies, sorted by expert), D hidden, F width of an expert, E experts of the group.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GroupedExperts(nn.Module):
    """Takes the place of Megatron's SequentialMLP, and names its parameters as Megatron's TEGroupedMLP does."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any) -> None:
        """All else that Megatron gives (process groups, submodules) is of no use where expert parallelism is 1."""
        super().__init__()
        hidden, width = config.hidden_size, config.moe_ffn_hidden_size
        assert width is not None, "a model with experts has their width"
        assert config.gated_linear_unit, "experts are gated"
        assert config.activation_func is F.silu, "experts are gated by SiLU"
        assert not config.add_bias_linear, "experts have no bias"
        self.linear_fc1 = ExpertMatrices(num_local_experts, (2 * width, hidden), config.params_dtype)
        self.linear_fc2 = ExpertMatrices(num_local_experts, (hidden, width), config.params_dtype)

    def forward(
        self, hidden_TD: torch.Tensor, tokens_per_expert_E: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Outputs [T, D], weighted by `probs_T`, in the dtype of `hidden_TD`, which is that of the products; no bias.

        Matrices of another dtype are converted one at a time, where experts take their turns.
        """
        counts = tuple(tokens_per_expert_E.tolist())
        matrices = (*self.linear_fc1.parameters(), *self.linear_fc2.parameters())
        return _GatedExperts.apply(hidden_TD, probs_T, counts, *matrices), None  # type: ignore[no-untyped-call]

    def backward_dw(self) -> None:
        """Nothing: weight gradients are not delayed."""


class ExpertMatrices(nn.Module):
    """One matrix an expert: parameters `weight0`, `weight1`, … of equal shape, neighbours in memory."""

    def __init__(self, count: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        for index, matrix in enumerate(torch.empty(count, *shape, dtype=dtype)):
            self.register_parameter(f"weight{index}", nn.Parameter(matrix))


class _Block(NamedTuple):
    """Rows of one expert with its two matrices, or rows of all with theirs stacked; and products that go with them."""

    rows: slice
    padding: int
    first: torch.Tensor
    second: torch.Tensor
    forward: Product
    input_gradient: Product
    weight_gradient: Product

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's rows, and as many zeros after them as its products want."""
        rows = tensor[self.rows]
        return F.pad(rows, (0, 0) * (tensor.ndim - 1) + (0, self.padding)) if self.padding else rows

    def leave(self, rows: torch.Tensor) -> torch.Tensor:
        """Without what `take` has added."""
        return rows[: len(rows) - self.padding]


class _GatedExperts(torch.autograd.Function):
    """y = W2 (p * silu(W1_gate x) * (W1_up x)), expert by expert, with what Megatron's MLP rounds rounded alike."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, probs_T: torch.Tensor, counts: tuple[int, ...], *matrices: torch.Tensor
    ) -> torch.Tensor:
        blocks = _blocks(x_TD, counts, matrices)
        hidden = [block.forward(block.take(x_TD), block.first) for block in blocks]
        outputs = [
            block.leave(block.forward(_weighted(_gated(h), block.take(probs_T)), block.second))
            for block, h in zip(blocks, hidden, strict=True)
        ]
        ctx.counts, ctx.trained = counts, matrices[0].requires_grad
        ctx.save_for_backward(x_TD if ctx.trained else None, probs_T, *matrices, *hidden)
        return _joined(outputs)

    @staticmethod
    def backward(ctx: Any, gradient_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, probs_T, *saved = ctx.saved_tensors
        matrices, hidden = saved[: 2 * len(ctx.counts)], saved[2 * len(ctx.counts) :]
        d_x: list[torch.Tensor] = []
        d_probs: list[torch.Tensor] = []
        d_first: list[torch.Tensor] = []
        d_second: list[torch.Tensor] = []
        for block, h in zip(_blocks(gradient_TD, ctx.counts, matrices), hidden, strict=True):
            gradient, probs = block.take(gradient_TD), block.take(probs_T)
            gate, up = h.chunk(2, -1)
            activated = F.silu(gate)
            gated = activated * up
            d_weighted = block.input_gradient(gradient, block.second)
            d_probs.append(block.leave((d_weighted.to(probs.dtype) * gated).sum(-1)))
            d_hidden = _gated_backward(d_weighted.mul_(probs.unsqueeze(-1)), gate, up, activated)
            d_x.append(block.leave(block.input_gradient(d_hidden, block.first)))
            if ctx.trained:
                d_second.extend(_each(block.weight_gradient(gradient, gated.mul_(probs.unsqueeze(-1)))))
                d_first.extend(_each(block.weight_gradient(d_hidden, block.take(x_TD))))
        d_matrices = (*d_first, *d_second) if ctx.trained else (None,) * len(matrices)
        return _joined(d_x), _joined(d_probs), None, *d_matrices


def _gated(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate).mul_(up)


def _gated_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    """Gradient of gate and up side by side; uses up `gradient`."""
    out = gradient.new_empty(len(gate), 2 * gate.shape[1])
    d_gate, d_up = out.chunk(2, -1)
    torch.mul(gradient, activated, out=d_up)
    torch.ops.aten.silu_backward.grad_input(gradient.mul_(up), gate, grad_input=d_gate)
    return out


def _weighted(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return (rows * probs.unsqueeze(-1)).to(rows.dtype)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _each(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
    return [gradient] if gradient.ndim == 2 else gradient.unbind()


def _blocks(rows: torch.Tensor, counts: tuple[int, ...], matrices: Sequence[torch.Tensor]) -> list[_Block]:
    first, second = matrices[: len(counts)], matrices[len(counts) :]
    if products_are_grouped(rows, matrices):
        ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        return [_Block(slice(None), 0, stacked(first), stacked(second), *_grouped_products(ends))]
    blocks, start = [], 0
    for count, a, b in zip(counts, first, second, strict=True):
        part = slice(start, start := start + count)
        blocks.append(_Block(part, _padding(count, rows.dtype), a, b, *_PRODUCTS))
    return blocks


def _padding(count: int, dtype: torch.dtype) -> int:
    """Rows to add to `count`, so that few different numbers of rows occur: at most an eighth, or 31.

    For each shape of a bf16 product that it has not seen lately oneDNN first makes a kernel, which takes five times as
    long as the product of a small expert; and how many tokens an expert gets is new at each step.
    """
    return -count % max(32, 1 << max(0, count.bit_length() - 4)) if dtype == torch.bfloat16 else 0


_PRODUCTS: tuple[Product, Product, Product] = (
    lambda rows, matrix: rows @ matrix.to(rows.dtype).t(),
    lambda rows, matrix: rows @ matrix.to(rows.dtype),
    lambda gradient, rows: gradient.t() @ rows,
)


def _grouped_products(ends_E: torch.Tensor) -> tuple[Product, Product, Product]:
    return (
        lambda rows, matrices: F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends_E),
        lambda rows, matrices: F.grouped_mm(rows, matrices, offs=ends_E),
        lambda gradient, rows: F.grouped_mm(gradient.t(), rows, offs=ends_E),
    )


def products_are_grouped(rows: torch.Tensor, matrices: Sequence[torch.Tensor]) -> bool:
    """Whether torch's grouped product takes these: on CUDA, bf16 throughout, in rows of whole 16 bytes.

    Not on the CPU: there it takes as long as one product after the other (see benchmarks/node_speed).
    """
    return (
        hasattr(F, "grouped_mm")
        and rows.device.type == "cuda"
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        and all(t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 for t in (rows, *matrices))
    )


def stacked(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices of equal shape as one tensor [E, …]; without a copy if they lie in memory at equal distances."""
    first, size = matrices[0], matrices[0].element_size()
    begins = [matrix.data_ptr() for matrix in matrices]
    distances = {after - before for before, after in pairwise(begins)}
    storages = {matrix.untyped_storage().data_ptr() for matrix in matrices}
    if len(distances) > 1 or len(storages) > 1 or not all(matrix.is_contiguous() for matrix in matrices):
        return torch.stack(list(matrices))
    distance = distances.pop() // size if distances else first.numel()
    if distance < first.numel():
        return torch.stack(list(matrices))
    return first.detach().as_strided((len(matrices), *first.shape), (distance, *first.stride()))
