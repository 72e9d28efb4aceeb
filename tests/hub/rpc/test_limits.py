"""What one caller may have under way, and what it may make the hub keep."""

import threading

import grpc
import pytest

from spes_mega.client.client import HubClient
from spes_mega.errors import HubRefusedError
from spes_mega.hub.pull import pull_payload as outgoing_module
from spes_mega.hub.push.uploads import MAX_UPLOADS
from spes_mega.hub.rpc.admission import MAX_DOWNLOADS
from spes_mega.hub.rpc.limits import MESSAGE_S, Lanes
from spes_mega.wire.errors import BusyError, OversizedError, PayloadError, error_of
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.tensor_specs import payload_header
from tests.hub.fabricated import fabricate, make_recipe, pull, push
from tests.hub.rpc.test_hub import stalled_push, until


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def enter(lanes, lane, ended, limit=2):
    """A call that a thread has taken up; its number among `ended` when it is ended."""
    call = lanes.enter(lane, limit)
    if call is not None:
        call.begin(lambda: ended.append(call))
    return call


def test_a_lane_takes_as_many_calls_as_it_has_room_for():
    lanes, ended = Lanes(100.0), []
    first, second = (enter(lanes, "node-0", ended) for _ in range(2))
    for call in (first, second):
        lanes.arrived(call)
    assert enter(lanes, "node-0", ended) is None
    assert enter(lanes, "node-1", ended) is not None
    lanes.leave("node-0", first)
    assert enter(lanes, "node-0", ended) is not None
    assert not ended


def test_who_says_nothing_makes_room_the_oldest_first_even_before_a_thread_has_taken_it_up():
    lanes, ended = Lanes(100.0), []
    queued = lanes.enter("x", 3)
    speaks, silent = (enter(lanes, "x", ended, 3) for _ in range(2))
    lanes.arrived(speaks)
    assert enter(lanes, "x", ended, 3) is not None
    queued.begin(lambda: ended.append(queued))
    assert ended == [queued]
    assert enter(lanes, "x", ended, 3) is not None
    assert ended == [queued, silent]
    lanes.leave("x", queued)  # it is gone already
    assert enter(lanes, "x", ended, 3) is not None  # in place of the next one that says nothing


def test_a_call_is_ended_without_a_message_soon_and_with_one_in_the_end():
    clock, ended = Clock(), []
    lanes = Lanes(100.0, clock)
    silent, speaks = (enter(lanes, "x", ended) for _ in range(2))
    lanes.arrived(speaks)
    clock.now = MESSAGE_S - 1
    lanes.end_overdue()
    assert ended == []
    clock.now = MESSAGE_S + 1
    lanes.end_overdue()
    assert ended == [silent]
    lanes.leave("x", silent)
    clock.now = 100.0
    lanes.end_overdue()
    assert ended == [silent, speaks]


def test_nothing_is_kept_of_calls_that_are_over():
    lanes = Lanes(100.0)
    for n in range(100):
        lanes.leave(n, lanes.enter(n, 1))
    assert not lanes._calls


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
    assert hub.run.state.rounds.attendance.presence()[0].value == "never joined"


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
