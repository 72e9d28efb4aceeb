"""What a run must have come to, in plain torch, from the bytes of the pushes that were accepted."""

import safetensors.torch
import torch
from hub.fabricated import read_state
from hub.reference import through


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


def replayed(initial, rounds, codec):
    """The published state after rounds of {node: payload}: means, moved by what the codec makes of them."""
    published = dict(initial)
    lost = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
    for payloads in rounds:
        pushes = [received(payload) for _, payload in sorted(payloads.items())]
        for name, before in list(published.items()):
            parts = [tensors[name] for tensors in pushes if name in tensors]
            if not parts:
                continue
            mean = parts[0] if len(parts) == 1 else (sum(p.double() for p in parts) / len(parts)).float()
            if codec == "fp32":
                published[name] = mean
                continue
            change = lost[name] + mean
            published[name] = through(codec, change) + before
            lost[name] = change + (before - published[name])
    return published


def differing(directory, expected):
    """A line for each tensor of a checkpoint that is not what is expected."""
    found = read_state(directory)
    if found.keys() != expected.keys():
        yield f"{directory}: other tensors"
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor):
            yield f"{name} differs by up to {(found[name] - tensor).abs().max():g}"
