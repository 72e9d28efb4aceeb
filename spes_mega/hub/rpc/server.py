"""The hub's port and its life: serve, close one round after the other, say good-bye."""

import threading
import time
from contextlib import suppress

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from spes_mega.errors import AccessError, SpesError, StoreError
from spes_mega.hub.console import Console
from spes_mega.hub.rounds.members import Presence
from spes_mega.hub.rounds.shutdown import Stopped
from spes_mega.hub.rpc.admission import Admission
from spes_mega.hub.rpc.auth import Guard
from spes_mega.hub.rpc.connections import Connections, most_connections, raise_open_files
from spes_mega.hub.rpc.health import SERVICE, Health
from spes_mega.hub.rpc.limits import Lanes
from spes_mega.hub.rpc.service import HubService
from spes_mega.hub.run import Run
from spes_mega.hub.systemd import notify
from spes_mega.recipe import Recipe
from spes_mega.wire.address import check_free, own_addresses
from spes_mega.wire.errors import passing
from spes_mega.wire.proto.hub_pb2_grpc import add_HubServicer_to_server
from spes_mega.wire.streams import add_transfers

FAREWELL_S = 2.0
"""How long a failed hub goes on answering, so that its nodes learn why."""
LINGER_S = 30.0
"""How long a hub whose run is finished goes on for nodes that it does not know to be there: stragglers whose push for
the last round is late, and, if it was started on a finished run, anybody who wants the last state."""
WATCH_S = 0.5
TEND_S = 0.5
RUSH_S = 0.05
"""Between looks at calls and connections, and while connections have to be shut down."""
LONGER_S = 60.0
"""Than spes.rpc_deadline_s, after which its caller gives it up, no call lasts."""
SERVER_OPTIONS = (
    # What a peer can make the hub hold in memory before anything of it is checked.
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # a second hub on the same port is an error, not a coin toss
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.bdp_probe", 0),  # it would let what each upload has on its way in grow to 16 MiB
)
ARRIVING_BYTES = 4 << 20
"""What all uploads together may have on their way in beside one chunk each: about bandwidth times delay."""


class HubServer:
    """Takes a port, and serves a run there until it is finished, fails, or is stopped."""

    _run: Run

    def __init__(self, recipe: Recipe, listen: str, guard: Guard, console: Console) -> None:
        """Raises AccessError: the address is not free."""
        self._guard = guard
        self._console = console
        self._ended = threading.Event()
        nodes = recipe.spes.num_nodes
        self._lanes, self._connections = Lanes(recipe.spes.rpc_deadline_s + LONGER_S), Connections(nodes)
        admission = Admission(guard, nodes, self._lanes, self._connections)
        self._server = grpc.server(
            admission.threads,
            interceptors=[admission],
            options=(
                *SERVER_OPTIONS,
                ("grpc.http2.lookahead_bytes", _window_bytes(nodes)),
                ("grpc.max_allowed_incoming_connections", most_connections(nodes, raise_open_files())),
            ),
        )
        self._health = Health()
        add_HealthServicer_to_server(self._health, self._server)
        self.address = self._bind(listen)

    def _bind(self, listen: str) -> str:
        try:
            credentials = self._guard.credentials()
            host, _, port = listen.rpartition(":")
            for own in own_addresses(listen):  # gRPC is content with one of those that a name has
                address = f"{own.rpartition(':')[0]}:{port}"
                check_free(address)
                port = str(
                    self._server.add_insecure_port(address)
                    if credentials is None
                    else self._server.add_secure_port(address, credentials)
                )
        except (RuntimeError, OSError) as e:
            raise AccessError(f"--listen {listen}: cannot listen there: is the port in use? ({address})") from e
        return f"{host}:{port}"

    def serve(self, run: Run) -> bool:
        """Close rounds until the run is finished (True) or `stop` is called (False).

        Raises:
            SpesError: why the run cannot go on; nodes are told before this returns.
        """
        self._run = run
        service = HubService(run, self._guard)
        add_HubServicer_to_server(service, self._server)
        add_transfers(service, self._server)
        self._server.start()
        self._health.set(True, "", SERVICE)
        for task in (self._watch, self._tend):
            threading.Thread(target=task, daemon=True).start()
        self._console.say("listening", f"hub listening on {self.address}", address=self.address)
        notify("READY=1", f"STATUS=listening on {self.address}")
        try:
            self._close_rounds()
            return not self._run.state.rounds.shutdown.stopping
        except Stopped:
            return False
        except OSError as e:
            raise self._farewell(passing(e) or StoreError(f"the state directory cannot be used: {e}")) from e
        except SpesError as e:
            raise self._farewell(passing(e) or e) from e
        finally:
            self._end()

    def _close_rounds(self) -> None:
        state, rounds, spes = self._run.state, self._run.state.rounds, self._run.state.recipe.spes
        shutdown = rounds.shutdown
        stragglers = {Presence.MISSED}
        if state.finished:
            stragglers = set(Presence)
            text = f"all {state.recipe.num_rounds} rounds are closed; serving the last state for {LINGER_S:g} s"
            self._console.say("finished", text, round=rounds.round)
        while not state.finished:
            if shutdown.draining:
                self._hand_over()
                return
            try:
                self._run.close_round()
            except Stopped:
                if shutdown.draining and not shutdown.stopping:  # there was nobody whose round could be finished
                    self._run.keep_newest()
                raise
        rounds.wait_while(stragglers, LINGER_S)  # one that is heard of becomes one of those that take part
        if staying := rounds.wait_while({Presence.JOINED}, spes.rpc_deadline_s):
            text = f"nodes {staying} did not take their leave within {spes.rpc_deadline_s:g} s"
            self._console.say("staying", text, nodes=staying)

    def _hand_over(self) -> None:
        """Let nodes fetch the newest state, so that they train while the next hub is started.

        A snapshot of it stays, from which another run can start.
        """
        rounds, limit = self._run.state.rounds, self._run.state.recipe.spes.rpc_deadline_s
        self._run.keep_newest()
        if lacking := rounds.wait_served(limit):
            text = (
                f"nodes {lacking} did not fetch round {rounds.round} within {limit:g} s; the next hub has it for them"
            )
            self._console.say("lacking", text, nodes=lacking)
        rounds.shutdown.stop()

    def _watch(self) -> None:
        """Look for a request to drain, and tell who asks for the hub's health."""
        rounds = self._run.state.rounds
        while not (rounds.shutdown.draining or self._ended.wait(WATCH_S)):
            if self._run.state.store.drain_requested():
                rounds.shutdown.drain()
        if rounds.shutdown.draining:
            self._health.set(False, SERVICE)
            text = f"draining: the hub ends when round {rounds.round + 1} is closed and nodes have fetched it"
            self._console.say("draining", text, round=rounds.round)
            notify("STOPPING=1", f"STATUS={text}")
        while not self._ended.wait(WATCH_S):
            self._run.state.store.answer_drain()

    def _tend(self) -> None:
        """End calls that take too long, and shut down connections that are too many."""
        port, shut = int(self.address.rpartition(":")[2]), 0
        while not self._ended.wait(RUSH_S if shut else TEND_S):
            self._lanes.end_overdue()
            with suppress(OSError):
                shut = self._connections.tend(port)

    def _farewell(self, error: SpesError) -> SpesError:
        self._run.state.rounds.fail(error)
        time.sleep(FAREWELL_S)
        return error

    def _end(self) -> None:
        self._ended.set()
        notify("STOPPING=1")
        self._run.state.rounds.shutdown.stop()
        self._run.state.rounds.wake()
        self._health.set(False, "", SERVICE)
        self._server.stop(grace=1.0).wait()
        self._run.close()


def _window_bytes(num_nodes: int) -> int:
    """Of one upload, so that memory hardly depends on the number of nodes."""
    return max(128 << 10, min(2 << 20, ARRIVING_BYTES // num_nodes))
