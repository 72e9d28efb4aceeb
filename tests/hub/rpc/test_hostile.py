"""Clients that hold on to what they are given: calls without a message, names, connections; and a hub that is short of
descriptors. Others notice nothing."""

import math
import resource
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from spes_mega.client.status import read_status
from spes_mega.hub.rpc import connections as connections_module
from spes_mega.hub.rpc import limits as limits_module
from spes_mega.hub.rpc.admission import HEALTH_CHECKS, Threads
from spes_mega.hub.rpc.connections import PER_CALLER, STRANGERS_PER_ADDRESS, Connections, Peer, most_connections
from spes_mega.hub.rpc.health import CHECK
from spes_mega.security.access import Access
from spes_mega.wire.proto import hub_pb2 as pb
from tests.hub.fabricated import fabricate, make_recipe, pull, push, raw_recipe
from tests.hub.keyring import make_keys
from tests.hub.process import TOKEN
from tests.hub.rpc.test_hub import until
from tests.security.test_security import access_of, guard_of

HUB = "/spes_mega.hub.v1.Hub/"
TRANSFER = "/spes_mega.hub.v1.Transfer/"
MANY = 60
"""More calls than a hub of two nodes has threads for them."""
FINISHED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("run") / "keys")


def channel_of(hub, access):
    tls = access.tls
    own = [("grpc.use_local_subchannel_pool", 1)]  # else channels of one process share a connection
    if tls is None:
        return grpc.insecure_channel(hub.address, own)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(hub.address, credentials, own)


@contextmanager
def silent_calls(hub, access, *methods, count=MANY):
    """Calls that are begun, and whose message never comes; their futures."""
    never = threading.Event()

    def nothing():
        never.wait(120)
        yield from ()

    metadata = (("authorization", f"Bearer {access.token}"),) if access.token else ()
    with ExitStack() as stack:
        calls = []
        for n in range(count):
            if n % 20 == 0:  # a connection has few streams
                channel = stack.enter_context(channel_of(hub, access))
            method = methods[n % len(methods)]
            calls.append(channel.stream_unary(method).future(nothing(), metadata=metadata))
        stack.callback(never.set)
        stack.callback(lambda: [call.cancel() for call in calls])
        time.sleep(2)  # they are there
        yield calls


def is_healthy(hub, access):
    with channel_of(hub, access) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        return reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
@pytest.mark.parametrize("who", ["stranger", "watch", "node-1"])
def test_calls_whose_message_never_comes_hold_up_nobody(start_hub, connect, keys, monkeypatch, who, mutual):
    monkeypatch.setattr(limits_module, "MESSAGE_S", 3.0)
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual))
    watch = access_of(keys / "watch")
    theirs, methods = {
        "stranger": (Access(None, watch.tls), [CHECK, HUB + "Join", TRANSFER + "Push"]),
        "watch": (watch, [HUB + "Status"]),
        "node-1": (
            access_of(keys / "node-1"),
            [HUB + "Leave", HUB + "WaitRound", TRANSFER + "Pull", TRANSFER + "Push"],
        ),
    }[who]
    clients = [connect(hub, node, access=access_of(keys / f"node-{node}")) for node in (0, 1)]
    for client in clients:
        client.join()
    push(clients[1], 0, fabricate(hub.recipe, 1, 0))
    with silent_calls(hub, theirs, *methods) as calls:
        push(clients[0], 0, fabricate(hub.recipe, 0, 0))
        assert clients[0].wait_round(1) == 1
        assert pull(clients[0])[0] == 1
        assert is_healthy(hub, Access(None, watch.tls))
        assert read_status(hub.address, watch, 20)["round"] == 1
        if who == "node-1":
            assert clients[1].join().round == 1  # even who has the same keys
        until(lambda: all(call.done() for call in calls), 30)
    assert {call.code() for call in calls} <= {*FINISHED, grpc.StatusCode.UNAUTHENTICATED}


def test_health_checks_that_say_nothing_do_not_hold_up_others(start_hub):
    hub = start_hub(make_recipe())
    with silent_calls(hub, Access(), CHECK, count=10 * HEALTH_CHECKS):
        began = time.monotonic()
        assert is_healthy(hub, Access())
        assert time.monotonic() - began < limits_module.MESSAGE_S  # it need not wait for their end


def test_a_push_that_falls_silent_is_ended(start_hub, connect, monkeypatch):
    recipe = make_recipe(num_nodes=1)
    hub = start_hub(recipe)
    client = connect(hub, 0)
    client.join()
    monkeypatch.setattr(hub.server._lanes, "_longest_s", 1.0)
    never = threading.Event()

    def opening():
        caller = client._caller
        size = 4 * sum(tensor.numel() for tensor in fabricate(recipe, 0, 0).values()) + 1000
        yield pb.PushOpening(caller=caller, round=0, total_bytes=size, payload="x").SerializeToString()
        never.wait(60)

    call = client._channel._stub.Push.future(opening())
    assert call.exception(30).code() == grpc.StatusCode.CANCELLED
    never.set()
    push(client, 0, fabricate(recipe, 0, 0))
    assert client.wait_round(1) == 1


def test_nothing_is_kept_of_the_names_that_the_health_service_is_asked_for(start_process):
    hub = start_process(raw_recipe())
    with grpc.insecure_channel(hub.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def ask(method, n):
            return method(health_pb2.HealthCheckRequest(service=f"{n}-".ljust((4 << 20) - 20, "x")), timeout=30)

        def code(method, n):
            with pytest.raises(grpc.RpcError) as refused:
                list(ask(stub.Watch, n)) if method is stub.Watch else ask(method, n)
            return refused.value.code()

        assert code(stub.Check, 0) == grpc.StatusCode.NOT_FOUND
        before = hub.peak_rss()
        assert {code(stub.Watch, n) for n in range(40)} <= {
            grpc.StatusCode.UNIMPLEMENTED,
            grpc.StatusCode.UNAUTHENTICATED,
        }
        assert {code(stub.Check, n) for n in range(40)} == {grpc.StatusCode.NOT_FOUND}
        assert hub.peak_rss() - before < 60e6  # all names together are 320 MB


def test_a_moment_without_threads_loses_no_call(monkeypatch):
    threads = Threads(2, "x")
    done = threading.Event()

    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    threads._idle_semaphore.acquire()  # as if the one that is there were busy
    threads.submit(done.set)
    assert done.wait(20)
    threads.shutdown()
    with pytest.raises(RuntimeError):
        threads.submit(done.set)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -math.inf, -1.0])
def test_who_would_wait_for_no_number_of_seconds_is_refused(start_hub, connect, timeout_s):
    client = connect(start_hub(make_recipe()), 0)
    client.join()
    with pytest.raises(grpc.RpcError, match="a number of seconds") as refused:
        client._channel._stub.WaitRound(pb.WaitRequest(caller=client._caller, round=1, timeout_s=timeout_s), timeout=10)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_numbers_out_of_all_bounds_are_refused_and_kept_nowhere(start_hub, connect):
    client = connect(start_hub(make_recipe()), 0)
    client.join()
    stub, caller, most = client._channel._stub, client._caller, 2**64 - 1
    openings = [
        pb.PushOpening(caller=caller, round=0, total_bytes=most, payload="x"),
        pb.PushOpening(caller=caller, round=0, total_bytes=20_000, payload="x", offset=most),
        pb.PushOpening(caller=caller, round=2**32 - 1, total_bytes=20_000, payload="x"),
    ]
    for opening in openings:
        with pytest.raises(grpc.RpcError):
            stub.Push(iter([opening.SerializeToString()]), timeout=20)
    request = pb.PullRequest(caller=caller, have_round=2**32 - 1, part="0-x", part_bytes=most)
    assert sum(map(len, stub.Pull(request, timeout=20))) > 10_000
    assert stub.WaitRound(pb.WaitRequest(caller=caller, round=2**32 - 1, timeout_s=0.1), timeout=20).round == 0
    assert client.status()["round"] == 0


def test_a_node_cannot_have_pushes_of_another_one_listed(start_hub, keys):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual=False))
    one = access_of(keys / "node-1")
    caller = pb.Caller(protocol=3, node=0, digest=hub.recipe.digest(), session="s")
    opening = pb.PushOpening(caller=caller, round=0, total_bytes=1, payload="x").SerializeToString()
    metadata = (("authorization", f"Bearer {one.token}"),)
    with channel_of(hub, one) as channel, pytest.raises(grpc.RpcError, match="the token is that of node-1"):
        channel.stream_unary(TRANSFER + "Push")(iter([opening]), metadata=metadata, timeout=20)
    assert read_status(hub.address, access_of(keys / "watch"), 20)["rejected"] == []


def is_closed(connection):
    connection.setblocking(False)
    try:
        return not connection.recv(4096) or is_closed(connection)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def idle_connections(hub, count, greeting=b""):
    host, _, port = hub.address.rpartition(":")
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for connection in connections:
            connection.sendall(greeting)
        yield connections


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@pytest.mark.parametrize("greeting", [b"", PREFACE], ids=["silent", "greeted"])
def test_idle_connections_take_neither_the_port_nor_the_disk_from_the_hub(start_process, greeting):
    hub = start_process(raw_recipe(), open_files=(100, 200))
    assert resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE) == (200, 200)
    clients = [hub.client(node) for node in (0, 1)]
    for client in clients:
        client.join()
    with idle_connections(hub, 400, greeting) as connections:
        for round_ in range(2):
            for node, client in enumerate(clients):
                push(client, round_, fabricate(hub.recipe, node, round_))
            for client in clients:
                assert client.wait_round(round_ + 1) == round_ + 1
                assert pull(client)[0] == round_ + 1
        late = hub.client(1)  # also who comes only now
        assert late.join().round == 2
        until(lambda: sum(map(is_closed, connections)) >= 400 - STRANGERS_PER_ADDRESS, 30)
        assert hub.open_files() < 100
    for client in (*clients, late):
        client.close()
    assert hub.process.poll() is None


def test_a_stranger_s_connection_is_closed_in_the_end_and_a_node_s_is_not(start_hub, connect, monkeypatch):
    hub = start_hub(make_recipe(), token=TOKEN)
    client = connect(hub, 0, token=TOKEN)
    client.join()
    connections = hub.server._connections
    with idle_connections(hub, 3, PREFACE) as strangers:
        until(lambda: len(connections._open) == 4)
        monkeypatch.setattr(connections_module, "STRANGER_S", 0.0)
        until(lambda: all(map(is_closed, strangers)))
    until(
        lambda: [connections._callers.get(connection.peer) for connection in connections._open.values()] == ["anyone"]
    )
    assert len(connections._callers) == 1  # of those that are gone nothing is kept


@contextmanager
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def accept():
            client = stack.enter_context(socket.create_connection(server.getsockname()[:2]))
            accepted = stack.enter_context(server.accept()[0])
            return client, accepted

        yield server.getsockname()[1], accept


def test_the_oldest_connections_of_a_caller_and_of_an_address_go_first():
    with listener() as (port, accept):
        connections = Connections(num_nodes=1)
        node = [accept() for _ in range(PER_CALLER + 2)]
        for client, _ in node:
            host, port_of_client = client.getsockname()
            connections.belongs(f"ipv4:{host}:{port_of_client}", "node-0")
        strangers = []
        for _ in range(STRANGERS_PER_ADDRESS + 3):
            connections.tend(port)
            strangers.append(accept())
        connections.tend(port)
        closed = [is_closed(client) for client, _ in strangers]
        assert closed == [True] * 3 + [False] * STRANGERS_PER_ADDRESS
        assert sum(is_closed(client) for client, _ in node) == 2


@pytest.mark.parametrize(
    ("peer", "parsed"),
    [
        ("ipv4:192.0.2.1:5000", Peer("192.0.2.1", 5000)),
        ("ipv6:%5B2001:db8::1%5D:5000", Peer("2001:db8::1", 5000)),
        ("ipv6:[::ffff:192.0.2.1]:5000", Peer("192.0.2.1", 5000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", Peer("fe80::1", 5000)),
        ("unix:", None),
    ],
)
def test_peers_as_grpc_writes_them(peer, parsed):
    assert connections_module._parse(peer) == parsed


def test_of_the_files_that_may_be_open_half_is_left_to_the_store():
    assert most_connections(2, 1 << 16) == PER_CALLER * 3 + 256
    assert most_connections(4096, 1024) == 512


def test_a_hub_without_descriptors_waits_until_it_has_some(start_process):
    """The limit of the running process is lowered below what it has open, so that nothing more can be opened."""
    hub = start_process(raw_recipe(num_nodes=2, min_nodes=1, rpc_deadline_s=5, round_deadline_s=5))
    clients = [hub.client(node) for node in (0, 1)]
    for client in clients:
        client.join()
    most = resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE)
    push(clients[0], 0, fabricate(hub.recipe, 0, 0))
    resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, (3, most[1]))
    hub.read_until("the hub's machine is short of something for now: ")  # the round is to be closed without node 1
    assert "Too many open files" in clients[0].status()["trouble"]
    with pytest.raises(grpc.RpcError) as refused:
        list(clients[1]._channel.open("Pull", pb.PullRequest(caller=clients[1]._caller), 20))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert hub.process.poll() is None
    resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, most)
    assert clients[0].wait_round(1) == 1
    for client in clients:
        assert pull(client)[0] == 1
        client.close()
    hub.kill()
    assert hub.output.count("for now: ") == hub.output.count("what was short has come back") == 1
