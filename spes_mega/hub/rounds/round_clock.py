"""When the open round is over by the clock, which stands still while the hub does."""

from collections.abc import Callable

from spes_mega.recipe import SpesSection

STANDSTILL_S = 5.0
"""A hub that has not looked for so long has been stopped (SIGSTOP, a suspended machine) or was busy, and has not heard
what nodes sent meanwhile."""
GRACE_S = 60.0
"""How long it then listens before it judges who missed the round, or spes.round_deadline_s if that is shorter."""


class RoundClock:
    """Measure the open round. The lock of the rounds has to be held."""

    def __init__(self, spes: SpesSection, now: Callable[[], float]) -> None:
        self._spes = spes
        self._now = now
        self._opened: float | None = None  # the round's clock starts when the nodes are there
        self._stood_still_s = 0.0  # of the open round's time, which does not count
        self._join_deadline = now() + spes.join_deadline_s
        self._looked = self._judge_from = now()

    @property
    def running(self) -> bool:
        """Tell whether the round's clock has started."""
        return self._opened is not None

    def start(self) -> None:
        """Start the round's clock: the nodes are there, or a new round is open."""
        self._opened = self._now()
        self._stood_still_s = 0.0

    def restart(self) -> None:
        """Give a whole round's time from now on."""
        self._judge_from = self._now() + self._spes.round_deadline_s

    def joining_is_over(self) -> bool:
        """Tell whether nodes that have not joined are no longer waited for."""
        return self._now() >= max(self._join_deadline, self._judge_from)

    def round_is_over(self) -> bool:
        """Tell whether the open round has reached its deadline."""
        now = self._now()
        if self._opened is None or now < self._judge_from:
            return False
        return now >= self._opened + self._stood_still_s + self._spes.round_deadline_s

    def seconds_open(self) -> float:
        """Return how long the open round has been open, once the nodes were there."""
        return 0.0 if self._opened is None else self._now() - self._opened

    def look(self, entering: bool = False) -> None:
        """Give nodes a while after a time in which the hub did not look; `entering`: that was meant to be so."""
        now = self._now()
        gap, self._looked = now - self._looked, now
        if gap < STANDSTILL_S:
            return
        self._judge_from = max(self._judge_from, now + min(GRACE_S, self._spes.round_deadline_s))
        if not entering:
            self._stood_still_s += gap
            self._join_deadline += gap
