"""Which round is open, and when it closes. No I/O; the clock is given."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from spes_mega.errors import DeadlineError, HubRefusedError, SpesError
from spes_mega.hub.rounds.attendance import Attendance
from spes_mega.hub.rounds.members import Members, Presence
from spes_mega.hub.rounds.round_clock import RoundClock
from spes_mega.hub.rounds.shutdown import Shutdown, Stopped
from spes_mega.recipe import SpesSection
from spes_mega.wire.errors import StaleRoundError

POLL_S = 0.2
"""How often the hub looks for a deadline or a request to stop, at the least."""


class Rounds:
    """The state machine of a run. All methods may be called from any thread.

    One lock, `_changed`, protects all of it, the attendance and the clock included. It is re-entrant.
    """

    def __init__(
        self,
        spes: SpesSection,
        round_: int,
        pushed: Collection[int] = (),
        now: Callable[[], float] = time.monotonic,
        *,
        members: Members | None = None,
        remember: Callable[[Members], None] = lambda members: None,
    ) -> None:
        """Begin with `round_` as the newest committed state and the open round.

        `pushed` are nodes whose push is stored. `members` are those that an earlier hub of the run knew: they may be
        training and call only when they push, so they have the round's deadline and not that for joining. For
        `remember` see `Attendance`.
        """
        self._spes = spes
        self._min_nodes = spes.min_nodes or spes.num_nodes
        self._now = now
        self._changed = threading.Condition()
        self.shutdown = Shutdown()
        self.attendance = Attendance(spes.num_nodes, members or {}, remember, self._changed, self.shutdown)
        self.clock = RoundClock(spes, now)
        self.round = round_
        self._pushed = set(pushed)
        self._closing = False
        self._served: set[int] = set()  # nodes that have the newest state
        self._held: SpesError | None = None
        self._reopened = 0

    # what nodes do

    def check_open(self, round_: int) -> None:
        """Raise StaleRoundError if `round_` is closed or being closed, HubRefusedError if it is not open yet."""
        with self._changed:
            self.shutdown.check_alive()
            if round_ < self.round or (round_ == self.round and self._closing):
                raise StaleRoundError(
                    f"round {round_} is closed: wait for round {max(self.round, round_ + 1)}, pull it, and go on"
                )
            if round_ > self.round:
                raise HubRefusedError(
                    f"round {round_} is not open yet: the open round is {self.round}. If the hub was set back to an "
                    "earlier round, start this node again"
                )

    @contextmanager
    def committing(self, node: int, session: str, round_: int) -> Iterator[None]:
        """Make a checked push, which is renamed inside, part of the open round, so that no close comes in between.

        Raises what `check_open` raises; HubRefusedError if another process has joined under this number since.
        """
        with self._changed:
            self.check_open(round_)
            self.attendance.check_session(node, session)
            yield
            self._pushed.add(node)
            self._changed.notify_all()

    def wait_round(self, round_: int, timeout_s: float) -> int:
        """Wait until the state of `round_` is committed or the time is over; return the newest committed round.

        Raises:
            DeadlineError, StoreError, …: the hub has failed, with the reason.
            Stopped: the hub is stopping.
        """
        shutdown = self.shutdown
        with self._changed:
            reopened = self._reopened  # a node whose push is lost has to be told
            self._changed.wait_for(
                lambda: self.round >= round_ or shutdown.failure or shutdown.stopping or self._reopened > reopened,
                timeout_s,
            )
            if self.round < round_:
                shutdown.check_alive()
            return self.round

    def settle(self) -> None:
        """Wait while the open round is being closed, so that nobody is given a state that is about to be replaced.

        Raises what `wait_round` raises.
        """
        with self._changed:
            while self._closing:
                self.shutdown.check_alive()
                if self._held:
                    raise self._held
                self._changed.wait(POLL_S)
            self.shutdown.check_alive()

    # what the hub does

    def await_close(self) -> tuple[int, ...]:
        """Wait until the open round may close, and close it to further pushes; return the nodes that pushed.

        Raises:
            DeadlineError: nodes missed their deadline; they are named.
            StoreError: the state directory cannot be written.
            Stopped: the hub was asked to stop.
        """
        shutdown = self.shutdown
        with self._changed:
            self.clock.look(entering=True)
            while not (self._closing or self._may_close()):
                if shutdown.failure:
                    raise shutdown.failure
                nobody = not (self._pushed or self.attendance.with_presence(Presence.JOINED))
                if shutdown.stopping or (shutdown.draining and nobody):
                    raise Stopped  # or there is nobody whose round could be finished
                self._changed.wait(POLL_S)
                self.clock.look()
            self.attendance.missed(self._awaited())
            self._closing = True
            return tuple(sorted(self._pushed))

    def pause(self, seconds: float, reason: SpesError) -> None:
        """Wait because the hub cannot go on yet, for a `reason` that callers are told who would have to wait with it.

        Raises Stopped after a request to stop.
        """
        end = self._now() + seconds
        with self._changed:
            self._held = reason
            while self._now() < end:
                self.shutdown.check_running()
                self._changed.wait(POLL_S)

    def committed(self, round_: int) -> None:
        """Make `round_`, whose state is on the disk, the open round, and tell waiting nodes."""
        with self._changed:
            self.round = round_
            self._pushed = set()
            self._served = set()
            self._closing = False
            self._held = None
            self.clock.start()
            self._changed.notify_all()

    def reopen(self, node: int) -> None:
        """Keep the round open that was being closed, without the push of a node, which has a round's time to send it
        again."""
        with self._changed:
            self._pushed.discard(node)
            self._closing = False
            self._held = None
            self._reopened += 1
            self.clock.restart()
            self._changed.notify_all()

    def served(self, node: int, round_: int) -> None:
        """Note that a node has been sent the whole state of a round."""
        with self._changed:
            if round_ == self.round:
                self._served.add(node)
                self._changed.notify_all()

    def wait_served(self, timeout_s: float) -> list[int]:
        """Wait until all nodes that take part have the newest state; return those that lack it then."""
        deadline = self._now() + timeout_s
        with self._changed:
            while (
                (lacking := sorted(set(self.attendance.with_presence(Presence.JOINED)) - self._served))
                and not self.shutdown.stopping
                and self._now() < deadline
            ):
                self._changed.wait(POLL_S)
            return lacking

    def wait_while(self, presences: Collection[Presence], timeout_s: float) -> list[int]:
        """Wait until no node has one of these presences; return those that still have when the time is over."""
        deadline = self._now() + timeout_s
        with self._changed:
            while (
                (staying := self.attendance.with_presence(*presences))
                and not self.shutdown.stopping
                and self._now() < deadline
            ):
                self._changed.wait(POLL_S)
            return staying

    def fail(self, error: SpesError) -> None:
        """Tell every node that calls from now on, and those that wait, why the run ended."""
        with self._changed:
            self.shutdown.failure = error
            self._changed.notify_all()

    def wake(self) -> None:
        """Let everyone who waits see that the hub is stopping."""
        with self._changed:
            self._changed.notify_all()

    # what status shows

    def waiting_for(self) -> list[int]:
        """Return the nodes whose push the open round waits for: all that lack one, if too few are there."""
        with self._changed:
            awaited = self._awaited()
            enough = len(self._pushed) + len(awaited) >= self._min_nodes
            return awaited if enough else sorted(set(range(self._spes.num_nodes)) - self._pushed)

    def has_pushed(self, node: int, round_: int) -> bool:
        """Tell whether `round_` is open, or being closed, and has this node's push."""
        with self._changed:
            return round_ == self.round and node in self._pushed

    def lacks_push(self, node: int, round_: int) -> bool:
        """Tell whether `round_` takes pushes, and has none of this node."""
        with self._changed:
            return round_ == self.round and not self._closing and node not in self._pushed

    # the rules

    def _awaited(self) -> list[int]:
        """Return the nodes that the round waits for: those that take part, and until the join deadline all."""
        awaited = self.attendance.with_presence(Presence.JOINED)
        if not self.clock.running:
            awaited += self.attendance.with_presence(Presence.NEVER_JOINED)
        return sorted(set(awaited) - self._pushed)

    def _may_close(self) -> bool:
        self._start_clock()
        enough = len(self._pushed) >= self._min_nodes
        if enough and not self._awaited():
            return True
        if not self.clock.round_is_over():
            return False
        if enough:
            return True
        late = sorted(set(range(self._spes.num_nodes)) - self._pushed)
        raise DeadlineError(
            f"round {self.round}: {_nodes(late)} did not push within "
            f"{self._spes.round_deadline_s:g} s (spes.round_deadline_s); {len(self._pushed)} of the "
            f"{self._min_nodes} pushes needed (spes.min_nodes) came. Nothing is lost: start the hub again on the "
            f"same --state"
        )

    def _start_clock(self) -> None:
        """Start the round's clock once all nodes have joined, or their deadline is over and enough are there."""
        if self.clock.running:
            return
        absent = [node for node in self.attendance.with_presence(Presence.NEVER_JOINED) if node not in self._pushed]
        if absent and not self.clock.joining_is_over():
            return
        if absent and self._spes.num_nodes - len(absent) < self._min_nodes:
            raise DeadlineError(
                f"{_nodes(absent)} did not join within {self._spes.join_deadline_s:g} s (spes.join_deadline_s); "
                f"{self._min_nodes} of {self._spes.num_nodes} nodes are needed (spes.min_nodes)"
            )
        self.clock.start()


def _nodes(numbers: list[int]) -> str:
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
