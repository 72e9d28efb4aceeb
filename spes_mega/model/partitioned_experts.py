"""Experts of one layer, partitioned into groups that are owned or frozen as a whole.

Megatron's MoE layer hands its experts the tokens sorted by expert, so consecutive experts see consecutive rows.
Each maximal run of experts that are all owned, or all frozen, is one stock Megatron expert module. In a frozen
group no weight takes part in autograd: there is no weight-gradient GEMM, no `.grad` and no optimizer state, while
gradients still flow through to what is below. (Masking within one grouped GEMM would not do: Transformer Engine's
grouped linear layer looks at the first weight alone to decide on weight gradients for all of them.)

Axes: T routed tokens (token copies, sorted by expert), D hidden, E experts.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from spes_mega.model.grouped_experts import GroupedExperts


class ExpertRun(NamedTuple):
    """Consecutive experts `start` to `stop` - 1 of equal ownedness."""

    start: int
    stop: int
    owned: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


def expert_runs(num_experts: int, owned: Collection[int]) -> tuple[ExpertRun, ...]:
    """The fewest runs that cover experts 0 to `num_experts` - 1 in order."""
    runs = []
    for is_owned, members in groupby(range(num_experts), key=lambda expert: expert in owned):
        experts = list(members)
        runs.append(ExpertRun(experts[0], experts[-1] + 1, is_owned))
    return tuple(runs)


class PartitionedExperts(MegatronModule):
    """The `experts` submodule of a Megatron MoE layer, in owned and frozen groups.

    Args:
        num_local_experts: all experts of the layer (expert parallelism is 1).
        owned: global numbers of the experts that are trained here.
        frozen_dtype: of the weights of the others; it may differ from that of the rest of the model.
        stock: builds the Megatron expert module of one group (a module spec or builder of Megatron's own).
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        owned: Collection[int],
        frozen_dtype: torch.dtype,
        stock: Callable[..., nn.Module],
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.frozen_dtype = frozen_dtype
        self.runs = expert_runs(num_local_experts, owned)
        frozen_config = copy.copy(config)
        frozen_config.params_dtype = frozen_dtype
        self.groups = nn.ModuleList(
            stock(run.size, config if run.owned else frozen_config, **kwargs) for run in self.runs
        )
        for run, group in zip(self.runs, self.groups, strict=True):
            group.requires_grad_(run.owned)
        # Not a buffer: counts are this rank's own, and neither travel nor change device with the model.
        self.token_counts = torch.zeros(num_local_experts, dtype=torch.int64, device="cpu")

    def forward(
        self, hidden_TD: torch.Tensor, tokens_per_expert_E: torch.Tensor, probs_T: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Run every group on its rows; returns the outputs [T, D], weighted by `probs_T`, and no bias.

        A group without tokens runs too: all ranks must visit all parameters, or ZeRO-3 would wait for ever.
        """
        if self.training and torch.is_grad_enabled():  # recomputation's first pass runs without gradient
            self.token_counts += tokens_per_expert_E.to("cpu", torch.int64)
        if len(self.groups) == 1:
            return self._run(0, hidden_TD, tokens_per_expert_E, probs_T), None
        counts = [part.contiguous() for part in tokens_per_expert_E.split([run.size for run in self.runs])]
        rows = [int(part.sum()) for part in counts]
        parts = zip(hidden_TD.split(rows), counts, probs_T.split(rows), strict=True)
        return torch.cat([self._run(group, *part) for group, part in enumerate(parts)]), None

    def _run(self, group: int, hidden: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        self._assert_uniform(group)
        dtype = hidden.dtype
        if not self.runs[group].owned:
            hidden = hidden.to(self._products_dtype(group, hidden))
        output, bias = self.groups[group](hidden, counts, probs)
        assert bias is None, "experts have no bias"
        return output.to(dtype)

    def _products_dtype(self, group: int, hidden: torch.Tensor) -> torch.dtype:
        """What a frozen group computes in: the dtype of its weights, unless that would be slow and can be helped."""
        weights = self.frozen_dtype
        converts = isinstance(self.groups[group], GroupedExperts)
        return hidden.dtype if converts and not bf16_is_fast(hidden.device) else weights

    def _assert_uniform(self, group: int) -> None:
        trains = {parameter.requires_grad for parameter in self.groups[group].parameters()}
        assert trains == {self.runs[group].owned}, f"experts {self.runs[group]} must be owned or frozen as a whole"

    def backward_dw(self) -> None:
        """Delayed weight gradients, as Megatron's MoE layer asks for them; frozen groups have none."""
        for run, group in zip(self.runs, self.groups, strict=True):
            if run.owned:
                group.backward_dw()  # type: ignore[operator]


def bf16_is_fast(device: torch.device) -> bool:
    """Whether products in bf16 take no longer than in fp32: on CUDA, and on CPUs that have instructions for them."""
    if device.type != "cpu":
        return True
    return any(supported() for supported in (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported))


def partitioned_experts(model: nn.Module) -> Iterator[PartitionedExperts]:
    """The partitioned experts of a model, one a MoE layer, from the lowest layer up."""
    return (module for module in model.modules() if isinstance(module, PartitionedExperts))


def tokens_per_expert(model: nn.Module) -> torch.Tensor:
    """Tokens that each expert got on this rank in training since the last reset: [num_moe_layers, E] int64."""
    counts = [experts.token_counts for experts in partitioned_experts(model)]
    return torch.stack(counts) if counts else torch.zeros(0, 0, dtype=torch.int64)


def reset_tokens_per_expert(model: nn.Module) -> None:
    """Set the counts of `tokens_per_expert` to zero."""
    for experts in partitioned_experts(model):
        experts.token_counts.zero_()
