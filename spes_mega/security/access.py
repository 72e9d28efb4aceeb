"""What a caller shows the hub, and what either side refuses to do over a line that others can read.

Imports neither torch nor gRPC: `spes-mega status` and `spes-mega launch` answer at once.
"""

import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from spes_mega.errors import AccessError, system_errors
from spes_mega.files.text import read_text
from spes_mega.security.keys import CallerTls, read_caller, secrets_of
from spes_mega.wire.address import host_port

TOKEN_VARIABLE = "SPES_MEGA_TOKEN"
MAX_TOKEN_BYTES = 1 << 20


@dataclass(frozen=True)
class Access:
    """What a caller shows: its token, and with TLS whom it trusts and who it is."""

    token: str | None = None
    tls: CallerTls | None = None


OPEN = Access()
"""Nothing to show: a hub on loopback without a token."""


def read_access(address: str, keys: Path | None, token_file: Path | None, insecure: bool) -> Access:
    """What to show the hub at `address`: the keys in the directory `keys`, and the token there, or a shared one.

    Raises:
        AccessError: `address`, keys or token cannot be used; or the hub is on another machine, there are no keys,
            and the caller did not say `insecure`.
    """
    host, _ = host_port(address, "--hub")
    token = read_token(token_file) if token_file or keys is None else None
    if keys is not None:
        kept, tls = read_caller(keys)
        return Access(token or kept or read_token(None), tls)
    if not (insecure or _is_loopback(host)):
        raise AccessError(
            f"--hub {address} is another machine, and without --keys everyone on the way can read and change what is "
            "sent: give --keys DIR (`spes-mega keys new` makes one for each node), or say --insecure if a VPN or a "
            "tunnel protects the line"
        )
    return Access(token)


def read_token(token_file: Path | None) -> str | None:
    """The token in `token_file`, or else in the environment variable SPES_MEGA_TOKEN; None without either.

    Raises:
        AccessError: the file cannot be read, or the token is empty or not plain printable ASCII.
    """
    if token_file is None:
        token, source = os.environ.get(TOKEN_VARIABLE), f"environment variable {TOKEN_VARIABLE}"
        if token is None:
            return None
    else:
        source = str(token_file)
        token = read_text(token_file, AccessError, "token", MAX_TOKEN_BYTES)
    token = token.strip()
    if not (token and token.isascii() and token.isprintable()) or " " in token:
        raise AccessError(f"{source}: a token is one word of printable ASCII characters")
    return token


@system_errors(AccessError)
def exposed(keys: Path | None, token_file: Path | None) -> list[str]:
    """Warnings of secrets in files that others on this machine can read or write."""
    files = [*(secrets_of(keys) if keys is not None else ()), *([token_file] if token_file is not None else ())]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in files if path.is_file()}
    return [
        f"warning: {path} is open to others on this machine (mode {mode:04o}): chmod 600 {path}"
        for path, mode in modes.items()
        if mode & 0o077
    ]


def check_listen(address: str, *, token: bool, encrypted: bool, insecure: bool = False) -> None:
    """Raises AccessError if other machines can reach `address`, and there is no token, or nobody said `insecure`
    where the line is not encrypted."""
    if _is_loopback(host_port(address, "--listen", 0)[0]):
        return
    open_to = f"--listen {address} can be reached by other machines"
    if not token:
        raise AccessError(f"{open_to}, so a token is needed: give --keys or --token-file, or set {TOKEN_VARIABLE}")
    if not (encrypted or insecure):
        raise AccessError(
            f"{open_to}, and the line would not be encrypted: give --keys DIR (`spes-mega keys new` makes it), or say "
            "--insecure if a VPN or tunnels protect it"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
