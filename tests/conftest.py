"""What holds for all tests."""

import signal

from hypothesis import settings

# How long an example takes says nothing on a shared machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Let processes that tests start hear Ctrl-C and hang-ups, also where this one was started to ignore them.

    What runs in the background of a script ignores SIGINT, under `nohup` SIGHUP, and hands that on; hub and nodes then
    leave them ignored, as they should.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
