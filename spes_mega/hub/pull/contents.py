"""What a pull contains: for each tensor whether it is sent, and how."""

from dataclasses import dataclass
from enum import Enum

from spes_mega.hub.run_state import RunState
from spes_mega.hub.state.ledger import RoundRecord
from spes_mega.wire.policy import changed_names


class Part(Enum):
    """How a tensor is sent."""

    PUBLISHED = "values that all nodes hold"
    EXACT = "exact values, for the node that alone trains the tensor"
    DELTA = "the change since the last round, in its codec"
    MERGE = "what a merge changed, in its codec, for the node that alone trains the tensor"


@dataclass(frozen=True)
class PullContents:
    """What a node is sent of a state."""

    parts: dict[str, Part]
    full: bool
    """Whether the node gets all tensors, and builds on nothing that it has."""


def pull_contents(state: RunState, node: int, have_round: int | None, record: RoundRecord) -> PullContents:
    """Decide what a node that has the state of `have_round` is sent of the one of `record`.

    A node gets everything unless it has the state before, trains the same experts as before, and, where weights travel
    without loss, was counted in this round: only where they travel with loss does it know the last state for sure, and
    not just its own training. Else, by tensor:

    | tensor                                         | no merge  | merge, down lossless | merge, down lossy |
    |------------------------------------------------|-----------|----------------------|-------------------|
    | the node alone trained it and goes on doing so | nothing   | EXACT                | MERGE             |
    | the node alone trains it from now on           | EXACT     | EXACT                | EXACT             |
    | the node alone trained it and no longer does   | PUBLISHED | PUBLISHED            | PUBLISHED         |
    | others that the round changed, down lossless   | PUBLISHED | PUBLISHED            | n/a               |
    | others that the round changed, down lossy      | DELTA     | n/a                  | DELTA             |
    | all others                                     | nothing   | nothing              | nothing           |

    The first row needs a push of the node that was counted; what it trained otherwise nobody has, so it gets EXACT.
    """
    policy, counted = state.policy, node in record.nodes
    ownership = state.ownership_from(record)
    trained = state.ownership_from(state.ledger.record(record.round - 1) or record)  # if it is too long ago to tell
    private = policy.private(state.shapes, ownership, node)
    rebuilds = trained.owned(node) != ownership.owned(node)  # with other experts than before it needs all of its model
    if have_round != record.round - 1 or rebuilds or (policy.lossless and not counted):
        return PullContents({n: Part.EXACT if n in private else Part.PUBLISHED for n in state.shapes}, full=True)
    before = policy.private(state.shapes, trained, node)
    # Without loss, what a node holds is exact, whoever else trains it from now on.
    begins = before if policy.lossless else private
    changed = set(changed_names(state.shapes, trained, record.nodes, record.merged))

    def part(name: str) -> Part | None:
        lossless = policy.down(name).lossless
        if counted and name in before and name in begins:
            if not record.merged:
                return None
            return Part.EXACT if lossless else Part.MERGE
        if name in begins:
            return Part.EXACT
        if name in before:
            return Part.PUBLISHED
        if name in changed:
            return Part.PUBLISHED if lossless else Part.DELTA
        return None

    return PullContents({name: sent for name in state.shapes if (sent := part(name)) is not None}, full=False)
