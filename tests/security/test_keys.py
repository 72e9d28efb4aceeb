"""`spes-mega keys`: what is written, for whom, and what it refuses."""

import datetime
import os
import stat

import pytest
from click.testing import CliRunner
from cryptography import x509

from spes_mega.errors import AccessError
from spes_mega.security.command import command
from spes_mega.security.keys import read_caller, read_hub, token_hash


def keys(*arguments):
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    if isinstance(result.exception, AccessError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def made(tmp_path):
    out = tmp_path / "keys"
    keys("new", "--nodes", 2, "--host", "Hub.example.org,192.0.2.7", "--host", "[2001:db8::1]", "--out", out)
    return out


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path):
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in found]


def test_everybody_gets_a_directory_that_only_its_owner_can_read(made):
    files = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    callers = {f"{name}/{file}" for name in ("node-0", "node-1", "watch") for file in ("node.pem", "node.key", "token")}
    authority = {f"{name}/ca.pem" for name in ("ca", "hub", "node-0", "node-1", "watch")}
    assert files == callers | authority | {"ca/ca.key", "hub/hub.pem", "hub/hub.key", "hub/tokens.json"}
    for path in (made, *made.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_hubs_certificate_is_for_its_names_and_loopback(made):
    assert names(made / "hub/hub.pem") == [
        "hub.example.org", "192.0.2.7", "2001:db8::1", "localhost", "127.0.0.1", "::1",
    ]  # fmt: skip
    lifetime = certificate(made / "hub/hub.pem").not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 364 <= lifetime.days <= 365
    assert certificate(made / "ca/ca.pem").not_valid_after_utc > certificate(made / "hub/hub.pem").not_valid_after_utc


def test_a_certificate_of_a_node_is_signed_by_the_run_and_cannot_stand_for_the_hub(made):
    node, authority = certificate(made / "node-1/node.pem"), certificate(made / "ca/ca.pem")
    node.verify_directly_issued_by(authority)
    usage = node.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not node.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert node.subject.rfc4514_string() == "CN=node-1"


def test_keys_are_never_overwritten(made):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with pytest.raises(AccessError, match="is there already, and keys are never overwritten"):
        keys("new", "--nodes", 2, "--host", "h", "--out", made)
    with pytest.raises(AccessError, match=r"node-1: is there already; --replace makes new keys"):
        keys("node", made, 1)
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("host", ["hub:7070", "", "a b", "hub/", "-x", "a" * 300, "999.1.1.1", "1:2", "fe80::1%lo"])
def test_what_is_no_host_is_refused_and_leaves_nothing(tmp_path, host):
    with pytest.raises(AccessError, match="expected a name or an address, without a port"):
        keys("new", "--nodes", 1, "--host", host, "--out", tmp_path / "keys")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["ca.pem", "hub.pem", "hub.key", "tokens.json"])
@pytest.mark.parametrize("damage", ["empty", "deep", "pipe"])
def test_a_damaged_file_of_the_hub_is_named_at_once(made, name, damage):
    path = made / "hub" / name
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("[" * 100_000 if damage == "deep" else "")
    with pytest.raises(AccessError, match=rf"/hub/(hub\.pem|{name}): "):
        read_hub(made / "hub")


def test_one_more_node_is_added_to_the_hubs_list(made):
    keys("node", made, 2)
    token, tls = read_caller(made / "node-2")
    assert read_hub(made / "hub").callers[token_hash(token)] == "node-2"
    assert set(read_hub(made / "hub").callers.values()) == {"node-0", "node-1", "node-2", "watch"}
    x509.load_pem_x509_certificate(tls.certificate).verify_directly_issued_by(certificate(made / "ca/ca.pem"))


def test_a_token_that_was_replaced_is_no_longer_on_the_list(made):
    old = read_caller(made / "node-1")[0]
    keys("node", made, 1, "--replace")
    callers = read_hub(made / "hub").callers
    assert token_hash(old) not in callers
    assert callers[token_hash(read_caller(made / "node-1")[0])] == "node-1"
    assert len(callers) == 3


def test_the_hub_gets_a_new_certificate_for_other_names(made):
    before = (made / "hub/tokens.json").read_bytes()
    keys("hub", made, "--host", "other.example.org", "--days", 30)
    assert names(made / "hub/hub.pem")[0] == "other.example.org"
    assert (made / "hub/tokens.json").read_bytes() == before
    read_hub(made / "hub")


def test_without_the_authority_no_keys_are_made(made):
    (made / "ca/ca.key").unlink()
    with pytest.raises(AccessError, match=r"ca.pem and ca.key, .* are needed to sign further keys; bring them back"):
        keys("node", made, 2)
    assert not (made / "node-2").exists()
    assert "node-2" not in (made / "hub/tokens.json").read_text()
