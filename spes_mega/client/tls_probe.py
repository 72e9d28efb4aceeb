"""Why a line to the hub does not come about.

gRPC says of a failed TLS handshake no more than that the hub is unavailable, which a hub that is being started again is
too. Here the handshake is tried by hand: what waiting cannot mend is named.
"""

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from spes_mega.errors import HubRefusedError
from spes_mega.security.keys import CallerTls

Connect = Callable[[], socket.socket]
PROBE_S = 5.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Of a client of HTTP/2, with empty settings (RFC 9113, 3.4)."""


def check_handshake(address: str, tls: CallerTls | None) -> None:
    """Raises HubRefusedError if the two sides will never agree; returns if the hub is down, or nothing is wrong."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")

    def connect() -> socket.socket:
        return socket.create_connection((host, int(port)), PROBE_S)

    with suppress(OSError):
        if tls is None:
            _check_plaintext(connect, address)
        # A hub that is going down may hang up after the handshake too, but not twice.
        elif not _greets(connect, host, address, tls) and not _greets(connect, host, address, tls):
            raise HubRefusedError(f"hub at {address}: {_of_our_certificate(tls)}")


def _check_plaintext(connect: Connect, address: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: it is only seen whether TLS is spoken
    context.set_alpn_protocols(["h2"])
    with connect() as line, context.wrap_socket(line):
        pass
    raise HubRefusedError(f"hub at {address}: it speaks TLS: give --keys DIR")


def _greets(connect: Connect, host: str, address: str, tls: CallerTls) -> bool:
    """Whether the hub says anything after the handshake; if it does not accept our certificate, it hangs up then."""
    try:
        with connect() as line, _context(tls).wrap_socket(line, server_hostname=host) as secured:
            return bool(secured.recv(1))
    except ssl.SSLCertVerificationError as e:
        raise HubRefusedError(f"hub at {address}: {_of_its_certificate(e, host, tls)}") from e
    except ssl.SSLError as e:
        wrong = e.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
        if wrong and _speaks_http2(connect):  # else it may be the error page of a proxy, while the hub is away
            raise HubRefusedError(f"hub at {address}: it does not speak TLS: start it with --keys DIR/hub") from e
        raise


def _speaks_http2(connect: Connect) -> bool:
    """Whether a server without TLS answers in HTTP/2, as a hub does: its first frame has the settings."""
    with connect() as line:
        line.sendall(_PREFACE)
        return line.recv(9)[3:4] == b"\x04"


def _context(tls: CallerTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=tls.ca.decode("ascii"))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None:
        context.load_cert_chain(tls.directory / "node.pem", tls.directory / "node.key")
    return context


def _of_its_certificate(error: ssl.SSLCertVerificationError, host: str, tls: CallerTls) -> str:
    said = error.verify_message
    if "expired" in said:
        return "its certificate has expired: `spes-mega keys hub` makes a new one, and the hub has to be started again"
    if "not yet valid" in said:
        return "its certificate is not valid yet: is the clock of this machine right?"
    if "mismatch" in said:
        return f"its certificate is not for {host} ({said}): `spes-mega keys hub --host {host}` makes one that is"
    return (
        f"its certificate is not signed by {tls.directory / 'ca.pem'} ({said}): these keys are of another run, or "
        "this is not the hub"
    )


def _of_our_certificate(tls: CallerTls) -> str:
    if tls.certificate is None:
        return (
            "it hangs up on callers that show no certificate (--mutual-tls): use --keys DIR/node-K, or DIR/watch for "
            "the status, with node.pem and node.key in it"
        )
    return (
        f"it does not accept {tls.directory / 'node.pem'}: the certificate has expired, or is of another run; "
        "`spes-mega keys node` makes a new one"
    )
