"""Directories of keys, as `spes-mega keys` makes them and hub and nodes read them.

    DIR/hub/      ca.pem  hub.pem  hub.key  tokens.json (hashes of tokens only)
    DIR/node-0/   ca.pem  node.pem  node.key  token
    DIR/watch/    ca.pem  node.pem  node.key  token     for `spes-mega status` alone
    DIR/ca/       ca.pem  ca.key                        signs further keys; may be kept offline

A directory with ca.pem alone is enough for a caller that has a shared token.
"""

import datetime
import hashlib
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spes_mega.errors import AccessError, system_errors

CA, TOKEN, TOKENS = "ca.pem", "token", "tokens.json"
WATCH = "watch"
"""The caller that may ask for the status and nothing else."""
_CALLER = re.compile(r"node-\d{1,6}|" + WATCH)
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class CallerTls:
    """Whom a caller trusts, and its own certificate and key (PEM) if it has them."""

    ca: bytes
    certificate: bytes | None = None
    key: bytes | None = None
    directory: Path = Path()


@dataclass(frozen=True)
class HubKeys:
    """The hub's certificate and key, whom it trusts (PEM), and the callers by the SHA-256 of their tokens."""

    ca: bytes
    certificate: bytes
    key: bytes
    callers: Mapping[bytes, str]


def node_name(node: int) -> str:
    """What a node is called in its certificate and in the list of tokens."""
    return f"node-{node}"


def token_hash(token: str) -> bytes:
    """SHA-256. Tokens are 256 random bits, so that there is nothing to be guessed from it."""
    return hashlib.sha256(token.encode()).digest()


def secrets_of(directory: Path) -> list[Path]:
    """Files of a directory of keys, be they there or not, that nobody else may read."""
    return [directory / name for name in (TOKEN, "hub.key", "node.key", "ca.key")]


@system_errors(AccessError)
def read_hub(directory: Path) -> HubKeys:
    """Raises AccessError naming the file that is missing, damaged or expired."""
    certificate, key = _read_pair(directory, "hub")
    return HubKeys(_read_ca(directory), certificate, key, read_callers(directory / TOKENS))


@system_errors(AccessError)
def read_caller(directory: Path) -> tuple[str | None, CallerTls]:
    """A caller's token (None if the directory has none) and its side of TLS.

    Raises:
        AccessError: a file is missing, damaged or expired; it is named.
    """
    ca = _read_ca(directory)
    token_file = directory / TOKEN
    token = _read(directory, TOKEN).decode(errors="replace").strip() if token_file.exists() else None
    if token is not None and not re.fullmatch(r"[\x21-\x7e]+", token):
        raise AccessError(f"{token_file}: a token is one word of printable ASCII characters")
    if not (directory / "node.pem").exists():
        return token, CallerTls(ca, directory=directory)
    return token, CallerTls(ca, *_read_pair(directory, "node"), directory=directory)


def _read(directory: Path, name: str) -> bytes:
    path = directory / name
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would be waited for
        raise AccessError(f"{path}: not a file")
    try:
        return path.read_bytes()
    except FileNotFoundError as e:
        raise AccessError(
            f"{path}: no such file; --keys takes one of the directories that `spes-mega keys new` makes: DIR/hub for "
            "the hub, DIR/node-K for node K"
        ) from e
    except OSError as e:
        raise AccessError(f"{path}: cannot be read: {e.strerror or e}") from e


def _read_ca(directory: Path) -> bytes:
    ca = _read(directory, CA)
    try:
        if not ca.strip():  # which would stand for the authorities that the system trusts
            raise ValueError("it is empty")
        ssl.create_default_context(cadata=ca.decode("ascii"))
    except (ValueError, OSError) as e:
        raise AccessError(f"{directory / CA}: not a certificate in PEM: {e}") from e
    return ca


def _read_pair(directory: Path, stem: str) -> tuple[bytes, bytes]:
    """A certificate and its key, which belong together and have not expired."""
    from cryptography import x509  # only callers with keys need it

    pem, key = _read(directory, f"{stem}.pem"), _read(directory, f"{stem}.key")
    path = directory / f"{stem}.pem"
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        ssl.create_default_context().load_cert_chain(path, directory / f"{stem}.key")
    except (ValueError, OSError) as e:
        raise AccessError(f"{path}: not a certificate in PEM that {stem}.key belongs to: {e}") from e
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise AccessError(
            f"{path}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}: `spes-mega keys {stem}` makes a new one"
        )
    return pem, key


def read_callers(path: Path) -> dict[bytes, str]:
    """The hub's list of tokens. Raises AccessError if it is missing or damaged."""
    try:
        raw = json.loads(_read(path.parent, path.name))
        callers = {bytes.fromhex(_checked(_HASH, text)): _checked(_CALLER, name) for name, text in raw.items()}
    except (ValueError, AttributeError, RecursionError) as e:
        raise AccessError(f"{path}: expected names of callers with the SHA-256 of their tokens: {e}") from e
    if len(callers) < len(raw):
        raise AccessError(f"{path}: two callers have the same token")
    return callers


def _checked(pattern: re.Pattern[str], text: object) -> str:
    if not (isinstance(text, str) and pattern.fullmatch(text)):
        raise ValueError(f"{text!r} does not look like {pattern.pattern}")
    return text
