"""Which round is open, who takes part in it, and when it closes. No I/O; the clock is given."""

import threading
import time
from collections.abc import Callable, Collection

from spes_mega.errors import DeadlineError, HubRefusedError, SpesError
from spes_mega.hub.state.members import Member, Members, Presence
from spes_mega.recipe import SpesSection
from spes_mega.wire.errors import StaleRoundError

POLL_S = 0.2
"""How often the hub looks for a deadline or a request to stop, at the least."""
STANDSTILL_S = 5.0
"""A hub that has not looked for so long has been stopped (SIGSTOP, a suspended machine) or was busy, and has not heard
what nodes sent meanwhile."""
GRACE_S = 60.0
"""How long it then listens before it judges who did not come, or spes.round_deadline_s if that is shorter."""


class Stopped(Exception):
    """The hub was asked to stop."""


class Rounds:
    """The state machine of a run. All methods may be called from any thread."""

    def __init__(
        self,
        spes: SpesSection,
        round_: int,
        pushed: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        members: Members | None = None,
        remember: Callable[[Members], None] = lambda members: None,
    ) -> None:
        """`round_` is the newest committed state and the open round; `pushed` are nodes whose push is stored.

        `members` are those that an earlier hub of the run knew: they may be training and call only when they push, so
        they have the round's deadline and not that for joining. `remember` keeps each change of them; it may raise a
        SpesError, and then the change is not made.
        """
        self._spes = spes
        self._min_nodes = spes.min_nodes or spes.num_nodes
        self._clock = clock
        self._changed = threading.Condition()
        self._members = {node: Member() for node in range(spes.num_nodes)} | dict(members or {})
        self._remember = remember
        self._round = round_
        self._pushed = set(pushed)
        self._closing = False
        self._stopping = False
        self._draining = False
        self._served: set[int] = set()  # nodes that have the newest state
        self._failure: SpesError | None = None
        self._held: SpesError | None = None
        self._join_deadline = clock() + spes.join_deadline_s
        self._opened: float | None = None  # the round's clock starts when the nodes are there
        self._stood_still_s = 0.0  # of the open round's time, which does not count
        self._looked = self._judge_from = clock()
        self._reopened = 0

    # what nodes do

    def join(self, node: int, session: str) -> None:
        """A node's process begins; it takes over the node's number from an older process."""
        with self._changed:
            self._check_alive()
            self._note({node: Member(Presence.JOINED, session)})

    def heard(self, node: int, session: str) -> None:
        """A node called. After a restart of the hub, this makes it known again.

        Raises:
            HubRefusedError: another process has joined under this number since.
        """
        with self._changed:
            self._check_alive()
            self._check_session(node, session)
            if self._members[node].presence is not Presence.JOINED:
                self._note({node: Member(Presence.JOINED, session)})

    def leave(self, node: int, session: str) -> None:
        """A node takes no more part. What it has pushed counts."""
        with self._changed:
            if self._members[node].session in (None, session):
                self._note({node: Member(Presence.LEFT, session)})

    def check_open(self, round_: int) -> None:
        """Raises StaleRoundError if `round_` is closed or being closed, HubRefusedError if it is not open yet."""
        with self._changed:
            self._check_alive()
            if round_ < self._round or (round_ == self._round and self._closing):
                raise StaleRoundError(
                    f"round {round_} is closed: wait for round {max(self._round, round_ + 1)}, pull it, and go on"
                )
            if round_ > self._round:
                raise HubRefusedError(
                    f"round {round_} is not open yet: the open round is {self._round}. If the hub was set back to an "
                    "earlier round, start this node again"
                )

    def commit_push(self, node: int, session: str, round_: int, rename: Callable[[], object]) -> None:
        """Make a checked push part of the open round by `rename`, so that no close comes in between.

        Raises what `check_open` raises; HubRefusedError if another process has joined under this number since.
        """
        with self._changed:
            self.check_open(round_)
            self._check_session(node, session)
            rename()
            self._pushed.add(node)
            self._changed.notify_all()

    def wait_round(self, round_: int, timeout_s: float) -> int:
        """Wait until the state of `round_` is committed or the time is over; returns the newest committed round.

        Raises:
            DeadlineError, StoreError, …: the hub has failed, with the reason.
            Stopped: the hub is stopping.
        """
        with self._changed:
            reopened = self._reopened  # a node whose push is lost has to be told
            self._changed.wait_for(
                lambda: self._round >= round_ or self._failure or self._stopping or self._reopened > reopened, timeout_s
            )
            if self._round < round_:
                self._check_alive()
            return self._round

    def settle(self) -> None:
        """Wait while the open round is being closed, so that nobody is given a state that is about to be replaced.

        Raises what `wait_round` raises.
        """
        with self._changed:
            while self._closing:
                self._check_alive()
                if self._held:
                    raise self._held
                self._changed.wait(POLL_S)
            self._check_alive()

    # what the hub does

    def await_close(self) -> tuple[int, tuple[int, ...]]:
        """Wait until the open round may close, and close it to further pushes: (round, nodes that pushed).

        Raises:
            DeadlineError: nodes did not come in time; they are named.
            StoreError: the state directory cannot be written.
            Stopped: `stop` was called.
        """
        with self._changed:
            self._notice_standstill(entering=True)
            while not (self._closing or self._may_close()):
                if self._failure:
                    raise self._failure
                if self._stopping or (self._draining and not self._pushed and not self._with(Presence.JOINED)):
                    raise Stopped  # or there is nobody whose round could be finished
                self._changed.wait(POLL_S)
                self._notice_standstill()
            self._note({node: Member(Presence.MISSED, self._members[node].session) for node in self._awaited()})
            self._closing = True
            return self._round, tuple(sorted(self._pushed))

    def pause(self, seconds: float, reason: SpesError) -> None:
        """The hub cannot go on yet, for a `reason` that those are told who would have to wait with it.

        Raises Stopped after `stop`.
        """
        end = self._clock() + seconds
        with self._changed:
            self._held = reason
            while self._clock() < end:
                self.check_running()
                self._changed.wait(POLL_S)

    def committed(self, round_: int) -> None:
        """The state of `round_` is on the disk: it becomes the open round, and waiting nodes are told."""
        with self._changed:
            self._round = round_
            self._pushed = set()
            self._served = set()
            self._closing = False
            self._held = None
            self._opened = self._clock()
            self._stood_still_s = 0.0
            self._changed.notify_all()

    def reopen(self, node: int) -> None:
        """The round that was being closed stays open, without the push of a node, which has a round's time to send it
        again."""
        with self._changed:
            self._pushed.discard(node)
            self._closing = False
            self._held = None
            self._reopened += 1
            self._judge_from = self._clock() + self._spes.round_deadline_s
            self._changed.notify_all()

    def served(self, node: int, round_: int) -> None:
        """A node has been sent the whole state of a round."""
        with self._changed:
            if round_ == self._round:
                self._served.add(node)
                self._changed.notify_all()

    def wait_served(self, timeout_s: float) -> list[int]:
        """Wait until all nodes that take part have the newest state; returns those that lack it then."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while (
                (lacking := sorted(set(self._with(Presence.JOINED)) - self._served))
                and not self._stopping
                and self._clock() < deadline
            ):
                self._changed.wait(POLL_S)
            return lacking

    def wait_while(self, presences: Collection[Presence], timeout_s: float) -> list[int]:
        """Wait until no node has one of these presences; returns those that still have when the time is over."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while (staying := self._with(*presences)) and not self._stopping and self._clock() < deadline:
                self._changed.wait(POLL_S)
            return staying

    def fail(self, error: SpesError) -> None:
        """Tell every node that calls from now on, and those that wait, why the run ended."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Ask the hub to stop. Takes no lock, so that a signal handler may call it."""
        self._stopping = True

    def drain(self) -> None:
        """Ask the hub to end after the open round. Takes no lock, so that a signal handler may call it."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    def wake(self) -> None:
        """Let everyone who waits see that the hub is stopping."""
        with self._changed:
            self._changed.notify_all()

    def check_running(self) -> None:
        """Raises Stopped after `stop`."""
        if self._stopping:
            raise Stopped

    @property
    def stopping(self) -> bool:
        return self._stopping

    # what status shows

    def presence(self) -> dict[int, Presence]:
        with self._changed:
            return {node: member.presence for node, member in self._members.items()}

    def waiting_for(self) -> list[int]:
        """Nodes whose push the open round waits for: all that lack one, if those that are there are too few."""
        with self._changed:
            awaited = self._awaited()
            enough = len(self._pushed) + len(awaited) >= self._min_nodes
            return awaited if enough else sorted(set(self._members) - self._pushed)

    def has_pushed(self, node: int, round_: int) -> bool:
        """Whether `round_` is open, or being closed, and has this node's push."""
        with self._changed:
            return round_ == self._round and node in self._pushed

    def lacks_push(self, node: int, round_: int) -> bool:
        """Whether `round_` takes pushes, and has none of this node."""
        with self._changed:
            return round_ == self._round and not self._closing and node not in self._pushed

    @property
    def round(self) -> int:
        return self._round

    def open_seconds(self) -> float:
        """How long the open round has been open, once the nodes were there."""
        return 0.0 if self._opened is None else self._clock() - self._opened

    # the rules

    def _note(self, changes: Members) -> None:
        if changes:
            members = self._members | dict(changes)
            self._remember(members)
            self._members = members
            self._changed.notify_all()

    def _with(self, *presences: Presence) -> list[int]:
        return [node for node, member in self._members.items() if member.presence in presences]

    def _check_alive(self) -> None:
        if self._failure:
            raise self._failure
        if self._stopping:
            raise Stopped

    def _check_session(self, node: int, session: str) -> None:
        if self._members[node].session not in (None, session):
            raise HubRefusedError(f"another process has joined as node {node}; this one no longer takes part")

    def _awaited(self) -> list[int]:
        """Nodes that the round waits for: those that take part, and until the join deadline those yet to come."""
        awaited = self._with(Presence.JOINED)
        if self._opened is None:
            awaited += self._with(Presence.NEVER_JOINED)
        return sorted(set(awaited) - self._pushed)

    def _notice_standstill(self, entering: bool = False) -> None:
        """Give nodes a while after a time in which the hub did not look; `entering`: that was meant to be so."""
        now = self._clock()
        gap, self._looked = now - self._looked, now
        if gap < STANDSTILL_S:
            return
        self._judge_from = max(self._judge_from, now + min(GRACE_S, self._spes.round_deadline_s))
        if not entering:
            self._stood_still_s += gap
            self._join_deadline += gap

    def _may_close(self) -> bool:
        now = self._clock()
        self._start_clock(now)
        enough = len(self._pushed) >= self._min_nodes
        if enough and not self._awaited():
            return True
        if self._opened is None or now < self._judge_from:
            return False
        if now < self._opened + self._stood_still_s + self._spes.round_deadline_s:
            return False
        if enough:
            return True
        raise DeadlineError(
            f"round {self._round}: {_nodes(sorted(set(self._members) - self._pushed))} did not push within "
            f"{self._spes.round_deadline_s:g} s (spes.round_deadline_s); {len(self._pushed)} of the "
            f"{self._min_nodes} pushes needed (spes.min_nodes) came. Nothing is lost: start the hub again on the "
            f"same --state"
        )

    def _start_clock(self, now: float) -> None:
        if self._opened is not None:
            return
        absent = [node for node in self._with(Presence.NEVER_JOINED) if node not in self._pushed]
        if not absent:
            self._opened = now
        elif now >= max(self._join_deadline, self._judge_from):
            if len(self._members) - len(absent) < self._min_nodes:
                raise DeadlineError(
                    f"{_nodes(absent)} did not join within {self._spes.join_deadline_s:g} s (spes.join_deadline_s); "
                    f"{self._min_nodes} of {len(self._members)} nodes are needed (spes.min_nodes)"
                )
            self._opened = now


def _nodes(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
