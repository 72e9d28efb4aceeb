"""Signals: remembered, or raised where waiting is all that goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest

from spes_mega.node.stop import LAUNCHER_VARIABLE, Stopped, StopRequest, stop_without_launcher


@pytest.fixture
def stop():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    request = StopRequest()
    request.install()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_until_it_is_asked_for_and_the_first_one_counts(stop):
    stop.check()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Stopped, match="stopped on request") as stopped:
        stop.check()
    assert stopped.value.exit_code == 143


def test_waiting_is_interrupted(stop):
    def wait():
        with stop.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)

    start = time.monotonic()
    with pytest.raises(Stopped) as stopped:
        wait()
    assert stopped.value.exit_code == 130
    assert time.monotonic() - start < 5
    with pytest.raises(Stopped), stop.interruptible():
        pytest.fail("a signal that came before is raised at once")


def test_what_ranks_do_together_is_finished_first(stop):
    done = []

    def work():
        with stop.interruptible():
            with stop.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("part")
            done.append("more")

    with pytest.raises(Stopped):
        work()
    assert done == ["part"]


def test_outside_of_waiting_a_deferred_block_raises_nothing(stop):
    with stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)


RANK = """
import signal, sys, time
from spes_mega.node.stop import stop_without_launcher
stop_without_launcher(poll_s=0.05)
print("up", flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), sys.exit(0)))
time.sleep(30)
"""
LAUNCH = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_rank_stops_when_the_launcher_is_killed(depth):
    """`depth` processes stand between the rank and whoever is killed, as DeepSpeed's do."""
    inner = RANK
    for _ in range(depth - 1):
        inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    start = "import os, subprocess, sys; os.environ[sys.argv[2]] = str(os.getpid()); " + LAUNCH
    launcher = subprocess.Popen(
        [sys.executable, "-c", start, inner, LAUNCHER_VARIABLE], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher.stdout as said:
        assert said.readline() == "up\n"
        launcher.kill()
        assert said.readline() == "asked to stop\n"  # although nobody has waited for the launcher yet
    launcher.wait()


def test_a_rank_whose_launcher_is_gone_already_stops_too(stop, monkeypatch):
    stop_without_launcher()
    assert stop.signum is None
    monkeypatch.setenv(LAUNCHER_VARIABLE, "0")
    stop_without_launcher()
    assert stop.signum == signal.SIGTERM
