"""The hub over real gRPC on loopback: rounds, what is refused, and what nodes are told."""

import json
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spes_mega.client import client as client_module
from spes_mega.client.channel import Channel
from spes_mega.client.client import HubClient, PayloadError, StaleRoundError
from spes_mega.errors import AccessError, CheckpointError, DeadlineError, HubRefusedError, StoreError
from spes_mega.hub.console import Console
from spes_mega.hub.rounds.rounds import Rounds
from spes_mega.hub.rpc import server as server_module
from spes_mega.hub.rpc.auth import Guard
from spes_mega.hub.rpc.server import HubServer
from spes_mega.hub.state.ledger import RoundRecord
from spes_mega.layout.names import expert_of
from spes_mega.layout.writer import CheckpointWriter
from spes_mega.wire.frames import CHUNK_BYTES, Arrival, frame_of
from spes_mega.wire.payload import write_payload
from spes_mega.wire.proto import hub_pb2 as pb
from spes_mega.wire.tensor_specs import in_fp32
from tests.hub.fabricated import (
    assert_same,
    fabricate,
    make_recipe,
    next_state,
    pull,
    push,
    pushes_in,
    read_state,
    shapes_of,
)
from tests.hub.relay import Relay

TOKENS = {0: 100, 1: 23}


def until(condition, timeout=10):
    give_up = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def trained(recipe, state, node, round_):
    """What a node pushes: what it pulled, moved by a made-up step."""
    return {name: state[name] + step for name, step in fabricate(recipe, node, round_).items()}


def take_part(client, recipe, node):
    """Train by fabrication until the run is finished; returns the state that the node ends with."""
    client.join()
    round_, state = pull(client)
    while round_ < recipe.num_rounds:
        mine = trained(recipe, state, node, round_)
        push(client, round_, mine, TOKENS[node])
        client.wait_round(round_ + 1)
        state.update(mine)
        round_, news = pull(client, round_)
        state.update(news)
    client.leave()
    return state


@pytest.mark.parametrize("merging", [False, True])
def test_two_nodes_through_all_rounds_equal_the_reference(start_hub, connect, tmp_path, merging):
    # 4 rounds of 10 steps; merging ends after step 30
    recipe = make_recipe(merge_interval=10 if merging else 1000, merge_steps=31, merge_alpha=0.62)
    alphas = [0.42, 0.22, 0.02, None] if merging else [None] * 4
    hub = start_hub(recipe)
    expected = read_state(tmp_path / "state/rounds/000000")
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda node: take_part(connect(hub, node), recipe, node), (0, 1)))
    assert hub.join().finished
    final = read_state(tmp_path / "state/snapshots/round-000004")
    assert_same(ends[0], final)
    assert_same(ends[1], final)
    for round_, alpha in enumerate(alphas):
        expected = next_state(recipe, expected, {n: trained(recipe, expected, n, round_) for n in (0, 1)}, alpha)
    if merging:
        for name, tensor in expected.items():  # merged in fp64 here, in fp32 there
            torch.testing.assert_close(final[name], tensor, rtol=1e-5, atol=1e-5)
    else:
        assert_same(final, expected)
    ledger = json.loads((tmp_path / "state/rounds/000004/round.json").read_text())["ledger"]
    assert [r["merge_alpha"] for r in ledger["rounds"]] == [None, *map(pytest.approx, alphas)]
    assert [r["tokens"] for r in ledger["rounds"]] == [0, 123, 123, 123, 123]
    assert [r["step"] for r in ledger["rounds"]] == [0, 10, 20, 30, 40]
    assert ledger["merges"] == 3 * merging


def test_what_travels_is_what_is_needed(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    clients = [connect(hub, node) for node in (0, 1)]
    for node, client in enumerate(clients):
        client.join()
        assert len(pull(client)[1]) == len(hub.run.state.shapes)
        push(client, 0, fabricate(recipe, node, 0))
    numbers = sum(torch.Size(shape).numel() for shape in shapes_of(recipe, 0).values())
    assert 4 * numbers < clients[0].bytes_up < 4 * numbers + 20_000
    clients[0].wait_round(1)
    before = clients[0].bytes_down
    with clients[0].pull(have_round=0) as partial:
        assert not partial.full
        assert {expert_of(name).expert for name in partial.shapes if expert_of(name)} == {2, 3}
    assert clients[0].bytes_down - before < before
    with clients[1].pull() as full:  # it does not say what it has
        assert full.full
        assert len(full.shapes) == len(hub.run.state.shapes)
    traffic = clients[0].status()["nodes"][0]
    assert (traffic["bytes_up"], traffic["bytes_down"]) == (clients[0].bytes_up, clients[0].bytes_down)


def test_a_payload_of_many_chunks_and_over_the_limit_of_a_message(start_hub, connect):
    recipe = make_recipe({"vocab_size": 90_000, "tie_embeddings": True}, {"steps": 10}, num_nodes=1)
    hub = start_hub(recipe)
    client = connect(hub, 0)
    state = take_part(client, recipe, 0)
    assert client.bytes_up > max(2 * CHUNK_BYTES, 4 << 20)
    initial = read_state(hub.state / "rounds/000000")
    assert_same(state, trained(recipe, initial, 0, 0))


def nan_push(recipe):
    tensors = fabricate(recipe, 0, 0)
    tensors["model.norm.weight"][3] = float("nan")
    return tensors


def renamed_push(recipe):
    tensors = fabricate(recipe, 0, 0)
    # an expert of node 1 in the place of an own one: as many bytes, and a name as long
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    return {n.replace("experts.0", "experts.3") if n == name else n: t for n, t in tensors.items()}


def reshaped_push(recipe):
    tensors = fabricate(recipe, 0, 0)
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    return {n: t.T.contiguous() if n == name else t for n, t in tensors.items()}


def short_push(recipe):
    return dict(list(fabricate(recipe, 0, 0).items())[:-1])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_push, "push of node 0: model.norm.weight has NaN or infinite values"),
        (renamed_push, r"tensor model.layers.0.mlp.experts.0.up_proj.weight is missing"),
        (reshaped_push, r"experts.1.down_proj.weight has shape \(12, 16\), expected \(16, 12\)"),
        (short_push, "a push of .* bytes: the tensors of this node take"),
    ],
)
def test_a_faulty_push_is_refused_and_changes_nothing(start_hub, connect, tmp_path, spoil, message):
    recipe = make_recipe()
    hub = start_hub(recipe)
    client = connect(hub, 0)
    client.join()
    with pytest.raises(PayloadError, match=message):
        push(client, 0, spoil(recipe))
    assert list((tmp_path / "state/pushes/000000").iterdir()) == []
    status = client.status()
    assert status["waiting_for"] == [0, 1]
    assert [(r["node"], r["round"]) for r in status["rejected"]] == [(0, 0)]
    push(client, 0, fabricate(recipe, 0, 0))
    assert client.status()["waiting_for"] == [1]
    assert client.status()["nodes"][0]["last_pushed_round"] == 0


def push_messages(client, frames, total, **fields):
    opening = {"caller": client._caller, "round": 0, "total_bytes": total, "payload": "id"} | fields
    return iter([pb.PushOpening(**opening).SerializeToString(), *frames])


def raw_push(client, frames, total, **fields):
    return client._channel.call("Push", push_messages(client, frames, total, **fields), 10)


def test_streams_that_are_no_push_are_refused(start_hub, connect, tmp_path):
    recipe = make_recipe()
    client = connect(start_hub(recipe), 0)
    client.join()
    size = sum(torch.Size(shape).numel() for shape in shapes_of(recipe, 0).values()) * 4 + 1000
    data = b"\xff" * size
    with pytest.raises(PayloadError, match="a push begins with its opening"):
        client._channel.call("Push", iter([frame_of(0, data)]), 10)
    with pytest.raises(PayloadError, match="a push begins with its opening"):
        client._channel.call("Push", iter([]), 10)
    for frames, message in (
        ([frame_of(0, data[:-1])], f"ended after {size - 1} of {size}"),
        ([frame_of(0, data)], "not a safetensors file"),
        ([frame_of(7, data)], "a chunk for byte 7 came where byte 0 was due"),
    ):
        with pytest.raises(PayloadError, match=message):
            raw_push(client, frames, size)
    with pytest.raises(PayloadError, match="a push of 1099511627776 bytes"):
        raw_push(client, [], 1 << 40)
    with pytest.raises(PayloadError, match="the id of a payload has 1 to 64 characters"):
        raw_push(client, [], size, payload="x" * 65)
    assert list((tmp_path / "state/pushes/000000").iterdir()) == []
    assert len(client.status()["rejected"]) == 5


def test_a_damaged_chunk_is_listed_and_what_came_before_it_stands(start_hub, connect):
    recipe = make_recipe()
    client = connect(start_hub(recipe), 0)
    client.join()
    size = sum(torch.Size(shape).numel() for shape in shapes_of(recipe, 0).values()) * 4 + 1000
    damaged = frame_of(100, b"good")[:-1] + b"!"
    with pytest.raises(grpc.RpcError) as raised:
        client._channel.open("Push", push_messages(client, [frame_of(0, bytes(100)), damaged], size), 10)
    assert raised.value.code() == grpc.StatusCode.DATA_LOSS
    offer = pb.OfferRequest(caller=client._caller, round=0, payload="id", total_bytes=size)
    reply = client._channel.call("Offer", offer, 10)
    assert (reply.offset, reply.complete) == (100, False)
    assert [r["reason"] for r in client.status()["rejected"]] == ["bad checksum of the chunk at byte 100"]


def test_the_same_push_again_is_accepted_and_another_one_refused(start_hub, connect):
    recipe = make_recipe()
    client = connect(start_hub(recipe), 0)
    client.join()
    push(client, 0, fabricate(recipe, 0, 0))
    push(client, 0, fabricate(recipe, 0, 0))
    with pytest.raises(HubRefusedError, match="already pushed other values in this round; the first ones stay"):
        push(client, 0, fabricate(recipe, 0, 0, salt="other"))
    assert len(client.status()["rejected"]) == 1
    assert client.join().pushed


def test_pushes_in_the_same_instant_make_one_round_each(start_hub, connect, tmp_path):
    recipe = make_recipe(num_nodes=4)
    hub = start_hub(recipe)
    initial = read_state(tmp_path / "state/rounds/000000")
    clients = [connect(hub, node) for node in range(4)]
    for client in clients:
        client.join()
    barrier = threading.Barrier(8)

    def push_at_once(node):
        barrier.wait()
        push(clients[node % 4], 0, fabricate(recipe, node % 4, 0))

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(push_at_once, node) for node in range(8)]:
            future.result()  # the doubled pushes are repetitions, be it after the close
    assert clients[0].wait_round(1) == 1
    pushes = {node: fabricate(recipe, node, 0) for node in range(4)}
    assert_same(pull(clients[0])[1], next_state(recipe, initial, pushes))


def test_a_late_push_is_refused_and_the_node_goes_on(start_hub, connect, tmp_path):
    recipe = make_recipe(min_nodes=1, round_deadline_s=0.8, rpc_deadline_s=0.8, join_deadline_s=20)
    hub = start_hub(recipe)
    patient = make_recipe()
    fast, slow = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    for client in (fast, slow):
        client.join()
    initial = pull(slow)[1]
    push(fast, 0, fabricate(recipe, 0, 0))
    assert slow.wait_round(1) == 1  # waiting is no sign that its own push is still to come
    with pytest.raises(StaleRoundError, match="round 0 is closed: wait for round 1"):
        push(slow, 0, fabricate(recipe, 1, 0))
    with slow.pull(have_round=0) as pulled:
        assert pulled.full  # its own training was not averaged: it must take the hub's values of its experts
        assert_same(dict(pulled), next_state(patient, initial, {0: fabricate(recipe, 0, 0)}))
    push(slow, 1, fabricate(recipe, 1, 1))
    push(fast, 1, fabricate(recipe, 0, 1))
    assert slow.wait_round(2) == 2
    records = slow.status()["rounds"]
    assert [record["nodes"] for record in records] == [[], [0], [0, 1]]
    assert [(r["node"], r["round"]) for r in slow.status()["rejected"]] == [(1, 0)]
    fast.close()
    slow.close()


def test_who_never_joins_is_named_to_those_who_wait(start_hub, connect):
    recipe = make_recipe(join_deadline_s=0.7)
    hub = start_hub(recipe)
    client = connect(hub, 1)
    client.join()
    with pytest.raises(DeadlineError, match=r"node 0 did not join within 0.7 s"):
        client.wait_round(1)
    assert isinstance(hub.join().error, DeadlineError)


def test_who_never_pushes_is_named_to_those_who_wait(start_hub, connect):
    recipe = make_recipe(round_deadline_s=0.7, rpc_deadline_s=0.7)
    hub = start_hub(recipe)
    zero, one = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    zero.join()
    one.join()
    push(zero, 0, fabricate(recipe, 0, 0))
    with pytest.raises(DeadlineError, match=r"round 0: node 1 did not push within 0.7 s"):
        zero.wait_round(1)
    assert "node 1 did not push" in str(hub.join().error)


def test_strangers_are_refused_by_name(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe, token="right")
    with pytest.raises(HubRefusedError, match="the token is missing or wrong"):
        connect(hub, 0).join()
    with pytest.raises(HubRefusedError, match="the token is missing or wrong"):
        push(connect(hub, 0, token="wrong"), 0, fabricate(recipe, 0, 0))
    with pytest.raises(HubRefusedError, match="the token is missing or wrong"):
        connect(hub, 0, token="wrong").pull()
    with pytest.raises(HubRefusedError, match=r"node 1 has another recipe .* compare what `spes-mega recipe"):
        connect(hub, 1, recipe=make_recipe(sync_every=7), token="right").join()
    with pytest.raises(HubRefusedError, match=r"there is no node 2: spes.num_nodes is 2 \(0..1\)"):
        connect(hub, 2, token="right").pull()
    client = connect(hub, 0, token="right")
    client._caller.protocol = 99
    with pytest.raises(HubRefusedError, match="speaks protocol 99, the hub 3"):
        client.join()
    assert connect(hub, 0, token="right").join().round == 0
    with grpc.insecure_channel(hub.address) as channel:  # probes have no token
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_second_process_of_a_node_takes_over(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    old, new = connect(hub, 0), connect(hub, 0)
    old.join()
    new.join()
    with pytest.raises(HubRefusedError, match="another process has joined as node 0"):
        push(old, 0, fabricate(recipe, 0, 0))
    push(new, 0, fabricate(recipe, 0, 0))


def test_a_download_that_was_damaged_goes_on_with_the_damaged_chunk(start_hub, connect, monkeypatch, tmp_path):
    recipe = make_recipe({"vocab_size": 90_000}, num_nodes=1)
    client = connect(start_hub(recipe), 0)
    size = sum(torch.Size(shape).numel() for shape in shapes_of(recipe, 0).values()) * 4
    taken = 0
    take = Arrival.take

    def damaging(self, frame):
        nonlocal taken
        taken += 1
        return take(self, frame[:-1] + bytes([frame[-1] ^ 1]) if taken == 3 else frame)

    with monkeypatch.context() as patch:
        patch.setattr(Arrival, "take", damaging)
        state = pull(client)[1]
    assert taken > 5
    assert client.bytes_down - size < 20_000  # nothing came twice but the damaged chunk, which is not counted
    assert_same(state, read_state(tmp_path / "state/rounds/000000"))


def test_it_starts_from_a_checkpoint_of_the_right_shape_only(start_hub, connect, tmp_path):
    recipe = make_recipe(num_nodes=1)
    init = fabricate(recipe, 0, 99)
    with CheckpointWriter(tmp_path / "init", recipe.model, torch.bfloat16) as writer:
        for name, tensor in init.items():
            writer.write(name, tensor)
    (tmp_path / "init/tokenizer.json").write_text("{}")
    hub = start_hub(recipe, init=tmp_path / "init")
    assert_same(pull(connect(hub, 0))[1], {name: tensor.bfloat16().float() for name, tensor in init.items()})
    assert (tmp_path / "state/rounds/000000/tokenizer.json").read_text() == "{}"
    other = make_recipe({"num_experts": 8, "vocab_size": 65}, num_nodes=1)
    with pytest.raises(CheckpointError, match=r"num_experts: 8 expected, 4 found.*vocab_size: 65 expected, 64 found"):
        start_hub(other, tmp_path / "other", init=tmp_path / "init")
    corrected = start_hub(recipe, tmp_path / "other", init=tmp_path / "init")  # the failed start took no directory
    assert connect(corrected, 0).status()["digest"] == recipe.digest()


def test_a_hub_that_is_started_again_goes_on(start_hub, connect, tmp_path, capsys):
    recipe = make_recipe(train={"steps": 20})
    hub = start_hub(recipe)
    initial = read_state(tmp_path / "state/rounds/000000")
    zero, one = connect(hub, 0), connect(hub, 1)
    zero.join()
    one.join()
    push(zero, 0, fabricate(recipe, 0, 0))
    assert hub.stop().finished is False
    with pytest.raises(StoreError, match="another recipe"):
        start_hub(make_recipe())
    again = start_hub(recipe, init=tmp_path)
    assert "going on from round 0/2" in (text := capsys.readouterr().out)
    assert f"--init {tmp_path} is ignored" in text
    first = zero
    zero, one = connect(again, 0), connect(again, 1)
    zero.join()
    one.join()
    status = one.status()
    assert status["waiting_for"] == [1]
    assert [node["last_pushed_round"] for node in status["nodes"]] == [0, None]
    assert [node["bytes_up"] for node in status["nodes"]] == [first.bytes_up, 0]
    push(one, 0, fabricate(recipe, 1, 0))
    assert zero.wait_round(1) == 1
    assert zero.status()["rounds"][-1]["bytes_up"] == first.bytes_up + one.bytes_up
    pushes = {node: fabricate(recipe, node, 0) for node in (0, 1)}
    assert_same(pull(zero, None)[1], next_state(recipe, initial, pushes))


def test_a_hub_that_is_started_again_waits_for_nodes_that_are_training(start_hub, tmp_path):
    recipe = make_recipe(join_deadline_s=0.5)
    hub = start_hub(recipe)
    zero, one = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    zero.join()
    one.join()
    hub.stop()
    again = start_hub(recipe)
    time.sleep(1)  # nobody calls before the join deadline
    zero, one = moved(zero, again), moved(one, again)
    assert [node["state"] for node in zero.status()["nodes"]] == ["joined", "joined"]
    push(zero, 0, fabricate(recipe, 0, 0))
    push(one, 0, fabricate(recipe, 1, 0))
    assert zero.wait_round(1) == 1
    zero.leave()
    one.leave()
    again.stop()
    third = start_hub(recipe)  # who left has to come back in time
    assert "nodes 0, 1 did not join within 0.5 s" in str(third.join().error)


def moved(client, hub):
    """The same process of a node, whose hub now has another port."""
    client.close()
    other = HubClient(hub.address, client.node, client._caller.digest)
    other._caller.session = client._caller.session
    return other


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-100], lambda content: content[:-1] + bytes([content[-1] ^ 1])]
)
def test_a_push_damaged_on_the_disk_is_dropped_and_listed(start_hub, connect, tmp_path, damage):
    recipe = make_recipe()
    hub = start_hub(recipe)
    client = connect(hub, 1)
    client.join()
    push(client, 0, fabricate(recipe, 1, 0))
    hub.stop()
    (path,) = (tmp_path / "state/pushes/000000").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    client = connect(start_hub(recipe), 1)
    status = client.status()
    assert status["waiting_for"] == [0, 1]
    assert "damaged on the hub's disk" in status["rejected"][0]["reason"]
    client.join()
    push(client, 0, fabricate(recipe, 1, 0))
    assert client.status()["waiting_for"] == [0]


def test_a_hub_that_is_not_there_is_named():
    client = HubClient("127.0.0.1:1", 0, "", rpc_deadline_s=0.5)
    with client, pytest.raises(DeadlineError, match=r"hub at 127\.0\.0\.1:1: no success within 0\.5 s"):
        client.join()


@pytest.fixture
def short_attempts(monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_S", 1.0)
    monkeypatch.setattr(client_module, "POLL_S", 0.2)


@pytest.mark.usefixtures("short_attempts")
def test_a_line_that_falls_silent_longer_than_an_attempt_ends_no_call(start_hub):
    recipe = make_recipe(num_nodes=1)
    hub = start_hub(recipe)
    relay = Relay(hub.address)
    client = HubClient(relay.address, 0, recipe.digest(), rpc_deadline_s=20, wait_deadline_s=20)
    with client, ThreadPoolExecutor() as pool:

        def through_silence(call, *arguments):
            relay.silence()
            result = pool.submit(call, *arguments)
            time.sleep(1.5)
            assert not result.done()
            relay.speak()
            return result.result(timeout=15)

        assert through_silence(client.join).round == 0
        assert through_silence(client.status)["round"] == 0
        push(client, 0, fabricate(recipe, 0, 0))
        assert through_silence(client.wait_round, 1) == 1
        through_silence(client.leave)
    assert hub.run.state.rounds.attendance.presence()[0].value == "left"


@pytest.mark.usefixtures("short_attempts")
@pytest.mark.parametrize("silent", [True, False])
def test_a_wait_that_ends_without_the_round_names_its_own_limit(start_hub, silent):
    recipe = make_recipe()
    hub = start_hub(recipe)
    relay = Relay(hub.address)
    client = HubClient.for_recipe(
        make_recipe(join_deadline_s=0.5, round_deadline_s=0.5, rpc_deadline_s=0.5), relay.address, 0
    )
    client._caller.digest = recipe.digest()
    with client:
        client.join()
        message = r"round 1 was not closed within"
        if silent:
            relay.silence()
            message = "no success within"
        limit = r"2 s \(spes.join_deadline_s \+ 2 spes.round_deadline_s \+ spes.rpc_deadline_s\)"
        with pytest.raises(DeadlineError, match=f"hub at {relay.address}: {message} {limit}"):
            client.wait_round(1)
        relay.silence()
        with pytest.raises(DeadlineError, match=r"no success within 0.5 s \(spes.rpc_deadline_s\) \(last: Deadline"):
            client.status()


def test_two_hubs_on_one_port_are_refused(start_hub):
    hub = start_hub(make_recipe())
    with pytest.raises(AccessError, match="is the port in use"):
        HubServer(make_recipe(), hub.address, Guard(), Console())


def stalled_push(client, recipe, node, go_on, payload="id"):
    """The requests of a push that stops in the middle until `go_on` is set."""
    shapes = shapes_of(recipe, node)
    with tempfile.TemporaryFile() as file:
        size = write_payload(file, in_fp32(shapes), fabricate(recipe, node, 0).items(), {})
        file.seek(0)
        half, rest = file.read(size // 2), file.read()
    yield from push_messages(client, [frame_of(0, half)], size, payload=payload)
    go_on.wait(20)
    yield frame_of(len(half), rest)


def test_a_push_that_is_overtaken_by_the_close_is_late_and_leaves_nothing(start_hub, connect, tmp_path):
    recipe = make_recipe(min_nodes=1, round_deadline_s=1, rpc_deadline_s=1)
    hub = start_hub(recipe)
    zero, one = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    zero.join()
    one.join()
    push(zero, 0, fabricate(recipe, 0, 0))
    go_on = threading.Event()
    with ThreadPoolExecutor() as pool:
        late = pool.submit(one._channel.call, "Push", stalled_push(one, recipe, 1, go_on), 20)
        assert zero.wait_round(1) == 1
        go_on.set()
        with pytest.raises(StaleRoundError, match="round 0 is closed"):
            late.result()
    until(lambda: not pushes_in(tmp_path / "state"))
    zero.close()
    one.close()


def test_a_push_whose_answer_was_lost_is_accepted_again_after_the_close(start_hub, monkeypatch):
    recipe = make_recipe()
    hub = start_hub(recipe)
    zero, one = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    zero.join()
    one.join()
    push(zero, 0, fabricate(recipe, 0, 0))
    with monkeypatch.context() as patch:
        open_, attempts = Channel.open, []

        def lose_first_answer(self, method, request, timeout_s):
            answer = open_(self, method, request, timeout_s)
            if method == "Push":
                attempts.append(method)
                assert one.wait_round(1) == 1
                raise PayloadError("the answer was lost")
            return answer

        patch.setattr(Channel, "open", lose_first_answer)
        push(one, 0, fabricate(recipe, 1, 0))
        assert attempts == ["Push"]  # the hub says that nothing is missing
    hub.stop()
    again = start_hub(recipe)  # and it is remembered
    one = moved(one, again)
    push(one, 0, fabricate(recipe, 1, 0))
    status = one.status()
    assert status["rejected"] == []
    assert status["rounds"][-1]["nodes"] == [0, 1]
    assert status["waiting_for"] == [0, 1]
    zero.close()
    one.close()


def test_a_repeated_push_that_is_overtaken_by_the_close_is_accepted(start_hub):
    recipe = make_recipe()
    hub = start_hub(recipe)
    zero, one = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    zero.join()
    one.join()
    push(one, 0, fabricate(recipe, 1, 0))
    go_on = threading.Event()
    with ThreadPoolExecutor() as pool:
        repeated = pool.submit(one._channel.call, "Push", stalled_push(one, recipe, 1, go_on), 20)
        push(zero, 0, fabricate(recipe, 0, 0))
        assert zero.wait_round(1) == 1
        go_on.set()
        assert repeated.result().repeated
    zero.close()
    one.close()


def test_an_upload_that_breaks_off_is_listed_and_leaves_nothing_after_its_round(start_hub, connect, tmp_path):
    recipe = make_recipe()
    hub = start_hub(recipe)
    client = connect(hub, 1)
    client.join()
    never = threading.Event()
    call = client._channel._stub.Push.future(stalled_push(client, recipe, 1, never))
    staged = tmp_path / "state/pushes/000000"
    while not any(staged.glob("*.part")):
        time.sleep(0.01)
    call.cancel()
    never.set()
    while not (rejected := client.status()["rejected"]):
        time.sleep(0.01)
    assert rejected == [{"node": 1, "round": 0, "reason": "the upload broke off"}]
    push(client, 0, fabricate(recipe, 1, 0))
    with connect(hub, 0) as other:
        other.join()
        push(other, 0, fabricate(recipe, 0, 0))
        assert other.wait_round(1) == 1
    until(lambda: not pushes_in(tmp_path / "state"))


def test_a_finished_run_serves_its_last_state_once_more_and_makes_up_for_a_lost_snapshot(start_hub, connect, tmp_path):
    recipe = make_recipe(train={"steps": 10}, num_nodes=1)
    hub = start_hub(recipe)
    state = take_part(connect(hub, 0), recipe, 0)
    assert hub.join().finished
    shutil.rmtree(tmp_path / "state/snapshots")
    again = start_hub(recipe)
    client = connect(again, 0)
    assert client.join().finished
    assert_same(pull(client)[1], state)
    client.leave()
    assert again.join().finished
    assert_same(read_state(tmp_path / "state/snapshots/round-000001"), state)


def test_a_hub_that_is_started_again_on_the_last_rounds_pushes_waits_for_those_who_made_them(
    start_hub, connect, monkeypatch, tmp_path
):
    recipe = make_recipe(train={"steps": 10})
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "_may_close", lambda self: False)
        hub = start_hub(recipe)
        clients = [connect(hub, node) for node in (0, 1)]
        for node, client in enumerate(clients):
            client.join()
            push(client, 0, fabricate(recipe, node, 0))
        hub.stop()
    again = start_hub(recipe)
    until(lambda: again.run.state.finished)
    time.sleep(3 * server_module.LINGER_S)  # the nodes' next attempt may be seconds away
    for client in [moved(client, again) for client in clients]:
        assert client.wait_round(1) == 1
        assert_same(pull(client)[1], read_state(tmp_path / "state/snapshots/round-000001"))
        client.leave()
    assert again.join().finished


def test_a_straggler_of_the_last_round_is_told_that_it_is_late(start_hub, monkeypatch, capsys):
    monkeypatch.setattr(server_module, "LINGER_S", 20)
    recipe = make_recipe(train={"steps": 10}, min_nodes=1, round_deadline_s=0.5, rpc_deadline_s=0.5)
    hub = start_hub(recipe)
    fast, slow = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    with fast, slow:
        fast.join()
        slow.join()
        push(fast, 0, fabricate(recipe, 0, 0))
        assert fast.wait_round(1) == 1
        fast.leave()
        time.sleep(1)  # longer than nodes that take part have for their leave
        with pytest.raises(StaleRoundError, match="round 0 is closed"):
            push(slow, 0, fabricate(recipe, 1, 0))
        assert pull(slow)[0] == 1
        slow.leave()
    assert hub.join(timeout=10).finished
    assert "did not take their leave" not in capsys.readouterr().out


def test_a_straggler_that_never_comes_is_not_waited_for_long(start_hub):
    recipe = make_recipe(train={"steps": 10}, min_nodes=1, round_deadline_s=0.5, rpc_deadline_s=0.5)
    hub = start_hub(recipe)
    fast, slow = (HubClient(hub.address, node, recipe.digest()) for node in (0, 1))
    with fast, slow:
        fast.join()
        slow.join()
        push(fast, 0, fabricate(recipe, 0, 0))
        assert fast.wait_round(1) == 1
        fast.leave()
        assert hub.join(timeout=10).finished


def test_events_are_lines_of_text_or_of_json(capsys):
    record = RoundRecord(3, 30, (0, 2), 4.26, 2_500_000, 1_000_000, 7, 0.25)
    Console().round(record, 4, 3, 0.5)
    Console(as_json=True).round(record, 4, 3, 0.5)
    text, line = capsys.readouterr().out.splitlines()
    assert text == (
        "round 3/4  step 30  nodes 0,2 of 3  4.3 s (0.5 s averaging)  up 2.50 MB  down 1.00 MB  "
        "merged experts (alpha 0.25)"
    )
    assert json.loads(line) == {
        "event": "round", "round": 3, "step": 30, "nodes": [0, 2], "seconds": 4.26, "bytes_up": 2_500_000,
        "bytes_down": 1_000_000, "tokens": 7, "merge_alpha": 0.25, "absent": [],
        "similarity": None, "aggregation_seconds": 0.5,
    }  # fmt: skip
