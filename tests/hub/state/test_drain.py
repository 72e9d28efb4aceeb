"""Replacing a hub under nodes that go on: drain, start again on the same state; and what watchers are told."""

import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spes_mega.client.client import HubClient
from spes_mega.errors import DeadlineError, StoreError
from spes_mega.hub.rpc.server import SERVICE
from spes_mega.hub.state import drain as drain_module
from spes_mega.hub.state.drain import drain
from spes_mega.hub.systemd import notify
from spes_mega.node.launch.command import free_port
from spes_mega.security.access import read_access
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, pull, push, raw_recipe, read_state
from tests.hub.keyring import make_keys
from tests.hub.process import HubProcess
from tests.hub.rpc.test_hub import moved, until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health(channel, service):
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status


def test_a_hub_that_drains_closes_its_round_hands_it_over_and_ends(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    zero, one = connect(hub, 0), connect(hub, 1)
    zero.join()
    one.join()
    initial = pull(zero)[1]
    channel = grpc.insecure_channel(hub.address)
    assert health(channel, SERVICE) == SERVING
    (hub.state / "drain").touch()
    until(lambda: health(channel, SERVICE) == NOT_SERVING)
    assert health(channel, "") == SERVING  # it is alive, and not to be killed
    push(zero, 0, fabricate(recipe, 0, 0))
    push(one, 0, fabricate(recipe, 1, 0))
    assert zero.wait_round(1) == 1
    expected = next_state(recipe, initial, {node: fabricate(recipe, node, 0) for node in (0, 1)})
    assert_same(pull(zero)[1], expected)
    time.sleep(1)
    assert hub.finished is None  # node 1 has not fetched it yet
    assert_same(pull(one)[1], expected)
    hub.join()
    assert (hub.error, hub.finished) == (None, False)
    assert not (hub.state / "drain").exists()
    assert_same(read_state(hub.state / "snapshots/round-000001"), expected)
    channel.close()
    # while there is no hub, nodes train; then they push to the next one
    again = start_hub(recipe)
    for node, client in enumerate((zero, one)):
        client = moved(client, again)
        push(client, 1, fabricate(recipe, node, 1))
        client.close()
    until(lambda: again.run.state.rounds.round == 2)


def test_a_drained_hub_does_not_wait_for_ever_for_who_fetches_nothing(start_hub, connect):
    recipe = make_recipe(rpc_deadline_s=1)
    hub = start_hub(recipe)
    for node in (0, 1):
        client = HubClient(hub.address, node, recipe.digest())
        client.join()
        push(client, 0, fabricate(recipe, node, 0))
        client.close()
    hub.run.state.rounds.shutdown.drain()
    hub.join()
    assert hub.error is None
    assert hub.run.state.rounds.round >= 1


def test_a_hub_without_nodes_drains_at_once(start_hub):
    hub = start_hub(make_recipe())
    hub.run.state.rounds.shutdown.drain()
    assert hub.join().finished is False
    assert list((hub.state / "snapshots").iterdir()) == []  # the initial state, which somebody has


def test_a_hub_whose_nodes_have_left_keeps_its_last_state_when_it_drains(start_hub, connect):
    recipe = make_recipe()
    hub = start_hub(recipe)
    clients = [connect(hub, node) for node in (0, 1)]
    for node, client in enumerate(clients):
        client.join()
        push(client, 0, fabricate(recipe, node, 0))
    for client in clients:
        assert client.wait_round(1) == 1
        client.leave()
    until(lambda: (hub.state / "rounds/000001").exists())
    assert list((hub.state / "snapshots").iterdir()) == []
    hub.run.state.rounds.shutdown.drain()
    assert hub.join().finished is False
    assert_same(read_state(hub.state / "snapshots/round-000001"), read_state(hub.state / "rounds/000001"))


def test_a_directory_without_a_hub_has_nothing_to_drain(start_hub, tmp_path):
    with pytest.raises(StoreError, match="no hub has ever used this as its --state"):
        drain(tmp_path)
    start_hub(make_recipe(), tmp_path / "state").stop()
    assert drain(tmp_path / "state") is False
    assert not (tmp_path / "state/drain").exists()


def test_a_request_that_a_killed_hub_left_does_not_end_the_next_one(start_hub, connect, tmp_path):
    start_hub(make_recipe()).stop()
    (tmp_path / "state/drain").touch()
    hub = start_hub(make_recipe())
    assert not (tmp_path / "state/drain").exists()
    connect(hub, 0).join()
    assert not hub.run.state.rounds.shutdown.draining


def test_an_upgrade_as_an_operator_does_it(tmp_path):
    """Real hub processes under mutual TLS: `--drain`, the next hub on the same port and state, nodes go on."""
    keys = make_keys(tmp_path / "keys")
    raw, port = raw_recipe(train={"steps": 20, "seq_len": 16}), free_port()
    secure = ("--keys", keys / "hub", "--mutual-tls")
    hub = HubProcess(tmp_path, raw, *secure, port=port)
    recipe = hub.recipe
    clients = [
        HubClient.for_recipe(
            recipe, hub.address, node, access=read_access(hub.address, keys / f"node-{node}", None, False)
        )
        for node in (0, 1)
    ]
    for client in clients:
        client.join()
    (tmp_path / "recipe2.yaml").write_text(yaml.safe_dump(raw))
    command = [
        sys.executable,
        "-m",
        "spes_mega.cli",
        "hub",
        tmp_path / "recipe2.yaml",
        "--state",
        tmp_path / "state",
        "--drain",
    ]
    drained = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    try:
        hub.read_until("draining: the hub ends when round 1 is closed")
        assert drained.poll() is None
        for node, client in enumerate(clients):
            push(client, 0, fabricate(recipe, node, 0))
        for client in clients:
            assert client.wait_round(1) == 1
            client.pull().close()
        assert drained.communicate(timeout=60)[0] == f"the hub of {tmp_path / 'state'} has ended\n"
        assert hub.end() == 0
        pushed = []

        def train_on(node):
            push(clients[node], 1, fabricate(recipe, node, 1))  # retries until the next hub is there
            pushed.append(clients[node].wait_round(2))

        training = [threading.Thread(target=train_on, args=(node,)) for node in (0, 1)]
        for thread in training:
            thread.start()
        again = HubProcess(tmp_path, raw, *secure, port=port)
        for thread in training:
            thread.join(60)
        assert pushed == [2, 2]
        for client in clients:
            client.leave()
            client.close()
        assert again.end() == 0
        assert "run finished at round 2" in again.output
    finally:
        for process in (hub.process, drained):
            process.kill()


def test_who_asks_a_hub_that_is_stopped_is_told_and_the_request_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(drain_module, "SILENT_S", 2.0)
    hub = HubProcess(tmp_path, raw_recipe())
    client = hub.client(0)
    client.join()  # whose round the drain waits for
    hub.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"has not reacted for 2 s.*remove .*state/drain to take it back"):
            drain(tmp_path / "state")
        asked = []
        asking = threading.Thread(target=lambda: asked.append(drain(tmp_path / "state")), daemon=True)
        hub.process.send_signal(signal.SIGCONT)
        hub.read_until("draining: ")
        asking.start()
        asking.join(5)  # longer than a hub may be silent
        assert asking.is_alive()
        client.leave()
        asking.join(60)
        assert asked == [True]
        assert hub.end() == 0
    finally:
        hub.process.kill()
        client.close()


def test_sigusr1_asks_for_the_same(tmp_path):
    hub = HubProcess(tmp_path, raw_recipe())
    hub.process.send_signal(signal.SIGUSR1)
    assert hub.end() == 0
    assert hub.output.endswith("hub stopped at round 0\n")


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_is_told(tmp_path, monkeypatch, abstract):
    address = f"@spes-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1", "STATUS=x")
        assert manager.recv(100) == b"READY=1\nSTATUS=x"
    notify("READY=1")  # a manager that has gone is no error
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")
