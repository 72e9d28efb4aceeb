"""`spes-mega keys`: certificates and tokens of a run, one directory for the hub and one for each node."""

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from spes_mega.errors import AccessError, system_errors
from spes_mega.security.authority import Authority, Pair
from spes_mega.security.keys import CA, TOKEN, TOKENS, WATCH, node_name, read_callers, token_hash
from spes_mega.wire.address import is_host

DIRECTORY = click.Path(file_okay=False, path_type=Path)
DAYS = click.option(
    "--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long certificates are valid."
)
HOSTS = click.option(
    "--host", "hosts", multiple=True, required=True, metavar="HOST[,HOST…]",
    help="Names or addresses by which nodes call the hub; loopback is always among them.",
)  # fmt: skip


@click.group("keys")
def command() -> None:
    """Make the keys of a run: TLS certificates, and a token for each node."""


@command.command("new")
@click.option("--nodes", type=click.IntRange(1, 10_000), required=True, help="How many nodes (spes.num_nodes).")
@HOSTS
@DAYS
@click.option("--out", type=DIRECTORY, required=True, help="A new directory for all of them.")
@system_errors(AccessError)
def new(nodes: int, hosts: tuple[str, ...], days: int, out: Path) -> None:
    """Make a certificate authority for the run, and keys for the hub and all nodes.

    OUT/hub is for the hub, OUT/node-K for node K alone, OUT/watch for `spes-mega status`. OUT/ca signs further keys;
    keep it offline.
    """
    names = _hosts(hosts)
    write_keys(out, nodes, names, days)
    last = f" … {out}/node-{nodes - 1}" if nodes > 1 else ""
    click.echo(f"{out}/hub: for the hub (--keys), whose names are {', '.join(names)}")
    click.echo(f"{out}/node-0{last}: one for each node (--keys), and for nobody else")
    click.echo(f"{out}/{WATCH}: for `spes-mega status --keys`")
    click.echo(f"{out}/ca: signs further keys; take it off this machine if you can, the run does not need it")


def write_keys(out: Path, nodes: int, hosts: Collection[str], days: int) -> None:
    """Write all keys of a run to a new directory. Raises AccessError if it is there already."""
    if out.exists():
        raise AccessError(f"{out}: is there already, and keys are never overwritten: choose another --out")
    authority = Authority.new()
    with _new_directory(out) as partial:
        for part in ("ca", "hub"):
            _make_directory(partial / part)
        _write_pair(partial / "ca", "ca", authority.pair)
        _write_pair(partial / "hub", "hub", authority.sign_hub(hosts, days))
        _write(partial / "hub" / CA, authority.pair.certificate)
        callers = [*map(node_name, range(nodes)), WATCH]
        hashes = {name: _write_caller(partial / name, name, authority, days) for name in callers}
        _write(partial / "hub" / TOKENS, _tokens_text(hashes))


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory to fill that gets the name `out` at the end: complete, or not there at all."""
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    with system_errors(AccessError, out, "cannot be written"):
        try:
            _make_directory(partial)
            yield partial
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@command.command("node")
@click.argument("directory", type=DIRECTORY)
@click.argument("name", metavar="K|watch")
@click.option("--replace", is_flag=True, help="In place of keys that have expired, or that others may have seen.")
@DAYS
@system_errors(AccessError)
def node(directory: Path, name: str, replace: bool, days: int) -> None:
    """Make keys for one more node, number K, in DIRECTORY, which `spes-mega keys new` made.

    Then give DIRECTORY/hub to the hub again and restart it; a token that was replaced is refused from then on.
    """
    name = name if name == WATCH else node_name(_number(name))
    target, hub = directory / name, directory / "hub"
    if target.exists() and not replace:
        raise AccessError(f"{target}: is there already; --replace makes new keys in its place")
    authority = Authority.read(directory / "ca")
    hashes = {caller: digest.hex() for digest, caller in read_callers(hub / TOKENS).items()}
    with _new_directory(target) as partial:
        hashes[name] = _fill_caller(partial, name, authority, days)
        # The hub's list comes first: keys that are there are in it.
        _replace(hub / TOKENS, _tokens_text(hashes))
        if target.exists():
            target.rename(target.with_name(f"{name}.old-{secrets.token_hex(4)}"))
    click.echo(f"{target}: for {name}; give {hub} to the hub again, and restart it")


@command.command("hub")
@click.argument("directory", type=DIRECTORY)
@HOSTS
@DAYS
@system_errors(AccessError)
def hub(directory: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make a new certificate for the hub, for other names or because the old one expires. Tokens stay as they are."""
    names = _hosts(hosts)
    pair = Authority.read(directory / "ca").sign_hub(names, days)
    _replace(directory / "hub" / "hub.key", pair.key)
    _replace(directory / "hub" / "hub.pem", pair.certificate)
    click.echo(
        f"{directory}/hub: for a hub that is called {', '.join(names)}; give it to the hub again, and restart it"
    )


def _hosts(given: tuple[str, ...]) -> list[str]:
    hosts = [host.strip().strip("[]").lower() for text in given for host in text.split(",")]
    for host in hosts:
        if not is_host(host):
            raise AccessError(f"--host {host!r}: expected a name or an address, without a port")
    return list(dict.fromkeys(hosts))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 6):
        raise click.UsageError(f"{text!r}: expected the number of a node, or {WATCH}")
    return int(text)


def _write_caller(directory: Path, name: str, authority: Authority, days: int) -> str:
    """Keys of one caller; returns the hash of its token, in hex."""
    _make_directory(directory)
    return _fill_caller(directory, name, authority, days)


def _fill_caller(directory: Path, name: str, authority: Authority, days: int) -> str:
    token = secrets.token_hex(32)
    _write_pair(directory, "node", authority.sign_caller(name, days))
    _write(directory / CA, authority.pair.certificate)
    _write(directory / TOKEN, f"{token}\n".encode())
    return token_hash(token).hex()


def _tokens_text(hashes: dict[str, str]) -> bytes:
    return json.dumps(hashes, indent=1).encode() + b"\n"


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True)


def _write_pair(directory: Path, stem: str, pair: Pair) -> None:
    _write(directory / f"{stem}.pem", pair.certificate)
    _write(directory / f"{stem}.key", pair.key)


def _write(path: Path, content: bytes) -> None:
    """A file that only its owner may read, and that was not there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    with system_errors(AccessError, path, "cannot be written"):
        try:
            _write(partial, content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
