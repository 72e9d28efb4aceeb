"""The hub's disk damages a push that was taken, which a hub that is started again finds out, and drops it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hub.fabricated import assert_same, fabricate, make_recipe, next_state, pull, push, read_state
from hub.relay import Relay
from hub.test_hub import until
from spes_mega.hub import client as client_module
from spes_mega.hub.client import HubClient, PushLostError


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch):
    monkeypatch.setattr(client_module, "POLL_S", 0.2)


def damage(state):
    (path,) = (state / "pushes").rglob("node-000-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def two_rounds(recipe, start_hub, state, *, damaged):
    """What node 0 said, and the states that two rounds give; the hub is started again in the first one."""
    hub, said = start_hub(recipe, state), []
    line = Relay(hub.address)
    with (
        HubClient.for_recipe(recipe, line.address, 0, say=said.append) as zero,
        HubClient.for_recipe(recipe, line.address, 1) as one,
        ThreadPoolExecutor() as pool,
    ):
        for client in (zero, one):
            client.join()
            client.pull().close()
        for round_ in (0, 1):
            push(zero, round_, fabricate(recipe, 0, round_))
            waiting = pool.submit(zero.wait_round, round_ + 1)
            if round_ == 0:
                hub.stop()
                if damaged:
                    damage(state)
                hub = start_hub(recipe, state)
                line.target = hub.address
                until(lambda hub=hub: hub.run.rounds.waiting_for() == [1], 30)
            push(one, round_, fabricate(recipe, 1, round_))
            assert waiting.result(timeout=30) == round_ + 1
            for client in (zero, one):
                client.wait_round(round_ + 1)
                client.pull(round_).close()
        rejected = [rejection["reason"] for rejection in zero.status()["rejected"]]
    assert ["damaged on the hub" in reason for reason in rejected] == [True] * damaged
    return said, [read_state(state / f"rounds/00000{round_}") for round_ in (1, 2)]


@pytest.mark.parametrize("wire", ["fp32", {"up": "int8", "down": "bf16"}])
def test_the_node_that_waits_sends_it_again_as_if_nothing_had_happened(start_hub, tmp_path, wire):
    recipe = make_recipe(wire=wire)
    said, states = two_rounds(recipe, start_hub, tmp_path / "damaged", damaged=True)
    (line,) = said
    assert line.endswith("it has lost this node's push for round 0; sending it again")
    undisturbed, expected = two_rounds(recipe, start_hub, tmp_path / "whole", damaged=False)
    assert undisturbed == []
    for found, wanted in zip(states, expected, strict=True):
        assert_same(found, wanted)


def test_a_node_that_has_it_no_more_is_told_and_may_push_what_it_trains_anew(start_hub, connect, tmp_path):
    recipe = make_recipe()
    hub = start_hub(recipe)
    initial = read_state(tmp_path / "state/rounds/000000")
    before, one = connect(hub, 0), connect(hub, 1)
    before.join()
    one.join()
    push(before, 0, fabricate(recipe, 0, 0))
    line = Relay(hub.address)
    with HubClient.for_recipe(recipe, line.address, 0) as again, ThreadPoolExecutor() as pool:
        assert again.join().pushed
        waiting = pool.submit(again.wait_round, 1)
        hub.stop()
        damage(tmp_path / "state")
        hub = start_hub(recipe)
        line.target = hub.address
        with pytest.raises(PushLostError, match="it has lost the push of node 0 for round 0"):
            waiting.result(timeout=30)
        assert not again.join().pushed
        other = fabricate(recipe, 0, 0, salt="anew")
        push(again, 0, other)
        ones = fabricate(recipe, 1, 0)
        with HubClient.for_recipe(recipe, hub.address, 1) as one:
            one.join()
            push(one, 0, ones)
        assert again.wait_round(1) == 1
        assert_same(pull(again)[1], next_state(recipe, initial, {0: other, 1: ones}))


def test_one_that_only_watches_waits_on(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    watching, one = connect(hub, 0), connect(hub, 1)
    watching.join()
    one.join()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(watching.wait_round, 1)
        push(one, 0, fabricate(recipe, 1, 0))
        with HubClient.for_recipe(recipe, hub.address, 0) as trains:
            trains._caller.session = watching._caller.session
            push(trains, 0, fabricate(recipe, 0, 0))
        assert waiting.result(timeout=30) == 1
