"""Signals that are ignored when a process starts stay ignored."""

import signal
import subprocess
import sys

import pytest

from spes_mega.progress import sigterm_interrupts

SETUPS = {
    "node": "from spes_mega.node.stop import StopRequest; StopRequest().install()",
    "hub": "from spes_mega.hub.command import _stop_on_signals; _stop_on_signals(None)",
    "progress": "from spes_mega.progress import sigterm_interrupts; block = sigterm_interrupts(); block.__enter__()",
    "tokenize": "from spes_mega.data.tokenize import _ended_by_sigterm as b; block = b(); block.__enter__()",
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_ignored_signal_stays_ignored(setup, signum):
    code = f"{SETUPS[setup]}\nimport signal; print(signal.getsignal({int(signum)}) is signal.SIG_IGN)"
    said = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signum, signal.SIG_IGN),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert said.stdout == "True\n"


def test_another_is_handled_and_handed_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
