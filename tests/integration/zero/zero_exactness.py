"""Run by test_zero.py under the deepspeed launcher with two ranks: weights through ZeRO 1-3, in fp32 and bf16.

Prints one JSON line a configuration: what was exact and what was not.
"""

import itertools
import json
import os
import sys
import tempfile
from math import prod
from pathlib import Path

import torch

from spes_mega.errors import DataError, SpesError
from spes_mega.layout import expert_of, initial_tensor
from spes_mega.node.main import prepare_process
from spes_mega.recipe import Recipe, load_recipe

prepare_process(int(os.environ["LOCAL_SIZE"]))

import deepspeed  # noqa: E402
from deepspeed.utils import safe_get_full_optimizer_state  # noqa: E402

from spes_mega.client.client import HubClient  # noqa: E402
from spes_mega.model import forward_logits, language_model_loss, set_router_loss_scale  # noqa: E402
from spes_mega.model.config import DTYPES  # noqa: E402
from spes_mega.node.distributed.process_group import process_group  # noqa: E402
from spes_mega.node.distributed.ranks import Ranks  # noqa: E402
from spes_mega.node.stop import StopRequest  # noqa: E402
from spes_mega.node.sync.hub_node import HubNode  # noqa: E402
from spes_mega.node.zero.local_model import LocalModel  # noqa: E402
from spes_mega.outer.ownership import ownership_of, pushed_names  # noqa: E402

SHAPE = {
    "family": "qwen3_moe", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "num_experts": 4, "top_k": 2, "expert_hidden_size": 24, "vocab_size": 61, "max_seq_len": 32,
}  # fmt: skip
OWNED = (1, 2)


def recipe_of(stage, dtype, frozen_dtype="bf16", offload=None, **train):
    # tied embeddings in some of the configurations: one parameter that two modules use
    model = SHAPE | {"tie_embeddings": stage != 2, "frozen_dtype": frozen_dtype}
    settings = {"seq_len": 8, "lr": 0.0, "weight_decay": 0.0, "dtype": dtype, "zero_stage": stage}
    # without this every parameter is so small that ZeRO-3 leaves it whole
    zero = {"stage3_param_persistence_threshold": 100} if stage == 3 else {}
    if offload is not None:
        zero["offload_optimizer"] = {"device": offload}
    deepspeed_section = {"zero_optimization": zero} if zero else {}
    return Recipe.model_validate({"model": model, "train": settings | train, "deepspeed": deepspeed_section})


class Case:
    """A model under DeepSpeed, as a node has it."""

    def __init__(self, ranks, recipe, owned=OWNED):
        self.ranks, self.recipe = ranks, recipe
        self.weights = LocalModel(recipe, owned, ranks, StopRequest(), Path(tempfile.gettempdir()))

    @property
    def engine(self):
        return self.weights.engine

    @property
    def owned(self):
        return self.weights.owned

    def values(self, seed):
        shapes = self.weights.shapes
        return {name: initial_tensor(self.recipe.model, name, shapes[name], seed) for name in shapes}

    def assign(self, values):
        self.weights.assign(values, values.__getitem__)

    def masters(self):
        """Of rank 0: canonical name to value; of the other ranks nothing."""
        out = {}
        self.weights.collect(
            self.weights.shapes, lambda shapes, tensors: out.update((n, t.clone()) for n, t in tensors), rounded=True
        )
        return out

    def parameters(self):
        """The parameters as they are in the forward pass, on this rank, by canonical name."""
        out = {}
        for entry in self.weights.map.entries:
            with deepspeed.zero.GatheredParameters(entry.parameter, enabled=self.recipe.train.zero_stage == 3):
                out.update({n: t.clone() for n, t in entry.split(entry.parameter.detach().clone()).items()})
        return out

    def trains(self, name):
        key = expert_of(name)
        return key is None or key.expert in self.owned

    def held(self, values):
        """As the parameters hold them."""
        trained, frozen = DTYPES[self.recipe.train.dtype], DTYPES[self.recipe.frozen_dtype]
        return {n: v.to(trained if self.trains(n) else frozen) for n, v in values.items()}

    def expected(self, values):
        """Trainable tensors exactly, frozen ones as they are held."""
        held = self.held(values)
        return {n: v if self.trains(n) else held[n].float() for n, v in values.items()}

    def step(self, tokens):
        """Returns the sum of the losses of the micro-batches."""
        self.engine.train()
        total = 0.0
        set_router_loss_scale(1 / self.recipe.train.accumulation(self.ranks.size))
        for part in tokens.chunk(self.recipe.train.accumulation(self.ranks.size)):
            logits = forward_logits(self.engine, part[:, :-1].contiguous())
            loss = sum(language_model_loss(logits, part[:, 1:].contiguous(), 1e-5))
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss)
        return total


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def tokens_for(rank, samples=2):
    return torch.randint(0, 48, (samples, 9), generator=torch.Generator().manual_seed(rank))


def exactness(ranks, stage, dtype, frozen_dtype):
    case = Case(ranks, recipe_of(stage, dtype, frozen_dtype, micro_batch_size=2))
    first, second = case.values(1), case.values(2)
    case.assign(first)
    facts = {"get": equal(case.masters(), case.expected(first)) or not ranks.leads}
    case.step(tokens_for(ranks.rank))  # ranks see other tokens, so other experts are busy
    facts["lr_0_step"] = equal(case.masters(), case.expected(first)) or not ranks.leads
    case.assign(second)
    rounded = case.held(second)
    facts["set"] = equal(case.masters(), case.expected(second)) or not ranks.leads
    facts["parameters"] = equal(case.parameters(), rounded)
    case.step(tokens_for(ranks.rank + 10))
    facts["masters_followed"] = equal(case.parameters(), rounded)
    some = [n for n in second if (key := expert_of(n)) is None or key.expert != OWNED[0]]
    case.weights.assign(some, first.__getitem__)
    mixed = {n: first[n] if n in some else second[n] for n in second}
    facts["part_set"] = equal(case.masters(), case.expected(mixed)) or not ranks.leads
    return facts


def frozen_while_training(ranks, stage, dtype, frozen_dtype):
    case = Case(ranks, recipe_of(stage, dtype, frozen_dtype, micro_batch_size=2, lr=1e-2, weight_decay=0.1))
    values = case.values(1)
    # a router so lopsided that frozen expert 0 gets everything: the owned ones get no token on any rank
    for name in values:
        if name.endswith("mlp.gate.weight"):
            values[name] = torch.zeros_like(values[name])
    case.assign(values)
    for number in range(2):
        case.step(tokens_for(ranks.rank + 2 * number))
    after, parameters, expected = case.masters(), case.parameters(), case.expected(values)
    frozen = [n for n in expected if not case.trains(n)]
    moved = [n for n in expected if case.trains(n) and "experts" not in n and not n.endswith("mlp.gate.weight")]
    return {
        "frozen": all(torch.equal(after[n], expected[n]) for n in frozen) if ranks.leads else True,
        "frozen_parameters": all(torch.equal(parameters[n].float(), expected[n]) for n in frozen),
        "trained": all(not torch.equal(after[n], expected[n]) for n in moved) if ranks.leads else True,
        "bytes": bytes_held(case),
    }


def bytes_held(case):
    """Bytes of parameters of this rank, and of master weights and Adam's moments, as they are and as they must be."""
    stage, size = case.recipe.train.zero_stage, case.ranks.size
    counts = {kind: sum(prod(e.shape) for e in entries_of(case, kind)) for kind in (True, False)}
    width = {True: DTYPES[case.recipe.train.dtype].itemsize, False: DTYPES[case.recipe.frozen_dtype].itemsize}
    parameters = [e.parameter for e in case.weights.map.entries]
    share = size if stage == 3 else 1
    optimizer = case.engine.optimizer
    states = optimizer.optimizer.state
    assert all(key.dtype == torch.float32 for key in states)
    return {
        "parameters": sum(p.ds_tensor.nbytes for p in parameters) if stage == 3 else sum(p.nbytes for p in parameters),
        "parameters_expected": sum(counts[kind] * width[kind] for kind in counts) // share,
        "masters": sum(key.nbytes for key in states),
        "moments": sum(s[name].nbytes for s in states.values() for name in ("exp_avg", "exp_avg_sq")),
        "masters_expected": counts[True] * 4 // size,
        "gradients_of_frozen": sum(p.grad is not None for p in parameters if not p.requires_grad),
    }


def entries_of(case, trained):
    return [e for e in case.weights.map.entries if e.parameter.requires_grad == trained]


def gradients(ranks, stage, dtype, micro_batch_size, grad_accumulation, tokens, **coefficients):
    train = {"micro_batch_size": micro_batch_size, "grad_accumulation": grad_accumulation, "lr": 1e-3}
    losses = {"aux_loss_coeff": 0.0, "router_z_loss_coeff": 0.0, "clip_grad": 0.0} | coefficients
    case = Case(ranks, recipe_of(stage, dtype, **train, **losses))
    case.assign(case.values(1))
    case.step(tokens)
    norm = float(case.engine.get_global_grad_norm())
    # After the first step Adam's first moment is 1 - beta1 times the gradient. (DeepSpeed 0.19 links the moments of
    # the first parameter group alone, which is that of the matrices.)
    parameters = [e.parameter for e in case.weights.map.entries if e.parameter.requires_grad and len(e.shape) > 1]
    return norm, torch.cat([safe_get_full_optimizer_state(p, "exp_avg").flatten() / 0.1 for p in parameters])


def accumulation(ranks, stage, dtype):
    """Gradients of the language-model loss in one pass of 8 samples and in 8 passes of one."""
    tokens = tokens_for(ranks.rank, samples=8)
    (norm_a, one), (norm_b, many) = (gradients(ranks, stage, dtype, *how, tokens) for how in ((8, 1), (1, 8)))
    return {
        "norm_ratio": norm_b / norm_a,
        "relative_difference": float((many - one).norm() / one.norm()),
        "norm_of_matrices": float(one.norm()) / norm_a,
    }


def router_accumulation(ranks, stage):
    """The same, with the router's losses, on equal samples: then their balance in one pass and in many is the same."""
    tokens = tokens_for(ranks.rank, samples=1).repeat(8, 1)
    strong = {"aux_loss_coeff": 1.0, "router_z_loss_coeff": 0.1}
    _, one = gradients(ranks, stage, "fp32", 8, 1, tokens, **strong)
    _, many = gradients(ranks, stage, "fp32", 1, 8, tokens, **strong)
    _, without = gradients(ranks, stage, "fp32", 8, 1, tokens)
    return {
        "relative_difference": float((many - one).norm() / one.norm()),
        "share_of_router_losses": float((one - without).norm() / one.norm()),
    }


def recomputed(ranks, stage, recompute):
    """Gradients with activations kept, and with them computed again, while ranks route to different experts."""
    tokens = tokens_for(ranks.rank)
    (_, kept), (_, again) = (
        gradients(ranks, stage, "fp32", 2, 1, tokens, aux_loss_coeff=1.0, recompute=how) for how in ("none", recompute)
    )
    return {"relative_difference": float((again - kept).norm() / kept.norm())}


def offloaded(ranks, stage, dtype):
    """Two steps, and a third loss that tells of the second, with the optimizer's state in RAM and without."""
    losses, facts = {}, {}
    for device in ("none", "cpu"):
        case = Case(ranks, recipe_of(stage, dtype, offload=device, micro_batch_size=2, lr=1e-2))
        case.assign(case.values(1))
        losses[device] = [case.step(tokens_for(ranks.rank)) for _ in range(3)]
        zero = case.engine.optimizer
        facts[device] = bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))
        second = case.values(2)
        case.assign(second)
        facts[f"{device}_set"] = equal(case.masters(), case.expected(second)) or not ranks.leads
    return {"offloads": facts.pop("cpu") and not facts.pop("none"), "losses": losses} | facts


def sync(ranks, recipe_file, address):
    """One round with a hub at learning rate 0, in bf16: this is node 0, and rank 0 plays node 1 beside it."""
    recipe = load_recipe(recipe_file)
    ownership = ownership_of(recipe.model.num_experts, 2, recipe.spes.ownership)
    client, other = (HubClient.for_recipe(recipe, address, k) if ranks.leads else None for k in (0, 1))
    source = HubNode(0, ownership, ranks, StopRequest(), client, lambda text: None)
    source.join()
    case = Case(ranks, recipe, ownership.owned(0))
    round_ = source.start(case.weights)
    before = case.masters()
    case.step(tokens_for(ranks.rank))
    unchanged = case.masters()

    def play_node_1():
        other.join()
        names = pushed_names(case.weights.shapes, ownership, 1, expert_of)
        with other.pull() as pulled:
            other.push(0, {n: pulled.shapes[n] for n in names}, ((n, pulled.read(n) * 1.001) for n in names))

    ranks.first(play_node_1)
    closed = source.exchange(case.weights, round_, 16)
    state = ranks.first(lambda: {n: t.flatten().tolist() for n, t in other.pull()})  # exact: fp32 fits into JSON
    shapes = case.weights.shapes
    state = {n: torch.tensor(values, dtype=torch.float32).view(shapes[n]) for n, values in state.items()}

    def trained(values):
        return {n: v for n, v in values.items() if case.trains(n)}

    for connection in (source, *((client, other) if ranks.leads else ())):
        connection.leave()
    return {
        "round": closed,
        "lr_0_changes_nothing": equal(unchanged, before),
        "the_other_changed_it": any(not torch.equal(state[n], before[n]) for n in before) if ranks.leads else True,
        "masters": equal(trained(case.masters()), trained(state) if ranks.leads else {}),
        "parameters": equal(case.parameters(), {n: t.to(torch.bfloat16) for n, t in state.items()}),
    }


def shared_errors(ranks):
    """An error on one rank is raised on all."""

    def fail_on(rank):
        def action():
            if ranks.rank == rank:
                raise DataError(f"bad data on rank {rank}")

        return action

    facts = {}
    for name, run in {
        "agree_0": lambda: ranks.agree(fail_on(0)),
        "agree_1": lambda: ranks.agree(fail_on(1)),
        "first": lambda: ranks.first(fail_on(0)),
        "tensor": lambda: ranks.tensor(fail_on(0), (2,)),
        "lead": lambda: ranks.lead(lambda step: (step(), fail_on(0)()), lambda: None),
    }.items():
        try:
            run()
            facts[name] = "nothing raised"
        except SpesError as e:
            facts[name] = f"{e} {e.exit_code}"
    facts["lead_result"] = ranks.lead(lambda step: [step(), step(), 3], lambda: None)
    facts["first_result"] = ranks.first(lambda: {"rank": ranks.rank})
    facts["tensor_result"] = ranks.tensor(lambda: torch.arange(2), (2,)).tolist()
    return facts


def main():
    stages, dtypes = (1, 2, 3), ("fp32", "bf16")
    with process_group():
        ranks = Ranks(60)
        report("errors", ranks, shared_errors(ranks))
        report("sync", ranks, sync(ranks, *sys.argv[2:]))  # the first argument is the launcher's --local_rank
        for stage, dtype in itertools.product(stages, dtypes):
            for frozen_dtype in ("bf16", "train") if dtype == "fp32" else ("bf16",):
                which = {"stage": stage, "dtype": dtype, "frozen_dtype": frozen_dtype}
                report("exactness", ranks, which | exactness(ranks, **which))
                report("frozen", ranks, which | frozen_while_training(ranks, **which))
        for stage, dtype in ((1, "fp32"), (3, "fp32"), (1, "bf16")):
            report("accumulation", ranks, {"stage": stage, "dtype": dtype} | accumulation(ranks, stage, dtype))
        for stage, dtype in ((1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16")):
            report("offloaded", ranks, {"stage": stage, "dtype": dtype} | offloaded(ranks, stage, dtype))
        for stage in (1, 3):
            report("router_accumulation", ranks, {"stage": stage} | router_accumulation(ranks, stage))
        for stage, recompute in itertools.product((1, 3), ("selective", "full")):
            which = {"stage": stage, "recompute": recompute}
            report("recomputed", ranks, which | recomputed(ranks, **which))


def report(kind, ranks, facts):
    sys.stdout.write(json.dumps({"kind": kind, "rank": ranks.rank} | facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
