"""Asking the hub of a state directory to end after its open round, as before an upgrade.

The request is a file, so that it reaches a hub in another container, or on another machine that shares the directory.
"""

import time
from pathlib import Path

from spes_mega.errors import DeadlineError, StoreError, system_errors
from spes_mega.hub.state.run_lock import LOCK, in_use

REQUEST = "drain"
POLL_S = 0.5
SILENT_S = 30.0
"""A hub that drains touches the request every half a second; after so long without, it has been stopped or hangs."""


@system_errors(StoreError)
def drain(state: Path) -> bool:
    """Ask the hub that uses `state` to drain, and wait until it has ended; False if there is none.

    Raises:
        StoreError: this is no state directory, or the request cannot be written.
        DeadlineError: the hub does not react.
    """
    if not (state / LOCK).exists():
        raise StoreError(f"{state}: no hub has ever used this as its --state")
    if not in_use(state):
        return False
    try:
        (state / REQUEST).touch()
    except OSError as e:
        raise StoreError(f"{state}: the request to drain cannot be written: {e.strerror or e}") from e
    sign, heard = _sign_of_life(state), time.monotonic()
    while in_use(state):
        time.sleep(POLL_S)
        if (newest := _sign_of_life(state)) != sign:
            sign, heard = newest, time.monotonic()
        elif time.monotonic() - heard > SILENT_S:
            raise DeadlineError(
                f"{state}: the hub that uses it has not reacted for {SILENT_S:g} s: is it still starting, stopped, or "
                f"of an older version? The request stays there, and it drains when it goes on; remove "
                f"{state / REQUEST} to take it back"
            )
    return True


def _sign_of_life(state: Path) -> int | None:
    """When the request was touched last, in ns; None if it has gone."""
    try:
        return (state / REQUEST).stat().st_mtime_ns
    except OSError:
        return None
