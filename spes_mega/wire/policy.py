"""What a recipe says of each tensor: the codecs that it travels in, and the outer optimizer that moves it."""

from collections.abc import Collection, Iterable

from spes_mega.layout.names import expert_of
from spes_mega.outer.codecs import Codec, codec_named
from spes_mega.outer.ownership import Ownership, private_names
from spes_mega.recipe import OuterOptimizer, SpesSection
from spes_mega.wire.tensor_specs import Form, Shapes, data_bytes, header_limit, in_fp32


class WirePolicy:
    """Tell the codecs and the outer optimizer of each tensor by its name; hub and nodes share one policy."""

    def __init__(self, spes: SpesSection) -> None:
        wire, outer = spes.wire, spes.outer
        self.lossless = wire.lossless
        """Only values travel, so that nobody has to remember what was published, or lost."""
        self._shared = (codec_named(wire.up.shared), codec_named(wire.down.shared), outer.shared)
        self._experts = (codec_named(wire.up.experts), codec_named(wire.down.experts), outer.experts)

        self.averages_experts = outer.experts.averages

    def _of(self, name: str) -> tuple[Codec, Codec, OuterOptimizer]:
        return self._shared if expert_of(name) is None else self._experts

    def up(self, name: str) -> Codec:
        return self._of(name)[0]

    def down(self, name: str) -> Codec:
        return self._of(name)[1]

    def optimizer(self, name: str) -> OuterOptimizer:
        return self._of(name)[2]

    def private(self, names: Iterable[str], ownership: Ownership, node: int) -> set[str]:
        """Tensors of which a node's own values are the state: it alone trains them, and the hub takes them as they are.

        The node begins each round with its own values, and the hub keeps published weights and residual that add up to
        them; all other tensors everyone begins with as they are published.
        """
        return set(private_names(names, ownership, node, expert_of)) if self.averages_experts else set()


def contributors(name: str, ownership: Ownership, pushed: Collection[int]) -> list[int]:
    """Of the nodes that pushed, those whose values go into a tensor, in ascending order."""
    key = expert_of(name)
    return [node for node in sorted(pushed) if key is None or key.expert in ownership.owned(node)]


def changed_names(names: Iterable[str], ownership: Ownership, pushed: Collection[int], merged: bool) -> list[str]:
    """Tensors that a round changes: those that somebody contributes to, and with a merge all experts."""
    return [name for name in names if contributors(name, ownership, pushed) or (merged and expert_of(name) is not None)]


def merged_names(names: Iterable[str], ownership: Ownership, pushed: Collection[int], policy: WirePolicy) -> list[str]:
    """Experts of which a merge sends their owner the change that it makes, in the codec that goes down: those that a
    node which pushed alone trained, and that are published with loss."""
    if not policy.averages_experts:
        return []
    experts = ((name, key.expert) for name in names if (key := expert_of(name)) is not None)
    return [
        name for name, expert in experts if not policy.down(name).lossless and ownership.sole_owner(expert) in pushed
    ]


def merge_name(name: str) -> str:
    """Name, beside a change that is published, of what a merge changed of an expert for its owner."""
    return name + ".merge"


def delta_forms(shapes: Shapes, policy: WirePolicy, changed: Iterable[str], merged: Iterable[str]) -> dict[str, Form]:
    """What is kept of a round's changes: all that is published with loss, and what a merge changed for owners."""
    forms = {name: Form(shapes[name], policy.down(name)) for name in changed if not policy.down(name).lossless}
    return forms | {merge_name(name): Form(shapes[name], policy.down(name)) for name in merged}


def bytes_beside(shapes: Shapes, policy: WirePolicy, changed: Collection[str], merged: Collection[str]) -> int:
    """At most, of what a new state has beside its weights: residual, momentum, and the payload that led to it.

    `merged` are the `merged_names` if it ends with a merge.
    """
    lossy = {name: shape for name, shape in shapes.items() if not policy.down(name).lossless}
    moving = {name: shape for name, shape in shapes.items() if policy.optimizer(name).momentum}
    payloads = [in_fp32(lossy)] * bool(lossy) + [in_fp32(moving)] * bool(moving)
    payloads.append(delta_forms(shapes, policy, changed, merged))
    return sum(data_bytes(forms) + header_limit(forms) for forms in payloads if forms)
