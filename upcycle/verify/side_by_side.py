"""Run source and result side by side, layer by layer, in bounded memory and without transformers.

Each layer gets random hidden states of its own, so that a fault is seen in the layer that has it and differences
do not pile up. Everything that was not made from FFNs is compared bit for bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from spes_mega.errors import VerificationError
from spes_mega.layout import Checkpoint, differences, expert_of, generator, open_checkpoint
from spes_mega.layout.families.optional_parts import optional_part
from spes_mega.recipe import ModelSection
from upcycle.plan import Plan
from upcycle.sources import Sources
from upcycle.verify.reference import Reference
from upcycle.verify.rope import rotations

TOLERANCE = 1e-4
"""Largest difference, as a share of the largest value that is compared, where only the order of fp32 sums differs.

A sum of n products in fp32 is off by about sqrt(n) * 2^-25 of the size of its result: 1e-5 for n = 100 000, wider than
any FFN. Ten times that leaves room for three matrices in a row and for results smaller than their terms.
"""

ROUNDINGS = 4
"""Where weights were rounded to a narrower dtype: so many of its steps (eps) are allowed on top.

Rounding moves each weight by at most eps / 2, by eps / 3.5 on average, with random signs; three matrices in a row give
about eps / 2 of the size of the result, and the largest of some 100 000 values lies within five times that.
"""

_INFINITE = float("inf")
_SEQUENCES, _LENGTH = 2, 32
_PIECE_ROWS = 4096


@dataclass(frozen=True)
class LayerDifference:
    """Differences as shares of the largest value of the source's layer, so that layers can be compared.

    Attributes:
        kind: "experts", or "dense" for a layer that stays as it is.
        output: between the layers' outputs, on the same hidden states; of several sources, the first one's.
        experts: between the experts alone (with split and partition: of the parts that belong together) and the FFN
            that they were made from; None in a dense layer.
        worst_expert: where that is largest.
    """

    layer: int
    kind: str
    output: float
    experts: float | None = None
    worst_expert: int | None = None


@dataclass(frozen=True)
class Verification:
    """What was found, with what was allowed.

    Attributes:
        layers: one for each layer.
        equal_tensors: how many tensors were found equal bit for bit.
        difference: why the outputs may differ; None where they should not.
        allowed: the largest share that rounding explains.
    """

    layers: tuple[LayerDifference, ...]
    equal_tensors: int
    difference: str | None
    allowed: float

    @property
    def max_difference(self) -> float:
        return max(layer.output for layer in self.layers)


def check_can_verify(plan: Plan) -> None:
    """Say before anything is written what `verify` could not run. Raises CheckpointError."""
    for model in (plan.source, plan.model):
        rotations(model, _sequence_length(model))


@torch.inference_mode()
def verify(
    sources: Sources, out: Path, plan: Plan, advance: Callable[[int], None] = lambda count: None
) -> Verification:
    """Compare the result in `out` with what it was made from.

    Args:
        advance: called with 1 after each layer.

    Raises:
        VerificationError: something differs that should not; the message names the tensor, or layer and expert.
    """
    with open_checkpoint(out) as result:
        if wrong := differences(plan.model, result.model):
            raise VerificationError(f"{out}: not the model that was planned: {'; '.join(wrong)}")
        equal = sum(1 for _ in _equal_tensors(sources, result))
        rounded = max(torch.finfo(dtype).eps for dtype in plan.dtypes.values()) if plan.rounds else 0.0
        allowed = TOLERANCE + ROUNDINGS * rounded
        layers = []
        for layer in range(plan.model.num_layers):
            layers.append(_compare_layer(sources, result, plan, layer))
            _check(layers[-1], out, plan, allowed)
            advance(1)
    return Verification(tuple(layers), equal, plan.difference(), allowed)


def _equal_tensors(sources: Sources, result: Checkpoint) -> Iterator[str]:
    """Names of tensors that are carried over (or averaged), each found equal. Raises VerificationError."""
    for name in result.names:
        if name in sources.names:
            for start, rows in sources.pieces(name):
                ours = result.read_rows(name, start, start + len(rows))
                if not torch.equal(rows.to(ours.dtype).contiguous().view(torch.uint8), ours.view(torch.uint8)):
                    raise VerificationError(f"{result.source}: {name}: not what the source has; {_KEPT}")
            yield name
        elif optional_part(name) is not None and expert_of(name) is None:
            if result.read(name).any():
                raise VerificationError(f"{result.source}: {name}: not zero, as the source lacks it; {_KEPT}")
            yield name


def _compare_layer(sources: Sources, result: Checkpoint, plan: Plan, layer: int) -> LayerDifference:
    before, after = Reference(plan.source, lambda name: sources.read_one(0, name)), Reference(plan.model, result.read)
    x = hidden_states(plan, layer)
    expected = before.layer(layer, x)
    if layer not in plan.moe_layers:
        return LayerDifference(layer, "dense", _share(after.layer(layer, x) - expected, expected - x))
    middle = after.after_attention(layer, x)
    h = after.ffn_input(layer, middle)
    y, experts, worst = _run_experts(sources, after, plan, layer, h)
    output = after.after_ffn(layer, middle, y)
    return LayerDifference(layer, "experts", _share(output - expected, expected - x), experts, worst)


def hidden_states(plan: Plan, layer: int) -> torch.Tensor:
    """Random states, [2, S, H], with mean square 1: about the size of a residual stream in the middle of a model."""
    shape = (_SEQUENCES, _sequence_length(plan.model), plan.model.hidden_size)
    return torch.randn(shape, generator=generator(plan.settings.seed, f"verify/{layer}"))


def _sequence_length(model: ModelSection) -> int:
    return min(_LENGTH, model.max_seq_len)


def _run_experts(
    sources: Sources, after: Reference, plan: Plan, layer: int, h: torch.Tensor
) -> tuple[torch.Tensor, float, int]:
    """The MoE part's output; the largest difference of experts from their FFN, and the (first) expert that has it.

    All experts are run on all states, whether the router chooses them or not, one after the other.
    """
    weights = after.router_weights(layer, h)
    y = after.shared_expert(layer, h)
    parts, worst = plan.method.parts(plan.settings), (0.0, 0)
    ffn, ffn_source = torch.empty(0), -1
    for first in range(0, plan.model.num_experts, parts):
        source = first // plan.experts_per_source
        if source != ffn_source:
            read = sources.all[source].read
            ffn, ffn_source = Reference(plan.source, read).dense_ffn(layer, h), source
        whole = torch.zeros_like(h)
        for expert in range(first, first + parts):
            out = after.expert(layer, expert, h)
            y = y + weights[..., expert, None] * out
            whole += out / parts
        worst = max(worst, (_share(whole - ffn, ffn), first), key=lambda found: found[0])
    return y, *worst


def _share(difference: torch.Tensor, of: torch.Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where anything is not finite."""
    largest, scale = float(difference.abs().max()), float(of.abs().max())
    if not torch.isfinite(difference).all() or not torch.isfinite(of).all():
        return _INFINITE
    return largest / scale if scale else largest


_KEPT = "the result was kept for inspection, don't use it"


def _check(found: LayerDifference, out: Path, plan: Plan, allowed: float) -> None:
    method, where = plan.method, f"{out}: layer {found.layer}"
    limit = _INFINITE if method.changes_experts(plan.settings) else allowed
    if found.experts is not None and not _within(found.experts, limit):
        raise VerificationError(
            f"{where}, expert {found.worst_expert}: differs from the FFN that it was made from by {found.experts:.3g} "
            f"of its largest value, where at most {allowed:.3g} was expected; {_KEPT}"
        )
    touched = found.kind == "experts" or method.takes_several_sources
    limit = _INFINITE if touched and method.changes_model(plan.settings) else allowed
    if not _within(found.output, limit):
        raise VerificationError(
            f"{where}: its output differs from the source's by {found.output:.3g} of the most that the layer adds, "
            f"where {allowed:.3g} was expected; {_KEPT}"
        )


def _within(share: float, limit: float) -> bool:
    """An infinite share stands for values that are not finite, and is never within anything."""
    return share <= limit and share < _INFINITE
