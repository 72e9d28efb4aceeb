"""What is waited for inside of something else is given up first.

An attempt ends with the limit of its call (spes.rpc_deadline_s); that, with the round's deadline, which the recipe
checks (test_recipe.py); and a node's wait for a round, after all deadlines that the hub may wait for. Joining has no
place in the chain: who comes after spes.join_deadline_s is let in all the same.
"""

import pytest

from spes_mega.client import channel, client
from spes_mega.client import resumable as delivery
from spes_mega.client.client import HubClient
from spes_mega.hub.rpc import server, service
from spes_mega.node.sync import hub_node
from spes_mega.recipe import SpesSection
from tests.hub.fabricated import make_recipe

CALLER, HUB = dict(channel.CHANNEL_OPTIONS), dict(server.SERVER_OPTIONS)
LINGER_S = server.LINGER_S
LAUNCHER_S = 30
"""How long the deepspeed launcher waits for ranks that it asked to stop."""


def test_the_hub_answers_a_wait_before_its_caller_gives_it_up():
    assert client.POLL_S <= service.MAX_WAIT_S  # or waiting nodes would be answered later than they ask
    assert service.CUT_S < delivery.ANSWER_S
    assert client.POLL_S < LINGER_S  # who waits hears of the last round while the hub lingers
    assert hub_node.GOODBYE_S < LAUNCHER_S


def test_an_attempt_ends_with_the_limit_of_its_call(monkeypatch):
    monkeypatch.setattr(channel.time, "monotonic", lambda: 100.0)
    assert channel.attempt_s(30.0, 500.0) == 30.0
    assert channel.attempt_s(30.0, 110.0) == 10.0
    assert channel.attempt_s(30.0, 99.0) == channel.MIN_ATTEMPT_S


def test_a_node_waits_for_a_round_longer_than_the_hub_does():
    recipe = make_recipe(join_deadline_s=50, round_deadline_s=40, rpc_deadline_s=30)
    with HubClient.for_recipe(recipe, "127.0.0.1:1", 0) as node:
        assert node._channel.limit.seconds == 30
        assert node._wait_limit.seconds == 50 + 2 * 40 + 30


@pytest.mark.parametrize(("pinging", "pinged"), [(CALLER, HUB), (HUB, CALLER)])
def test_pings_come_no_more_often_than_the_other_side_bears(pinging, pinged):
    """https://github.com/grpc/grpc/blob/master/doc/keepalive.md: more often, or unasked, and it hangs up."""
    key = "grpc.http2.min_ping_interval_without_data_ms"
    assert pinging["grpc.keepalive_time_ms"] >= pinged.get(key, 0)  # callers bear any
    assert pinging["grpc.keepalive_timeout_ms"] <= pinging["grpc.keepalive_time_ms"]
    assert pinging["grpc.keepalive_permit_without_calls"] == pinged["grpc.keepalive_permit_without_calls"] == 1
    assert pinging["grpc.http2.max_pings_without_data"] == 0  # for as long as a round takes
    assert HUB[key] > 0


def test_a_dead_line_is_noticed_in_time_to_try_another():
    noticed = (CALLER["grpc.keepalive_time_ms"] + CALLER["grpc.keepalive_timeout_ms"]) / 1000
    assert 2 * noticed < SpesSection().rpc_deadline_s
