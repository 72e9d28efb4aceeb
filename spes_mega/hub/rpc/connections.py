"""How many connections the hub keeps, of whom.

gRPC bounds their number, but not by peer, and closes none that nobody uses; whoever opens some hundreds would keep the
nodes out, and take the descriptors that the store needs. So the hub looks through its sockets, and shuts down what is
too much: gRPC sees that as the peer hanging up.
"""

import ipaddress
import os
import resource
import socket
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from spes_mega.hub.rpc.auth import ANYONE

STRANGER_S = 30.0
"""How long a connection may last on which no call has shown a token."""
STRANGERS = 64
STRANGERS_PER_ADDRESS = 16
PER_CALLER = 16
"""Connections on which calls have shown the same token."""
_OPEN_FILES = 1 << 16
_OWN_FILES = Path("/dev/fd")  # on Linux a link to /proc/self/fd


def raise_open_files() -> int:
    """Let this process open as many files as it may, up to 65536; returns how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_connections(num_nodes: int, open_files: int) -> int:
    """How many connections gRPC may have at a time: what is needed, and at most half of the files that may be open, so
    that the other half is left to the store."""
    return min(PER_CALLER * (num_nodes + 1) + 4 * STRANGERS, open_files // 2)


class Peer(NamedTuple):
    """The other end of a connection."""

    address: str
    port: int


@dataclass(frozen=True)
class _Connection:
    descriptor: int
    inode: int
    peer: Peer
    since: float


class Connections:
    """The connections to a hub's port. Safe to use from several threads."""

    def __init__(self, num_nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_nodes = num_nodes
        self._clock = clock
        self._open: dict[int, _Connection] = {}
        self._other: dict[int, int] = {}  # inodes of sockets that are no connections to the port
        self._callers: dict[Peer, str] = {}

    def belongs(self, peer: str, caller: str) -> None:
        """A call on the connection from `peer`, as gRPC writes it, has shown the token of `caller`."""
        if (key := _parse(peer)) is not None and self._callers.get(key) != caller:
            self._callers[key] = caller

    def tend(self, port: int) -> int:
        """Shut down what is too much of the connections to `port`; returns how many these were."""
        callers = dict(self._callers)  # one that comes to be known from here on may be younger than the list of sockets
        self._look(port)
        there = {connection.peer for connection in self._open.values()}
        for peer in callers.keys() - there:
            self._callers.pop(peer, None)
        return sum(_shut(connection) for connection in set(self._excess()))

    def _look(self, port: int) -> None:
        now, found, other = self._clock(), dict[int, _Connection](), dict[int, int]()
        for descriptor in [int(path.name) for path in _OWN_FILES.iterdir()]:
            with suppress(OSError):
                status = os.fstat(descriptor)
                inode = status.st_ino
                known = self._open.get(descriptor)
                if known is not None and known.inode == inode:
                    found[descriptor] = known
                elif self._other.get(descriptor) == inode:
                    other[descriptor] = inode
                elif stat.S_ISSOCK(status.st_mode) and (peer := _peer(descriptor, port)) is not None:
                    found[descriptor] = _Connection(descriptor, inode, peer, now)
                else:
                    other[descriptor] = inode
        self._open, self._other = found, other

    def _excess(self) -> Iterator[_Connection]:
        """Those that are too old or too many: of each caller, and of each stranger's address, the oldest; then of the
        address that has the most."""
        strangers, known = defaultdict[object, list[_Connection]](list), defaultdict[str, list[_Connection]](list)
        for connection in sorted(self._open.values(), key=lambda connection: connection.since):
            caller = self._callers.get(connection.peer)
            (strangers[_network(connection.peer.address)] if caller is None else known[caller]).append(connection)
        for caller, connections in known.items():
            yield from _oldest(connections, PER_CALLER * (self._num_nodes if caller == ANYONE else 1))
        now = self._clock()
        for connections in strangers.values():
            yield from (connection for connection in connections if now - connection.since > STRANGER_S)
            yield from _oldest(connections, STRANGERS_PER_ADDRESS)
        yield from _most(strangers.values())


def _oldest(connections: list[_Connection], limit: int) -> list[_Connection]:
    return connections[: max(0, len(connections) - limit)]


def _most(strangers: Iterable[list[_Connection]]) -> Iterator[_Connection]:
    left = [connections[-STRANGERS_PER_ADDRESS:] for connections in strangers]
    for _ in range(sum(map(len, left)) - STRANGERS):
        yield max(left, key=len).pop(0)


def _parse(peer: str) -> Peer | None:
    """Such as ipv4:192.0.2.1:5000 and ipv6:%5B2001:db8::1%5D:5000."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return Peer(_address(host.strip("[]")), int(port)) if port.isdecimal() else None


def _address(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or address)


def _network(address: str) -> object:
    """What one stranger may have all addresses of: of IPv6, the first 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return parsed if parsed.version == 4 else int(parsed) >> 64


def _peer(descriptor: int, port: int) -> Peer | None:
    """Who is at the other end, if this is a connection to the port."""
    own = socket.socket(fileno=descriptor)
    try:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != port:
            return None
        host, its_port = own.getpeername()[:2]
        return Peer(_address(host), its_port)
    except OSError:  # it listens, or has just been closed
        return None
    finally:
        own.detach()  # it is gRPC's


def _shut(connection: _Connection) -> bool:
    with suppress(OSError):
        if os.fstat(connection.descriptor).st_ino == connection.inode:
            own = socket.socket(fileno=connection.descriptor)
            try:
                own.shutdown(socket.SHUT_RDWR)
            finally:
                own.detach()
            return True
    return False
