"""What one caller may have under way, and what it may make the hub keep."""

import threading

import grpc
import pytest

from hub.fabricated import fabricate, make_recipe, pull, push
from hub.test_hub import stalled_push, until
from spes_mega.errors import HubRefusedError
from spes_mega.hub import outgoing as outgoing_module
from spes_mega.hub.client import HubClient
from spes_mega.hub.faults import BusyError, OversizedError, PayloadError, error_of, printable
from spes_mega.hub.forms import payload_header
from spes_mega.hub.limits import MAX_DOWNLOADS, MAX_PUSHES, Slots
from spes_mega.hub.partials import MAX_UPLOADS
from spes_mega.hub.proto import hub_pb2 as pb


def test_slots_are_counted_for_each_key_and_given_back():
    slots = Slots("uploads")
    with slots.take("node 0", 2):
        full = pytest.raises(BusyError, match="node 0 has 2 uploads under way")
        with slots.take("node 0", 2), slots.take("node 1", 1), full, slots.take("node 0", 2):
            pass
        with pytest.raises(KeyError), slots.take("node 0", 2):
            raise KeyError
        with slots.take("node 0", 2):
            pass


def test_a_node_has_few_uploads_at_a_time_and_others_are_not_held_up(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    zero, one = connect(hub, 0), connect(hub, 1)
    zero.join()
    one.join()
    go_on = threading.Event()
    stub = zero._channel._stub
    stalled = [stub.Push.future(stalled_push(zero, recipe, 0, go_on, f"id-{n}")) for n in range(MAX_UPLOADS)]
    until(lambda: len(list((hub.state / "pushes/000000").glob("*.part"))) == MAX_UPLOADS)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Push(stalled_push(zero, recipe, 0, go_on, "one more"), timeout=20)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error_of(refused.value, "h"), BusyError)
    push(one, 0, fabricate(recipe, 1, 0))
    go_on.set()
    assert not stalled[0].result(20).repeated or not stalled[1].result(20).repeated
    assert zero.wait_round(1) == 1


def test_pushes_that_never_say_who_they_are_do_not_hold_up_the_hub(start_hub, connect):
    recipe = make_recipe(num_nodes=1)
    client = connect(start_hub(recipe), 0)
    client.join()
    never = threading.Event()

    def silent():
        never.wait(30)
        yield from ()

    stub = client._channel._stub
    calls = [stub.Push.future(silent()) for _ in range(MAX_PUSHES)]

    def busy():
        with pytest.raises(grpc.RpcError) as refused:
            stub.Push(iter([b""]), timeout=20)
        return refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    until(busy, 60)  # all of them have come
    assert client.status()["round"] == 0
    for call in calls:
        call.cancel()
    never.set()
    push(client, 0, fabricate(recipe, 0, 0))  # tries again until there is room
    assert client.wait_round(1) == 1


def test_a_node_has_few_downloads_at_a_time(start_hub, connect):
    recipe = make_recipe({"vocab_size": 50_000}, num_nodes=1)  # more than the line takes in advance
    client = connect(start_hub(recipe), 0)
    client.join()
    stub, request = client._channel._stub, pb.PullRequest(caller=client._caller)
    held = [stub.Pull(request, timeout=60) for _ in range(MAX_DOWNLOADS)]
    for call in held:
        next(call)
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Pull(request, timeout=20))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in held:
        call.cancel()
    client.pull().close()


@pytest.mark.parametrize("session", ["", "x" * 65, "two words", "ü", "\x1b[2J"])
def test_a_session_is_a_short_word(start_hub, connect, session):
    hub = start_hub(make_recipe())
    client = connect(hub, 0)
    client._caller.session = session
    with pytest.raises(HubRefusedError, match="node 0 names no session"):
        client.join()
    assert hub.run.rounds.presence()[0].value == "never joined"


def test_what_quotes_a_peer_can_be_shown_and_sent():
    assert printable("plain ü\n\x1b[31m\ud800") == "plain ü\n\\x1b[31m\\ud800"


def test_a_node_may_not_claim_more_tokens_than_anybody_trains_on(start_hub, connect):
    recipe = make_recipe(num_nodes=1, weight_by_tokens=True)  # rounds of 10 steps, samples of 16 tokens
    client = connect(start_hub(recipe), 0)
    client.join()
    most, trained = 10 * 16 * (1 << 16), fabricate(recipe, 0, 0)
    with pytest.raises(HubRefusedError, match=rf"'tokens': {most + 1} tokens are more than .* \({most} at most"):
        push(client, 0, trained, most + 1)
    push(client, 0, trained, most)
    assert client.wait_round(1) == 1
    assert client.status()["rounds"][1]["tokens"] == most


def test_a_state_that_is_larger_than_the_model_is_not_taken(start_hub, tmp_path):
    """As from a hub that would fill a node's disk: here it has a model with a larger vocabulary."""
    hub = start_hub(make_recipe({"vocab_size": 20_000}))
    with HubClient.for_recipe(make_recipe(), hub.address, 0, spool_dir=tmp_path) as client:
        client._caller.digest = hub.recipe.digest()
        client.join()
        with pytest.raises(OversizedError, match=r"announces a state of 2\d{6} bytes: expected at most \d{5}$"):
            client.pull()
        assert client.bytes_down == 0


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_header_that_is_longer_than_its_names_need_is_not_read(start_hub, connect, monkeypatch, wire):
    recipe = make_recipe(num_nodes=1, wire=wire)
    client = connect(start_hub(recipe), 0)
    client.join()
    pull(client)
    push(client, 0, fabricate(recipe, 0, 0))
    assert client.wait_round(1) == 1
    padding = {"padding": "x" * client._bounds.header}
    monkeypatch.setattr(outgoing_module, "payload_header", lambda forms: payload_header(forms, padding))
    with pytest.raises(PayloadError, match=r"state of round 1: a header of \d+ bytes"):
        client.pull(0)
