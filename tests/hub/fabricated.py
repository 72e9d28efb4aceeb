"""Small runs with made-up training: what nodes push, and what a round must give, in plain torch."""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from spes_mega.layout.initialize import generator
from spes_mega.layout.names import expected_tensors, expert_of
from spes_mega.layout.reader import open_checkpoint
from spes_mega.outer.ownership import pushed_names, with_absent
from spes_mega.recipe import parse_recipe

MODEL = {
    "family": "qwen3_moe",
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "top_k": 2,
    "expert_hidden_size": 12,
    "vocab_size": 64,
    "max_seq_len": 32,
}


def raw_recipe(model=None, train=None, **spes):
    return {
        "name": "fabricated",
        "model": MODEL | (model or {}),
        "spes": {"num_nodes": 2, "sync_every": 10, "rpc_deadline_s": 20, "round_deadline_s": 30} | spes,
        "train": {"steps": 40, "seq_len": 16} | (train or {}),
    }


def make_recipe(model=None, train=None, **spes):
    return parse_recipe(raw_recipe(model, train, **spes), source="test", base=Path())


def ownership(recipe, absent=()):
    return with_absent(recipe.ownership(), absent, recipe.spes.capacity)


def shapes_of(recipe, node, absent=()):
    shapes = expected_tensors(recipe.model)
    return {name: shapes[name] for name in pushed_names(shapes, ownership(recipe, absent), node, expert_of)}


def fabricate(recipe, node, round_, salt="", absent=()):
    """What `node` pushes in a round: fp32 tensors drawn from a key."""
    return {
        name: torch.randn(shape, generator=generator(round_, f"{salt}{node}/{name}"))
        for name, shape in shapes_of(recipe, node, absent).items()
    }


def push(client, round_, tensors, tokens=0):
    client.push(round_, {name: tuple(t.shape) for name, t in tensors.items()}, tensors.items(), tokens)


def pull(client, have_round=None):
    with client.pull(have_round) as pulled:
        return pulled.round, dict(pulled)


def next_state(recipe, state, pushes, alpha=None, absent=()):
    """The state that a round gives: means and owners' values, then the merge; whole tensors, no streaming."""
    owned = ownership(recipe, absent)
    out = {}
    for name, old in state.items():
        key = expert_of(name)
        parts = [pushes[n][name] for n in sorted(pushes) if key is None or key.expert in owned.owned(n)]
        out[name] = torch.stack(parts).double().mean(0).float() if parts else old
    return out if alpha is None else merged(recipe, out, alpha)


def merged(recipe, state, alpha):
    changes = merge_changes(recipe, state, alpha)
    return {name: (old.double() + changes.get(name, 0)).float() for name, old in state.items()}


def merge_changes(recipe, state, alpha):
    """What a merge adds to experts that have donors, in fp64."""
    out = {}
    experts = range(recipe.model.num_experts)
    for layer in filter(recipe.model.is_moe_layer, range(recipe.model.num_layers)):
        name = f"model.layers.{layer}.mlp.experts.{{}}.{{}}.weight".format
        gates = torch.stack([state[name(e, "gate_proj")].flatten() for e in experts]).double()
        similarity = F.cosine_similarity(gates[:, None], gates[None], dim=-1)
        for own in experts:
            others = sorted((e for e in experts if e != own), key=lambda e: -similarity[own, e])
            donors = others[: recipe.spes.merge_donors]
            for matrix in ("gate_proj", "up_proj", "down_proj") if donors else ():
                mine = state[name(own, matrix)].double()
                pull = sum(state[name(d, matrix)].double() - mine for d in sorted(donors))
                out[name(own, matrix)] = pull * (alpha / len(donors))
    return out


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def until_durable(path):
    """Nodes are given a state before it has its name on the disk."""
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path


def read_state(path):
    """All tensors of a checkpoint directory."""
    with open_checkpoint(until_durable(path)) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.names}


def pushes_in(state):
    """All files that a hub keeps for pushes, but for those that the open round's may be written over."""
    walk = os.walk(state / "pushes")  # which does not mind that the hub removes a folder meanwhile
    return [path for folder, _, names in walk for path in map(Path(folder).joinpath, names) if path.suffix != ".spare"]
