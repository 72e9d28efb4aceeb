"""Signals: remembered, or raised where waiting is all that goes on."""

import os
import signal
import time

import pytest

from spes_mega.node.stop import Stopped, StopRequest


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
