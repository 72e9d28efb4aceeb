"""What is said of a hub that cannot be reached for a while."""

import time
from collections.abc import Callable
from datetime import datetime, timedelta

QUIET_S = 10.0
"""Seconds after the first failure in which nothing is said: a hub that is started anew takes no longer."""
AGAIN_S = 60.0
"""Until the second line; from then on each pause is twice as long as the one before."""
MAX_AGAIN_S = 600.0


class RetryNotice:
    """Says of one call that keeps failing what it tries, why that failed last, and until when it goes on. Rarely."""

    def __init__(
        self,
        what: str,
        end: float,
        setting: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`end` is of `clock`; `setting` names what it follows from."""
        self._what, self._end, self._setting = what, end, setting
        self._say = say
        self._clock = clock
        self._due: float | None = None
        self._pause = AGAIN_S

    def failed(self, reason: str) -> None:
        """One more attempt has failed, and there will be another one."""
        now = self._clock()
        if self._due is None:
            self._due = now + QUIET_S
        if now >= self._due:
            self._due = now + self._pause
            self._pause = min(2 * self._pause, MAX_AGAIN_S)
            until = datetime.now() + timedelta(seconds=self._end - now)
            because = f" ({self._setting})" if self._setting else ""
            self._say(f"{self._what}: no success yet (last: {reason}); trying until {until:%Y-%m-%d %H:%M:%S}{because}")
