"""A node whose hub does not answer says so, but rarely."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from spes_mega.client import client as client_module
from spes_mega.client import retry_notice
from spes_mega.client.client import HubClient
from spes_mega.client.retry_notice import AGAIN_S, QUIET_S, RetryNotice
from spes_mega.errors import DeadlineError
from tests.hub.fabricated import fabricate, make_recipe, push
from tests.hub.relay import Relay
from tests.hub.rpc.test_hub import until


class Failures:
    def __init__(self, setting="spes.rpc_deadline_s"):
        self.now = 100.0
        self.lines = []
        self._notice = RetryNotice("hub at h:1", 100.0 + 3600, setting, self.lines.append, lambda: self.now)

    def at(self, second, reason="refused"):
        self.now = 100.0 + second
        self._notice.failed(reason)


def test_a_short_interruption_is_not_mentioned():
    failures = Failures()
    for second in (500, 501, 500 + QUIET_S - 1):  # the call itself may have been under way for long
        failures.at(second)
    assert failures.lines == []


def test_what_fails_for_long_is_said_at_once_and_then_at_growing_intervals():
    failures = Failures()
    failures.at(0)
    failures.at(QUIET_S, "connection refused")
    for second in range(int(QUIET_S) + 1, int(QUIET_S + AGAIN_S), 5):
        failures.at(second)
    assert len(failures.lines) == 1
    found = re.fullmatch(
        r"hub at h:1: no success yet \(last: connection refused\); trying until (\S+ \S+) \(spes\.rpc_deadline_s\)",
        failures.lines[0],
    )
    left = datetime.fromisoformat(found[1]) - datetime.now()
    assert abs(left.total_seconds() - (3600 - QUIET_S)) < 60
    failures.at(QUIET_S + AGAIN_S, "still not")
    assert "last: still not" in failures.lines[1]
    begin, said = int(QUIET_S + AGAIN_S), []
    for second in range(begin, begin + 3000):
        before = len(failures.lines)
        failures.at(second)
        if len(failures.lines) > before:
            said.append(second - begin)
    assert said == [120, 360, 840, 1440, 2040, 2640]


def test_a_node_names_the_hub_that_it_waits_for(monkeypatch):
    monkeypatch.setattr(retry_notice, "QUIET_S", 0.0)
    lines = []
    recipe = make_recipe(rpc_deadline_s=0.5)
    with HubClient.for_recipe(recipe, "127.0.0.1:1", 0, say=lines.append) as client, pytest.raises(DeadlineError):
        client.join()
    (line,) = lines
    assert line.startswith("hub at 127.0.0.1:1: no success yet (last: failed to connect")
    assert line.endswith(" (spes.rpc_deadline_s)")


def test_failures_of_a_wait_with_answers_in_between_are_not_one_long_failure(start_hub, monkeypatch):
    monkeypatch.setattr(client_module, "POLL_S", 0.5)
    failed = []
    monkeypatch.setattr(RetryNotice, "failed", lambda notice, reason: failed.append(notice))
    recipe = make_recipe(num_nodes=1)
    hub = start_hub(recipe)
    relay = Relay(hub.address)
    with HubClient.for_recipe(recipe, relay.address, 0) as client, ThreadPoolExecutor() as pool:
        client.join()
        waiting = pool.submit(client.wait_round, 1)
        for _ in range(50):
            before = relay.passed["down"]
            until(lambda before=before: relay.passed["down"] > before + 200)  # some answers
            relay.cut()
            time.sleep(0.3)
            if len({id(notice) for notice in failed}) > 1:
                break
        else:
            pytest.fail("all failures were counted together")
        push(client, 0, fabricate(recipe, 0, 0))
        assert waiting.result(timeout=30) == 1
