"""The cheapest change with which a recipe fits its machines."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from spes_mega.errors import RecipeError
from spes_mega.recipe import override_recipe
from spes_mega.recipe.deepspeed_config import deepspeed_config
from spes_mega.tools.plan.plan import Plan, node_groups

OPTIMIZER_ON_CPU = "deepspeed.zero_optimization.offload_optimizer.device=cpu"


@dataclass(frozen=True)
class Change:
    """Settings to add by --set; `cost` is a rough order (less is cheaper), `price` says it in words."""

    settings: tuple[str, ...]
    cost: float
    price: str


@dataclass(frozen=True)
class Suggestion:
    settings: tuple[str, ...]
    price: tuple[str, ...]
    peak_bytes: int
    fits: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def suggest(plan: Plan) -> list[Suggestion]:
    """The cheapest change that makes the plan fit, first; if none does, the one that comes nearest.

    Empty for a plan that fits. Up to three settings are combined.
    """
    if plan.spes.fits:
        return []
    changes = list(_changes(plan))
    tries = sorted(
        (chosen for count in (1, 2, 3) for chosen in combinations(changes, count) if _compatible(chosen)),
        key=lambda chosen: sum(change.cost for change in chosen),
    )
    nearest: Suggestion | None = None
    for chosen in tries:
        tried = _try(plan, chosen)
        if tried is not None and tried.fits:
            return [tried]
        if tried is not None and (nearest is None or tried.peak_bytes < nearest.peak_bytes):
            nearest = tried
    return [nearest] if nearest else []


def _changes(plan: Plan) -> Iterator[Change]:
    train, gpus = plan.recipe.train, plan.machines.gpus
    if train.recompute == "none":
        yield Change(("train.recompute=selective",), 1.1, "feed-forward networks are computed a second time")
    if train.recompute != "full":
        yield Change(("train.recompute=full",), 1.3, "the whole forward pass is computed a second time")
    for stage, cost in ((2, 1.0), (3, 1.4)):
        if gpus > 1 and stage > train.zero_stage:
            what = "gradients" if stage == 2 else "gradients and weights, gathered again for every pass"
            yield Change((f"train.zero_stage={stage}",), cost, f"the GPUs of a node divide {what}")
    size, sums = train.micro_batch_size, train.accumulation(gpus)
    follows = train.batch_size is not None and train.grad_accumulation is None
    factor = 2
    while size % factor == 0:
        settings: tuple[str, ...] = (f"train.micro_batch_size={size // factor}",)
        if not follows:
            settings += (f"train.grad_accumulation={sums * factor}",)
        yield Change(settings, 1.0 + 0.02 * factor, "smaller matrix products; the same tokens a step")
        factor *= 2
    offload = plan.recipe.deepspeed.get("zero_optimization", {}).get("offload_optimizer")
    if not offload:
        yield Change((OPTIMIZER_ON_CPU,), 3.0, "the update runs on the CPU, with its memory")
    yield from _fewer_experts(plan)


def _fewer_experts(plan: Plan) -> Iterator[Change]:
    """More nodes, with fewer experts each: another run, for all nodes and the hub."""
    experts, nodes = plan.recipe.model.num_experts, plan.recipe.spes.num_nodes
    if plan.recipe.spes.ownership not in ("equal", "all"):
        return
    if plan.recipe.spes.ownership == "all":
        yield Change(("spes.ownership=equal",), 5.0, "each node trains its share of the experts; for all nodes")
    more = nodes * 2
    while more <= experts:
        yield Change((f"spes.num_nodes={more}",), 5.0 + more / nodes, f"{more} nodes with fewer experts each")
        more *= 2


def _compatible(chosen: tuple[Change, ...]) -> bool:
    keys = [setting.partition("=")[0] for change in chosen for setting in change.settings]
    return len(keys) == len(set(keys))


def _try(plan: Plan, chosen: tuple[Change, ...]) -> Suggestion | None:
    settings = tuple(setting for change in chosen for setting in change.settings)
    try:
        changed = override_recipe(plan.recipe, settings)
        deepspeed_config(changed, plan.machines.gpus)
    except RecipeError:
        return None
    groups = node_groups(changed, plan.machines)
    peak, fits = max(group.memory.peak for group in groups), all(group.fits for group in groups)
    return Suggestion(settings, tuple(change.price for change in chosen), peak, fits)
