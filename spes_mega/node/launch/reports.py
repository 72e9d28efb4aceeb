"""What the processes of a node's ranks tell `spes-mega launch`: JSON datagrams to a socket that it owns.

The socket has no file: a full disk cannot swallow a report, and a launcher that is killed leaves nothing behind.
"""

import json
import os
import secrets
import socket
import struct
import sys
from types import TracebackType
from typing import Any, Self

ADDRESS_VARIABLE = "SPES_MEGA_REPORTS"
MARK_VARIABLE = "SPES_MEGA_REPORT_MARK"
"""What begins a report on standard output, where `spes-mega launch` is on another machine (`remote`)."""

_MAX_BYTES = 128 * 1024
_MAX_TEXT = 32 * 1024
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid


class Inbox:
    """Where reports arrive. Those of other users of the machine are dropped."""

    def __init__(self) -> None:
        name = f"spes-mega-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(f"\0{name}")
        self.environment = {ADDRESS_VARIABLE: name}
        """For the processes that are to report here."""

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next report; None if none has come in time."""
        self._socket.settimeout(timeout_s)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_MAX_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except (TimeoutError, BlockingIOError):
            return None
        uids = [_CREDENTIALS.unpack(sent)[1] for _, kind, sent in ancillary if kind == socket.SCM_CREDENTIALS]
        report: dict[str, Any] | None = json.loads(data) if uids == [os.getuid()] else None
        return report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def tell(**report: Any) -> bool:
    """Send a report of this rank to `spes-mega launch`; False if there is nobody who would read it.

    Of a long text, such as a traceback, the end is sent.
    """
    cut = {key: value[-_MAX_TEXT:] if isinstance(value, str) else value for key, value in report.items()}
    message = json.dumps({"rank": int(os.environ.get("RANK", "0")), **cut}).encode()
    if (mark := os.environ.get(MARK_VARIABLE)) is not None:
        try:
            os.write(sys.stdout.fileno(), mark.encode() + message + b"\n")
        except OSError:
            return False
        return True
    name = os.environ.get(ADDRESS_VARIABLE)
    if name is None:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(10)
        try:
            sender.sendto(message, f"\0{name}")
        except OSError:
            return False
    return True
