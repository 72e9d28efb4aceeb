"""Who takes part in a run. Kept in the state directory, so that a restarted hub knows whom it waits for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Presence(Enum):
    """What the hub knows of a node."""

    NEVER_JOINED = "never joined"
    JOINED = "joined"
    MISSED = "missed a round"  # not waited for until it is heard of again
    LEFT = "left"


@dataclass(frozen=True)
class Member:
    """A node's presence, and the session of its newest process."""

    presence: Presence = Presence.NEVER_JOINED
    session: str | None = None


Members = Mapping[int, Member]


def as_json(members: Members) -> list[dict[str, Any]]:
    return [
        {"node": node, "presence": member.presence.value, "session": member.session}
        for node, member in sorted(members.items())
    ]


def from_json(raw: Iterable[Mapping[str, Any]]) -> dict[int, Member]:
    """Raises KeyError, TypeError or ValueError on anything that `as_json` did not write."""
    members = {}
    for entry in raw:
        node, session = entry["node"], entry["session"]
        if not isinstance(session, str | None):
            raise ValueError(f"a session is a text, not {session!r}")
        if type(node) is not int or node in members:
            raise ValueError(f"{node!r} is no number of a node, or there twice")
        members[node] = Member(Presence(entry["presence"]), session)
    return members


def expected_back(members: Members) -> dict[int, Member]:
    """Those that a hub goes on with: a node that left may be started again with it, and then has to join anew."""
    return {node: member for node, member in members.items() if member.presence is not Presence.LEFT}
