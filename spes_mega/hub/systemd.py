"""Tells systemd how a service of `Type=notify` is doing: https://www.freedesktop.org/software/systemd/man/sd_notify.html"""

import os
import socket
from contextlib import suppress


def notify(*lines: str) -> None:
    """Send lines such as READY=1; does nothing where no service manager asks for them."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect("\0" + address[1:] if address.startswith("@") else address)
            manager.sendall("\n".join(lines).encode())
