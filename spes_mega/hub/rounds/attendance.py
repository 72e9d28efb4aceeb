"""Who takes part in a run: nodes join, call, miss rounds, and leave."""

import threading
from collections.abc import Callable, Collection

from spes_mega.errors import HubRefusedError
from spes_mega.hub.rounds.members import Member, Members, Presence
from spes_mega.hub.rounds.shutdown import Shutdown


class Attendance:
    """Keep the presence of each node. All methods may be called from any thread."""

    def __init__(
        self,
        num_nodes: int,
        members: Members,
        remember: Callable[[Members], None],
        changed: threading.Condition,
        shutdown: Shutdown,
    ) -> None:
        """Begin with the `members` that an earlier hub of the run knew.

        `remember` keeps each change of them; it may raise a SpesError, and then the change is not made. `changed` is
        the lock of the rounds, and is notified of each change.
        """
        self._members = {node: Member() for node in range(num_nodes)} | dict(members)
        self._remember = remember
        self._changed = changed
        self._shutdown = shutdown

    def join(self, node: int, session: str) -> None:
        """Let a node's process begin; it takes over the node's number from an older process."""
        with self._changed:
            self._shutdown.check_alive()
            self._note({node: Member(Presence.JOINED, session)})

    def heard(self, node: int, session: str) -> None:
        """Note that a node called. After a restart of the hub, this makes it known again.

        Raises:
            HubRefusedError: another process has joined under this number since.
        """
        with self._changed:
            self._shutdown.check_alive()
            self.check_session(node, session)
            if self._members[node].presence is not Presence.JOINED:
                self._note({node: Member(Presence.JOINED, session)})

    def leave(self, node: int, session: str) -> None:
        """Note that a node takes no more part. What it has pushed counts."""
        with self._changed:
            if self._members[node].session in (None, session):
                self._note({node: Member(Presence.LEFT, session)})

    def missed(self, nodes: Collection[int]) -> None:
        """Note that nodes did not push for the round that closes."""
        with self._changed:
            self._note({node: Member(Presence.MISSED, self._members[node].session) for node in nodes})

    def check_session(self, node: int, session: str) -> None:
        """Raise HubRefusedError if another process has joined under the node's number."""
        with self._changed:
            if self._members[node].session not in (None, session):
                raise HubRefusedError(f"another process has joined as node {node}; this one no longer takes part")

    def presence(self) -> dict[int, Presence]:
        """Return what is known of each node."""
        with self._changed:
            return {node: member.presence for node, member in self._members.items()}

    def with_presence(self, *presences: Presence) -> list[int]:
        """Return the nodes that have one of these presences."""
        with self._changed:
            return [node for node, member in self._members.items() if member.presence in presences]

    def _note(self, changes: Members) -> None:
        if changes:
            members = self._members | dict(changes)
            self._remember(members)
            self._members = members
            self._changed.notify_all()
