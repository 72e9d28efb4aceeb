"""How a run ends before its last round: a request to stop or to drain, or a failure."""

from spes_mega.errors import SpesError


class Stopped(Exception):
    """The hub was asked to stop."""


class Shutdown:
    """Keep what the hub was asked for, and why the run failed.

    No method takes a lock, so that a signal handler may call `stop` and `drain`.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.draining = False
        self.failure: SpesError | None = None

    def stop(self) -> None:
        """Ask the hub to stop."""
        self.stopping = True

    def drain(self) -> None:
        """Ask the hub to end after the open round."""
        self.draining = True

    def check_running(self) -> None:
        """Raise Stopped after `stop`."""
        if self.stopping:
            raise Stopped

    def check_alive(self) -> None:
        """Raise the failure of the run if there is one, and Stopped after `stop`."""
        if self.failure:
            raise self.failure
        self.check_running()
