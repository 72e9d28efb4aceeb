"""Connections by which the ranks of a node on several machines learn at once that one of them is gone.

gloo and NCCL notice a lost peer only inside a collective, some of them after half an hour, and neither can name it.
Each rank but the first keeps one TCP connection to rank 0, over which it says goodbye, or that it was asked to stop. A
connection that ends without a goodbye is that of a lost rank: the kernel closes those of a process that died, and its
keepalive probes end those to a machine that cannot be reached any more.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import click

from spes_mega.errors import DeadlineError, SpesError
from spes_mega.node.distributed.place import Place
from spes_mega.node.launch.reports import tell
from spes_mega.node.stop import Stopped, StopRequest

UNREACHABLE_S = 30
"""How long a machine may not be reachable before it counts as lost."""
_GRACE_S = 15.0
_LATER_S = 5.0
_CONNECT_S = 60.0
_MAX_LINE = 4096


class LostRank(BaseException):
    """Another rank of the node is gone. Not an Exception: what is done about errors needs all ranks."""


class LostRankError(DeadlineError):
    """Another rank of the node is gone or cannot be reached; each machine reports it for itself."""


class Lifelines:
    """This rank's connections: of rank 0 to all others, of the others to rank 0."""

    def __init__(self, place: Place, hosts: Sequence[str], peers: dict[int, socket.socket], stop: StopRequest) -> None:
        """`hosts`: the machine of each rank. `peers`: the connection to each rank that this one watches."""
        self._place, self._hosts, self._stop = place, hosts, stop
        self._peers = peers
        self._buffers = dict.fromkeys(peers, b"")
        self._closed = False
        self._lost: str | None = None
        self._known = threading.Event()
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()
        for rank, connection in peers.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        # Python calls handlers of signals only once a collective is over, which may wait for rank 0 for hours.
        self._signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)
        self._selector.register(self._signals, selectors.EVENT_READ, None)
        threading.Thread(target=self._watch, name="lifelines", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye, if this rank ends in the way that all ranks do: its end is no loss to them then.

        Raises LostRankError instead of what gloo or NCCL make of the loss of another rank.
        """
        orderly = error is None or isinstance(error, (SpesError, Stopped))
        if not orderly:
            self._known.wait(_LATER_S)  # a connection may be found to have ended a little later than the collective
        self._closed = True
        os.close(signal.set_wakeup_fd(-1))
        if self._lost is not None and not orderly:
            raise LostRankError(self._lost) from None
        for rank in self._peers if orderly else ():
            self._send(rank, {"bye": True})
        self._ended.set()

    def _watch(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=0.5):
                if key.data is None:
                    self._signalled(self._signals.recv(64))
                else:
                    self._read(key.data)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if self._place.rank and self._lost is None and number in (signal.SIGINT, signal.SIGTERM):
                self._send(0, {"stop": number})

    def _read(self, rank: int) -> None:
        try:
            data = self._peers[rank].recv(_MAX_LINE)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._peers[rank])
            if not self._closed:
                self._lose(rank)
            return
        *lines, self._buffers[rank] = (self._buffers[rank] + data).split(b"\n")
        for line in lines:
            self._received(rank, json.loads(line))

    def _received(self, rank: int, message: dict[str, Any]) -> None:
        if "bye" in message:
            self._selector.unregister(self._peers[rank])
        elif "lost" in message:
            self._give_up(message["lost"])
        elif "stop" in message and self._stop.signum is None:
            os.kill(os.getpid(), message["stop"])  # rank 0 may be waiting for the hub, and only it can end that

    def _lose(self, rank: int) -> None:
        text = (
            f"lost rank {rank} on {self._hosts[rank]}: its process or its machine ended, or cannot be reached any "
            "more; the node goes on from its last checkpoint when it is started again on all machines"
        )
        if self._place.rank == 0:
            for other in self._peers:
                if other != rank:
                    self._send(other, {"lost": text})
        self._give_up(text)

    def _give_up(self, text: str) -> None:
        """Let the main thread end with the loss; if it hangs in a collective, end the process for it."""
        if self._lost is not None:
            return
        self._lost = text
        self._known.set()
        self._stop.abort(LostRank(text))
        threading.Thread(target=self._end, args=(text,), daemon=True).start()

    def _end(self, text: str) -> None:
        if not self._ended.wait(_GRACE_S):
            if reports := self._place.local_rank == 0:
                click.echo(f"error: {text}", err=True)
            tell(code=DeadlineError.exit_code, message=text, shown=reports)
            os._exit(DeadlineError.exit_code)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it is gone, and that shows when it is read
            self._peers[rank].sendall(json.dumps(message).encode() + b"\n")


def connect(place: Place, hosts: Sequence[str], stop: StopRequest, ranks: Any) -> Lifelines:
    """The lifelines of this rank; all of the node's `ranks` take part.

    Raises DeadlineError, on all ranks, naming both ends: two of them cannot reach each other.
    """
    listener: socket.socket | None = None

    def listen() -> tuple[int, str]:
        nonlocal listener
        listener = socket.create_server(("", 0), family=_family(place.master_addr), backlog=place.size)
        return listener.getsockname()[1], secrets.token_hex(16)

    port, nonce = ranks.first(listen)

    def meet() -> dict[int, socket.socket]:
        if listener is None:
            return {0: _call(place, hosts, port, nonce)}
        with listener:
            return _accept(listener, place, hosts, nonce)

    peers = ranks.agree(meet)
    for connection in peers.values():
        _probe(connection)
    return Lifelines(place, hosts, peers, stop)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _call(place: Place, hosts: Sequence[str], port: int, nonce: str) -> socket.socket:
    try:
        connection = socket.create_connection((place.master_addr, port), timeout=_CONNECT_S)
        connection.sendall(json.dumps({"rank": place.rank, "nonce": nonce}).encode() + b"\n")
    except OSError as e:
        raise DeadlineError(
            f"{place.text} cannot reach rank 0 on {hosts[0]}, at {place.master_addr}:{port}: {e}; ranks of a node "
            "connect to each other on any port above 1023"
        ) from e
    return connection


def _accept(listener: socket.socket, place: Place, hosts: Sequence[str], nonce: str) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    end = time.monotonic() + _CONNECT_S
    while len(peers) < place.size - 1:
        try:
            listener.settimeout(max(0.1, end - time.monotonic()))
            connection, _ = listener.accept()
        except TimeoutError:
            missing = next(rank for rank in range(1, place.size) if rank not in peers)
            raise DeadlineError(
                f"{place.text}: rank {missing} on {hosts[missing]} did not connect to {place.master_addr}:"
                f"{listener.getsockname()[1]} within {_CONNECT_S:g} s; ranks of a node connect to each other on any "
                "port above 1023"
            ) from None
        if (rank := _introduction(connection, nonce, place.size)) is None or rank in peers:
            connection.close()
        else:
            peers[rank] = connection
    return peers


def _introduction(connection: socket.socket, nonce: str, size: int) -> int | None:
    """The rank of who has connected; None if it is not one of this node's."""
    connection.settimeout(5)
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < 256:
            if not (more := connection.recv(256)):
                return None
            data += more
        said = json.loads(data)
        ours = secrets.compare_digest(str(said["nonce"]), nonce)
        return said["rank"] if ours and said["rank"] in range(1, size) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _probe(connection: socket.socket) -> None:
    """Let the kernel find out whether the other machine can still be reached."""
    connection.settimeout(UNREACHABLE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREACHABLE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNREACHABLE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREACHABLE_S)
