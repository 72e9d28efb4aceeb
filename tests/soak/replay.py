"""What a run must have come to, in plain torch, from the bytes of the pushes that were accepted."""

import safetensors.torch
import torch

from spes_mega.layout.names import expert_of
from tests.hub.fabricated import merge_changes, merged, read_state
from tests.hub.reference import through


def received(payload):
    """The tensors of a push, in fp32."""
    tensors = safetensors.torch.load(payload)
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        values = tensor.float()
        if (scale := tensors.get(f"{name}.scale")) is not None:
            values = (values.reshape(len(scale), -1) * scale[:, None]).reshape(values.shape)
        out[name] = values
    return out


def replayed(recipe, initial, rounds, alphas):
    """The published state after rounds of {node: payload}: means, moved by what the codec makes of them.

    `alphas` are those of the merges; None where a round ends without one. Every expert has one owner.
    """
    codec = recipe.spes.wire.down.shared
    published = dict(initial)
    lost = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
    for payloads, alpha in zip(rounds, alphas, strict=True):
        means = mean_of([received(payload) for _, payload in sorted(payloads.items())])
        if codec == "fp32":
            published |= means
            published = published if alpha is None else merged(recipe, published, alpha)
            continue
        changes = {name: lost[name] + mean for name, mean in means.items()}
        if alpha is not None:
            changes |= {name: lost[name] for name in published if expert_of(name) and name not in means}
            exact = {name: before + changes.get(name, 0) for name, before in published.items()}
            for name, merge in merge_changes(recipe, exact, alpha).items():
                # Who trained an expert gets what the codec makes of it.
                changes[name] = changes[name] + (through(codec, merge.float()) if name in means else merge.float())
        for name, change in changes.items():
            before = published[name]
            published[name] = through(codec, change) + before
            lost[name] = change + (before - published[name])
    return published


def mean_of(pushes):
    """Of each tensor, over those that have it."""
    means = {}
    for name in dict.fromkeys(name for tensors in pushes for name in tensors):
        parts = [tensors[name] for tensors in pushes if name in tensors]
        means[name] = parts[0] if len(parts) == 1 else (sum(p.double() for p in parts) / len(parts)).float()
    return means


def differing(directory, expected):
    """A line for each tensor of a checkpoint that is not what is expected."""
    found = read_state(directory)
    if found.keys() != expected.keys():
        yield f"{directory}: other tensors"
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor):
            yield f"{name} differs by up to {(found[name] - tensor).abs().max():g}"
