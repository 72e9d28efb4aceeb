"""A hub in a thread of this process, reached over real gRPC on loopback."""

import threading

import pytest

from spes_mega.client.client import HubClient
from spes_mega.hub.console import Console
from spes_mega.hub.rpc import server as server_module
from spes_mega.hub.rpc.auth import Guard
from spes_mega.hub.rpc.server import HubServer
from spes_mega.hub.run import Run
from spes_mega.security.access import Access
from tests.hub.process import HubProcess


class RunningHub:
    def __init__(self, recipe, state, *, init=None, token=None, guard=None, listen="127.0.0.1:0"):
        self.recipe = recipe
        self.state = state
        self.server = HubServer(recipe, listen, guard or Guard.of(None, token, False), Console())
        self.run = Run(recipe, state, init, Console())
        self.address = self.server.address
        self.error = None
        self.finished = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        try:
            self.finished = self.server.serve(self.run)
        except Exception as e:
            self.error = e

    def join(self, timeout=30):
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the hub did not end"
        return self

    def stop(self):
        self.run.state.rounds.shutdown.stop()
        return self.join()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(server_module, "FAREWELL_S", 0.5)
    monkeypatch.setattr(server_module, "LINGER_S", 0.5)


@pytest.fixture
def start_hub(tmp_path):
    hubs = []

    def start(recipe, state=None, **options):
        hubs.append(RunningHub(recipe, state or tmp_path / "state", **options))
        return hubs[-1]

    yield start
    for hub in hubs:
        hub.stop()


@pytest.fixture
def connect():
    clients = []

    def connect(hub, node, *, recipe=None, token=None, access=None):
        access = access or Access(token)
        clients.append(HubClient.for_recipe(recipe or hub.recipe, hub.address, node, access=access))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def start_process(tmp_path):
    hubs = []

    def start(raw, *options, folder=tmp_path, **further):
        hubs.append(HubProcess(folder, raw, *options, **further))
        return hubs[-1]

    yield start
    for hub in hubs:
        if hub.process.poll() is None:
            hub.kill()
