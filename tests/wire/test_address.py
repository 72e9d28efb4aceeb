"""Where a hub listens, what answers in its place, and what the commands say before they wait for anything."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest
import yaml

from spes_mega.client.status import read_status
from spes_mega.errors import AccessError, DeadlineError
from spes_mega.hub.console import Console
from spes_mega.hub.rpc.auth import Guard
from spes_mega.hub.rpc.server import HubServer
from spes_mega.node.launch.command import free_port
from spes_mega.security.access import read_access
from spes_mega.wire.address import host_port, own_addresses
from tests.hub.fabricated import make_recipe, raw_recipe
from tests.hub.keyring import make_keys


@pytest.fixture
def two_addresses(monkeypatch):
    """A name that has two addresses of this machine, and one of another."""
    resolve = socket.getaddrinfo

    def resolved(host, *arguments, **options):
        if host != "two.example":
            return resolve(host, *arguments, **options)
        found = ("127.0.0.1", "127.0.0.2", "192.0.2.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return "two.example"


def bind(listen):
    return HubServer(make_recipe(), listen, Guard.of(None, None, False), Console())


def test_a_name_is_listened_to_at_all_its_addresses_or_not_at_all(two_addresses):
    port = free_port()
    with socket.create_server(("127.0.0.2", port)), pytest.raises(AccessError, match=rf"in use\? \(127.0.0.2:{port}\)"):
        bind(f"{two_addresses}:{port}")
    server = bind(f"{two_addresses}:0")
    port = int(server.address.rpartition(":")[2])
    for ip in ("127.0.0.1", "127.0.0.2"):
        with pytest.raises(OSError, match="in use"):
            socket.create_server((ip, port))


def test_localhost_where_another_hub_has_the_loopback_address():
    other = bind("127.0.0.1:0")
    with pytest.raises(AccessError, match="cannot listen there: is the port in use"):
        bind(f"localhost:{other.address.rpartition(':')[2]}")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("taken", ["[::1]:0", "127.0.0.1:0", "127.0.0.2:0"])
def test_all_addresses_where_another_hub_has_one_of_them(taken):
    other = bind(taken)
    with pytest.raises(AccessError, match="cannot listen there: is the port in use"):
        bind(f"[::]:{other.address.rpartition(':')[2]}")


@pytest.mark.parametrize("zone", ["nope", "4711", "lo0/x", "lo%lo"])
@pytest.mark.parametrize("option", ["--hub", "--listen"])
def test_an_interface_that_is_not_there_is_found_out_at_once(option, zone):
    with pytest.raises(AccessError, match=rf"{option} \[fe80::1%{zone}\]:7099: expected HOST:PORT: "):
        host_port(f"[fe80::1%{zone}]:7099", option)
    number, name = socket.if_nameindex()[0]
    assert host_port(f"[fe80::1%{name}]:7099", option) == (f"fe80::1%{name}", 7099)
    assert host_port(f"[fe80::1%{number}]:7099", option) == (f"fe80::1%{number}", 7099)


def test_a_host_that_is_not_this_machine_is_refused():
    with pytest.raises(AccessError, match=r"192\.0\.2\.1 is no address of this machine"):
        own_addresses("192.0.2.1:7070")
    with pytest.raises(AccessError, match="cannot be resolved"):
        own_addresses("nobody.invalid:7070")


ASK = """
import sys
from spes_mega.security.access import OPEN
from spes_mega.client.status import read_status
print(read_status(sys.argv[1], OPEN, 30)["round"])
"""
IN_NAMESPACE = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"']


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="/etc/hosts needs a namespace")
@pytest.mark.parametrize("dead", ["refuses", "is silent", "has gone"])
@pytest.mark.parametrize(("hub", "other"), [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
def test_each_address_of_a_name_is_tried(start_hub, tmp_path, hub, other, dead):
    running = start_hub(make_recipe(), listen=f"{hub}:0")
    port = int(running.address.rpartition(":")[2])
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{other} two.example\n{hub} two.example\n")
    if subprocess.run([*IN_NAMESPACE, hosts, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no mounts")
    with contextlib.ExitStack() as stack:
        if dead != "refuses":
            stack.enter_context(socket.create_server((other, port), backlog=100 if dead == "is silent" else 0))
        for _ in range(4 if dead == "has gone" else 0):  # no room in the backlog: nothing answers
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((other, port))
        command = [*IN_NAMESPACE, hosts, sys.executable, "-c", ASK, f"two.example:{port}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


@contextlib.contextmanager
def answering(answer):
    """A server that gives everybody the same answer, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    line = listener.accept()[0]
                    with line, contextlib.suppress(OSError):
                        line.settimeout(2)
                        line.recv(4096)
                        line.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"localhost:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


PAGES = [b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.0 502 Bad Gateway\r\n\r\n", b"?"]


@pytest.mark.parametrize("page", PAGES, ids=["503", "502", "noise"])
@pytest.mark.parametrize("secure", [True, False], ids=["TLS", "plain"])
def test_the_error_page_of_a_proxy_is_passing(tmp_path, page, secure):
    keys = make_keys(tmp_path / "keys") / "watch" if secure else None
    with answering(page) as address, pytest.raises(DeadlineError, match="no success within 2 s"):
        read_status(address, read_access(address, keys, None, insecure=False), 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("status", "--hub", "http://127.0.0.1:7070"),
            "--hub http://127.0.0.1:7070: expected HOST:PORT: without a scheme",
        ),
        (("hub", "RECIPE", "--state", "STATE", "--listen", "::1:7099"), "an IPv6 address stands in brackets"),
        (("launch", "RECIPE", "--node", "0", "--data", "DATA", "--hub", "::1:7099"), "stands in brackets"),
    ],
    ids=["status", "hub", "launch"],
)
def test_commands_refuse_what_is_no_address_at_once(tmp_path, arguments, said):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw_recipe()))
    for suffix in ("idx", "bin"):
        (tmp_path / f"data.{suffix}").touch()
    paths = {"RECIPE": tmp_path / "recipe.yaml", "STATE": tmp_path / "state", "DATA": tmp_path / "data"}
    command = [sys.executable, "-m", "spes_mega.cli", *(str(paths.get(part, part)) for part in arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 9, ended.stderr
    assert said in ended.stderr
    assert not (tmp_path / "state").exists()


def test_a_hub_refuses_a_variant_of_rope_that_no_node_can_run(tmp_path):
    model = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(raw_recipe(model)))
    command = [sys.executable, "-m", "spes_mega.cli", "hub", tmp_path / "recipe.yaml", "--state", tmp_path / "state"]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "model.rope_scaling: RoPE variant 'yarn'" in ended.stderr
    assert not (tmp_path / "state").exists()
