"""How many bytes a run moves and keeps, from its shapes alone: payloads on the wire, and files on the disks of both
sides.

Headers with the names of tensors are counted, the frames around chunks (16 bytes in 256 KiB or more) are not.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spes_mega.layout.names import expert_of
from spes_mega.outer.ownership import Ownership, private_names, pushed_names
from spes_mega.recipe import SpesSection
from spes_mega.wire.policy import WirePolicy, delta_forms, merged_names
from spes_mega.wire.protocol import TOKENS_KEY
from spes_mega.wire.tensor_specs import Forms, Shapes, data_bytes, forms_of, in_fp32, payload_header


@dataclass(frozen=True)
class RoundBytes:
    """What one node sends and gets in a round to which all nodes push."""

    up: int
    down: int
    down_after_merge: int


@dataclass(frozen=True)
class StateBytes:
    """Files of one state on the hub's disk, but for config.json and the like."""

    weights: int
    """What a snapshot takes, too."""
    residual: int
    velocity: int
    delta: int
    merge: int
    """What a merge makes the delta larger; nothing where no experts are merged."""


@dataclass(frozen=True)
class SpoolBytes:
    """Files of a node for what is on its way, and where weights travel with loss, for what it remembers."""

    push: int
    state: int
    replica: int
    residual: int

    @property
    def total(self) -> int:
        return self.push + self.state + self.replica + self.residual


def payload_bytes(forms: Forms, metadata: Mapping[str, str] | None = None) -> int:
    return len(payload_header(forms, metadata)) + data_bytes(forms)


def push_bytes(shapes: Shapes, spes: SpesSection, ownership: Ownership, node: int, tokens: int) -> int:
    """Of a node's push after training on so many tokens."""
    names = pushed_names(shapes, ownership, node, expert_of)
    return payload_bytes(forms_of(_chosen(shapes, names), WirePolicy(spes).up), {TOKENS_KEY: str(tokens)})


def round_bytes(shapes: Shapes, spes: SpesSection, ownership: Ownership, node: int, tokens: int) -> RoundBytes:
    """For a node that took part in the round before, and trains the same experts in the next one."""
    policy = WirePolicy(spes)
    private = policy.private(shapes, ownership, node)
    others = [name for name in shapes if name not in private]
    return RoundBytes(
        up=push_bytes(shapes, spes, ownership, node, tokens),
        down=payload_bytes(forms_of(_chosen(shapes, others), policy.down)),
        down_after_merge=payload_bytes(forms_of(shapes, policy.down)),
    )


def state_bytes(shapes: Shapes, spes: SpesSection, ownership: Ownership) -> StateBytes:
    """Of a state that a round gave; that of round 0 is its weights alone."""
    policy = WirePolicy(spes)
    lossy = _chosen(shapes, [name for name in shapes if not policy.down(name).lossless])
    merged = merged_names(shapes, ownership, range(ownership.num_nodes), policy) if spes.merge_steps else ()
    delta, after_merge = (
        payload_bytes(delta_forms(shapes, policy, lossy, names)) if lossy else 0 for names in ((), merged)
    )
    moving = _chosen(shapes, [name for name in shapes if policy.optimizer(name).momentum])
    return StateBytes(
        weights=payload_bytes(in_fp32(shapes)),
        residual=payload_bytes(in_fp32(lossy)) if lossy else 0,
        velocity=payload_bytes(in_fp32(moving)) if moving else 0,
        delta=delta,
        merge=after_merge - delta,
    )


def spool_bytes(shapes: Shapes, spes: SpesSection, ownership: Ownership, node: int, tokens: int) -> SpoolBytes:
    """At the most: a whole state comes at the start, and what is staged lies beside what holds."""
    policy = WirePolicy(spes)
    pushed = pushed_names(shapes, ownership, node, expert_of)
    own = private_names(pushed, ownership, node, expert_of) if policy.averages_experts else []
    values = data_bytes(in_fp32(shapes)) + data_bytes(in_fp32(_chosen(shapes, own)))
    return SpoolBytes(
        push=push_bytes(shapes, spes, ownership, node, tokens),
        state=payload_bytes(in_fp32(shapes)),
        replica=0 if policy.lossless else values,
        residual=2 * lost_bytes(shapes, spes, ownership, node),
    )


def lost_bytes(shapes: Shapes, spes: SpesSection, ownership: Ownership, node: int) -> int:
    """What a node's pushes lost so far, which it keeps in checkpoints, too."""
    policy = WirePolicy(spes)
    names = pushed_names(shapes, ownership, node, expert_of)
    lossy = [name for name in names if not policy.up(name).lossless]
    return data_bytes(in_fp32(_chosen(shapes, lossy)))


def _chosen(shapes: Shapes, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    return {name: shapes[name] for name in names}
