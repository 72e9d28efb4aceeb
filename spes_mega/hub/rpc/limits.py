"""How many calls each caller may have under way, and for how long, so that none takes the hub from the others."""

import threading
import time
from collections.abc import Callable, Hashable

MESSAGE_S = 10.0
"""Within which the first message of a call has to come."""


class Call:
    """A call that was let in."""

    def __init__(self, due: float) -> None:
        self.due = due
        """Time of the clock at which it is ended, whatever it is doing."""
        self.waits = True
        """Its first message has not come: a newer call may take its place."""
        self._ended = False
        self._cancel: Callable[[], object] | None = None

    def begin(self, cancel: Callable[[], object]) -> None:
        """A thread has taken it up, and `cancel` ends it from now on."""
        self._cancel = cancel
        if self._ended:
            cancel()

    def end(self) -> None:
        self._ended = True
        if self._cancel is not None:
            self._cancel()


class Lanes:
    """The calls that are under way: in each lane, such as the pushes of a node, a bounded number.

    A full lane has room for one more if one of its calls is still without a message: the oldest such call is ended, so
    that calls which say nothing keep nobody out. Safe to use from several threads.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A call is ended `longest_s` after its first message."""
        self._longest_s = longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: dict[Hashable, dict[Call, None]] = {}

    def enter(self, lane: Hashable, limit: int) -> Call | None:
        """Let a call into a lane; None if `limit` are there whose message has come."""
        ousted = None
        with self._lock:
            there = self._calls.setdefault(lane, {})
            if len(there) >= limit:
                ousted = next((call for call in there if call.waits), None)
                if ousted is None:
                    return None
                del there[ousted]
            call = Call(self._clock() + MESSAGE_S)
            there[call] = None
        if ousted is not None:
            ousted.end()
        return call

    def arrived(self, call: Call) -> None:
        """The first message of a call is here."""
        with self._lock:
            call.waits = False
            call.due = self._clock() + self._longest_s

    def leave(self, lane: Hashable, call: Call) -> None:
        """A call is over."""
        with self._lock:
            there = self._calls.get(lane, {})
            there.pop(call, None)
            if not there:
                self._calls.pop(lane, None)

    def end_overdue(self) -> None:
        """End all calls that are due."""
        now = self._clock()
        with self._lock:
            due = [call for there in self._calls.values() for call in there if call.due <= now]
        for call in due:
            call.end()
