"""The whole outer loop in plain torch, on whole tensors in memory: what hub and nodes must hold after each round."""

import torch

from spes_mega.layout.names import expert_of
from spes_mega.outer.ownership import private_names, pushed_names
from tests.hub.fabricated import merge_changes, merged, ownership


def through(codec, change):
    """What a receiver makes of a change."""
    if codec == "bf16":
        return change.bfloat16().float()
    rows = change.reshape(len(change) if change.dim() > 1 else 1, -1)
    scale = rows.abs().amax(1, keepdim=True) / 127
    levels = (rows / torch.where(scale > 0, scale, 1)).round().clamp(-127, 127)
    return (levels * scale).reshape(change.shape)


class Reference:
    """`published` is what everyone holds, `exact` what the hub really knows, `nodes[k]` what node k goes on from."""

    def __init__(self, recipe, initial):
        self.recipe = recipe
        self.owned = ownership(recipe)
        self.published = dict(initial)
        self.residual = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in initial.items()}
        self.nodes = [dict(initial) for _ in range(recipe.spes.num_nodes)]
        self._change, self._merged = {}, {}
        self.lost = [{} for _ in range(recipe.spes.num_nodes)]

    def terms(self, name):
        spes = self.recipe.spes
        kind = "shared" if expert_of(name) is None else "experts"
        return getattr(spes.wire.up, kind), getattr(spes.wire.down, kind), getattr(spes.outer, kind)

    def pushes(self, name):
        nodes = range(self.recipe.spes.num_nodes)
        return [node for node in nodes if name in pushed_names([name], self.owned, node, expert_of)]

    def private(self, name, node):
        plain = self.recipe.spes.outer.experts.averages
        return plain and bool(private_names([name], self.owned, node, expert_of))

    def close(self, trained, tokens=None, alpha=None):
        """A round in which `trained[node]` came out of local training."""
        contributors = {name: [n for n in self.pushes(name) if n in trained] for name in self.published}
        targets = {name: self._target(name, contributors[name], trained, tokens) for name in self.published}
        if alpha is not None:
            changes = merge_changes(self.recipe, targets, alpha)
            targets = merged(self.recipe, targets, alpha)
            for name in filter(expert_of, self.published):
                self._merge(name, changes[name].float(), contributors[name])
        for name, target in targets.items():
            if contributors[name] or (alpha is not None and expert_of(name) is not None):
                self._publish(name, target)
        for node in trained:
            for name in self.published:
                if node in contributors[name] and self.private(name, node):
                    if alpha is None:
                        self.nodes[node][name] = trained[node][name]
                    elif self.terms(name)[1] == "fp32":
                        self.nodes[node][name] = self.given(name, node)
                    else:
                        self.nodes[node][name] = trained[node][name] + self._merged[name]
                else:
                    self.nodes[node][name] = self.published[name]

    def exact(self, name):
        return self.published[name] + self.residual[name]

    def given(self, name, node):
        """What a node goes on from that has not its own training of the last round."""
        if not self.private(name, node):
            return self.published[name]
        return self.exact(name) + self.lost[node].get(name, 0)

    def _target(self, name, nodes, trained, tokens):
        """The change to publish; of what is published without loss, the values."""
        up, down, outer = self.terms(name)
        published = self.published[name]
        if not nodes:
            step = torch.zeros_like(published)
        elif up == "fp32" and outer.averages:
            mean = self._mean([trained[n][name] for n in nodes], nodes, tokens)
            if down == "fp32":
                return mean
            if self.private(name, nodes[0]):
                return self._finish(name, mean - published)
            step = mean - published
        else:
            step = self._mean([self._sent(name, n, trained[n][name], up) for n in nodes], nodes, tokens)
            if up == "fp32":
                step = step - published
            if outer.optimizer == "nesterov":
                self.velocity[name] = outer.momentum * self.velocity[name] + step
                step = (step + outer.momentum * self.velocity[name]) * outer.lr
            else:
                step = step * outer.lr
        if down == "fp32":
            return published + step
        return self._finish(name, self.residual[name] + step)

    def _finish(self, name, change):
        self._change[name] = change
        return self.published[name] + change

    def _sent(self, name, node, values, up):
        if up == "fp32":
            return values
        change = values - self.nodes[node][name]
        if name in self.lost[node]:
            change = change + self.lost[node][name]
        received = through(up, change)
        self.lost[node][name] = change - received
        return received

    def _mean(self, parts, nodes, tokens):
        weights = torch.tensor([1 if tokens is None else tokens[n] for n in nodes]).double()
        if len(parts) == 1:
            return parts[0].clone()
        return (sum(p.double() * w for p, w in zip(parts, weights, strict=True)) / weights.sum()).float()

    def _merge(self, name, change, nodes):
        """To be published is what its owner can be told of a merge, if it pushed."""
        down = self.terms(name)[1]
        if down == "fp32":
            return
        if nodes and self.private(name, nodes[0]):
            change = self._merged[name] = through(down, change)
        self._change[name] = self._change[name] + change

    def _publish(self, name, target):
        down = self.terms(name)[1]
        before = self.published[name]
        if down == "fp32":
            self.published[name] = target
            return
        change = self._change[name]
        self.published[name] = through(down, change) + before
        self.residual[name] = change + (before - self.published[name])
