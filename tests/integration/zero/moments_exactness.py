"""Run by test_moments.py under the deepspeed launcher: Adam's state through ZeRO 1-3, and changes of ownership.

Prints one JSON line a configuration: what was exact and what was not.
"""

import gc
import itertools
import weakref

import torch

from spes_mega.layout import expert_of
from spes_mega.node.distributed.process_group import process_group
from spes_mega.node.distributed.ranks import Ranks
from spes_mega.node.zero.moments import Moments, assign_moments, collect_moments
from tests.integration.zero.zero_exactness import Case, equal, recipe_of, report, tokens_for

TRAIN = {"micro_batch_size": 2, "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0}


def case_of(ranks, stage, dtype, accumulation, owned=(1, 2), seed=1):
    # frozen experts have the values of trained ones, so that models with different owners compute the same
    case = Case(ranks, recipe_of(stage, dtype, "train", grad_accumulation=accumulation, **TRAIN), owned)
    case.assign(case.values(seed))
    return case


def train(case, *numbers):
    for number in numbers:
        case.step(tokens_for(case.ranks.rank + 2 * number, samples=2 * case.recipe.train.grad_accumulation))


def moments_of(case):
    """(steps, moments) of all that is trained; the moments on rank 0 alone."""
    found = {}

    def keep(steps, moments):
        found.update((name, Moments(*(value.clone() for value in values))) for name, values in moments)

    return collect_moments(case.engine, case.weights.map.entries, case.ranks, keep), found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def first_step(ranks, stage, dtype, accumulation):
    """After the first step the first moment is a tenth of the gradient and the second a twentieth of its square."""
    case = case_of(ranks, stage, dtype, accumulation)
    before = moments_of(case)
    train(case, 0)
    steps, moments = moments_of(case)
    trained = {name for name in case.weights.shapes if case.trains(name)}
    norm = sum(float((m.exp_avg.double() / 0.1).square().sum()) for m in moments.values()) ** 0.5
    return {
        "nothing_before": before == ({}, {}),
        "steps": steps == dict.fromkeys(trained, 1),
        "names": set(moments) == (trained if ranks.leads else set()),
        "shapes": all(tuple(m.exp_avg.shape) == case.weights.shapes[name] for name, m in moments.items()),
        "norm": not ranks.leads or abs(norm / float(case.engine.get_global_grad_norm()) - 1) < 1e-4,
        "squares": all(torch.allclose(m.exp_avg_sq, 5 * m.exp_avg**2, rtol=1e-5, atol=0) for m in moments.values()),
    }


def carried_over(ranks, stage, dtype, accumulation):
    """A model that gets weights and moments of another goes on as the other does."""
    first, rebuilt = case_of(ranks, stage, dtype, accumulation), case_of(ranks, stage, dtype, accumulation, seed=2)
    train(first, 0, 1)
    masters = ranks_share(first)
    steps, moments = moments_of(first)
    rebuilt.weights._release()
    rebuilt.weights._rebuild(rebuilt.owned, steps)
    rebuilt.assign(masters)
    assign_moments(rebuilt.engine, rebuilt.weights.map.entries, ranks, steps, moments.get)
    found = moments_of(rebuilt)
    for case in (first, rebuilt):
        train(case, 2)
    return {
        "steps": found[0] == steps,
        "moments": same(found[1], moments),
        "next_step": equal(rebuilt.masters(), first.masters()),
        "moments_after": same(moments_of(rebuilt)[1], moments_of(first)[1]),
    }


def ranks_share(case):
    """The masters, on rank 0, which alone is asked for them."""
    return case.masters() or dict.fromkeys(case.weights.shapes)


def watch_memory(case):
    """Elements of the old model and its optimizer that are alive when the new one is built."""
    mine = [weakref.ref(storage_owner) for storage_owner in tensors_of(case)]
    storages = {tensor().untyped_storage().data_ptr() for tensor in mine}
    found = {"before": len(storages)}
    rebuild = case.weights._rebuild

    def watched(owned, steps):
        alive = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.numel() > 1)
        found["at_build"] = sum(t.untyped_storage().data_ptr() in storages for t in alive)
        rebuild(owned, steps)

    case.weights._rebuild = watched
    return found


def tensors_of(case):
    """Flat masters and moments, and the parameters of the model."""
    zero = case.engine.optimizer
    flat = [value for state in zero.optimizer.state.values() for value in state.values() if value.numel() > 1]
    return [*zero.optimizer.state, *flat, *(getattr(p, "ds_tensor", p) for p in case.weights.gpt.parameters())]


def change_of_owner(ranks, stage, dtype, accumulation):
    """Experts 1, 2 become 2, 3: against a model that goes on with 1 and 2."""
    stays, changes = (case_of(ranks, stage, dtype, accumulation) for _ in range(2))
    for case in (stays, changes):
        train(case, 0, 1)
    masters = ranks_share(stays)
    before = moments_of(changes)[1]
    memory = watch_memory(changes)
    changed = changes.weights.own((2, 3)), changes.weights.own((2, 3))
    freed = memory["at_build"] == 0 < memory["before"]
    for case in (stays, changes):
        case.assign(masters)
    steps, moments = moments_of(changes)
    kept = {name for name in changes.weights.shapes if (key := expert_of(name)) is None or key.expert == 2}
    new = {name for name in changes.weights.shapes if (key := expert_of(name)) and key.expert == 3}
    for case in (stays, changes):
        train(case, 2)
    after, reference = changes.masters(), stays.masters()
    held = changes.expected(masters) if ranks.leads else {}
    later, later_moments = moments_of(changes)
    return {
        "changed": changed == (True, False),
        "freed": freed,
        "steps": steps == dict.fromkeys(kept, 2),
        "moments": same(moments, {name: values for name, values in before.items() if name in kept}),
        "kept_go_on": all(torch.equal(after[name], reference[name]) for name in kept if ranks.leads),
        "new_are_trained": all(not torch.equal(after[name], masters[name]) for name in new if ranks.leads),
        "given_away_stay": all(
            torch.equal(after[name], held[name]) for name in after if (key := expert_of(name)) and key.expert in (0, 1)
        ),
        "ages": later == dict.fromkeys(kept, 3) | dict.fromkeys(new, 1),
        "new_begin_at_zero": all(
            torch.allclose(m.exp_avg_sq, 5 * m.exp_avg**2, rtol=1e-5, atol=0)
            for name, m in later_moments.items()
            if name in new
        ),
        "twice": changes.weights.own((0, 1, 2, 3)) and moments_of(changes)[0] == later,
    }


def main():
    with process_group():
        ranks = Ranks(60)
        plain = ((stage, dtype, 1) for stage, dtype in itertools.product((1, 2, 3), ("fp32", "bf16")))
        # bf16 with gradients summed in fp32 has an optimizer of its own in stage 1
        for stage, dtype, accumulation in [(1, "bf16", 2), *plain]:
            which = {"stage": stage, "dtype": dtype, "accumulation": accumulation}
            for check in (first_step, carried_over, change_of_owner):
                report(check.__name__, ranks, which | check(ranks, stage, dtype, accumulation))


if __name__ == "__main__":
    main()
