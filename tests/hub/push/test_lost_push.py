"""The hub's disk damages a push that was taken: which a hub finds that is started again, or that closes the round."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash

from spes_mega.client import client as client_module
from spes_mega.client.client import HubClient, PushLostError
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, pull, push, read_state
from tests.hub.relay import Relay
from tests.hub.rpc.test_hub import until


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch):
    monkeypatch.setattr(client_module, "POLL_S", 0.2)


def damage(state):
    (path,) = (state / "pushes").rglob("node-000-*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def name_as_before(state):
    """Give a push the name that hubs gave it whose checksums were of all bytes at once."""
    (path,) = (state / "pushes").rglob("node-000-*.safetensors")
    path.rename(path.with_name(f"node-000-{xxhash.xxh3_64_hexdigest(path.read_bytes())}.safetensors"))


def two_rounds(recipe, start_hub, state, damage=None):
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
                if damage is not None:
                    damage(state)
                hub = start_hub(recipe, state)
                line.target = hub.address
                until(lambda hub=hub: hub.run.state.rounds.waiting_for() == [1], 30)
            push(one, round_, fabricate(recipe, 1, round_))
            assert waiting.result(timeout=30) == round_ + 1
            for client in (zero, one):
                client.wait_round(round_ + 1)
                client.pull(round_).close()
        rejected = [rejection["reason"] for rejection in zero.status()["rejected"]]
    assert ["damaged on the hub" in reason for reason in rejected] == [True] * (damage is not None)
    return said, [read_state(state / f"rounds/00000{round_}") for round_ in (1, 2)]


@pytest.mark.parametrize("damage", [damage, name_as_before])
@pytest.mark.parametrize("wire", ["fp32", {"up": "int8", "down": "bf16"}])
def test_the_node_that_waits_sends_it_again_as_if_nothing_had_happened(start_hub, tmp_path, wire, damage):
    recipe = make_recipe(wire=wire)
    said, states = two_rounds(recipe, start_hub, tmp_path / "damaged", damage)
    (line,) = said
    assert line.endswith("it has lost this node's push for round 0; sending it again")
    undisturbed, expected = two_rounds(recipe, start_hub, tmp_path / "whole")
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


NAN = b"\xff\xff\xff\x7f"
DAMAGES = {
    "a bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "not a number": lambda content: content[:-4] + NAN,
    "truncated": lambda content: content[:-4],
    "header": lambda content: b"x" * 20 + content[20:],
}


def close_with_damage(recipe, start_hub, connect, how):
    """Two nodes push, node 0's push is damaged before the last one comes; returns what was said and the next state."""
    hub, said = start_hub(recipe), []
    with (
        HubClient.for_recipe(recipe, hub.address, 0, say=said.append) as zero,
        HubClient.for_recipe(recipe, hub.address, 1, say=said.append) as one,
        ThreadPoolExecutor() as pool,
    ):
        for client in (zero, one):
            client.join()
            client.pull().close()
        push(zero, 0, fabricate(recipe, 0, 0))
        waiting = pool.submit(zero.wait_round, 1)
        (path,) = (hub.state / "pushes").rglob("node-000-*.safetensors")
        path.write_bytes(how(path.read_bytes()))
        push(one, 0, fabricate(recipe, 1, 0))
        assert waiting.result(timeout=60) == 1
        (rejected,) = zero.status()["rejected"]
    assert (rejected["node"], rejected["round"]) == (0, 0)
    assert f"{path}: damaged on the hub's disk" in rejected["reason"]
    assert hub.error is None
    return said, read_state(hub.state / "rounds/000001")


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_that_is_damaged_before_the_round_closes_is_sent_again(start_hub, connect, tmp_path, damage):
    recipe = make_recipe()
    said, state = close_with_damage(recipe, start_hub, connect, DAMAGES[damage])
    assert [line.endswith("it has lost this node's push for round 0; sending it again") for line in said] == [True]
    initial = read_state(tmp_path / "state/rounds/000000")
    assert_same(state, next_state(recipe, initial, {node: fabricate(recipe, node, 0) for node in (0, 1)}))


@pytest.mark.parametrize(
    "spes",
    [
        {"wire": "int8"},
        {"merge_interval": 10, "merge_steps": 30},
        {"wire": "bf16", "merge_interval": 10, "merge_steps": 30},
    ],
    ids=["int8", "merge", "bf16 merge"],
)
def test_so_it_is_with_codecs_and_merges(start_hub, connect, tmp_path, spes):
    recipe = make_recipe(**spes)
    said, state = close_with_damage(recipe, start_hub, connect, DAMAGES["a bit"])
    assert len(said) == 1
    hub = start_hub(recipe, tmp_path / "undisturbed")
    for node in (0, 1):
        client = connect(hub, node)
        client.join()
        client.pull().close()
        push(client, 0, fabricate(recipe, node, 0))
    assert client.wait_round(1) == 1
    assert_same(state, read_state(tmp_path / "undisturbed/rounds/000001"))
