"""Tokens, keys, and lines that either side refuses, before anything is sent."""

import json

import pytest

from spes_mega.errors import AccessError
from spes_mega.security.access import check_listen, exposed, read_access, read_token
from spes_mega.security.keys import read_caller, read_hub, token_hash
from tests.hub.keyring import make_keys


@pytest.fixture(autouse=True)
def _no_token_around(monkeypatch):
    monkeypatch.delenv("SPES_MEGA_TOKEN", raising=False)


def test_a_token_comes_from_the_file_or_the_environment(tmp_path, monkeypatch):
    assert read_token(None) is None
    monkeypatch.setenv("SPES_MEGA_TOKEN", "from-env")
    assert read_token(None) == "from-env"
    path = tmp_path / "token"
    path.write_text("from-file\n")
    assert read_token(path) == "from-file"


@pytest.mark.parametrize("content", ["", "\n", "two words", "ünï"])
def test_what_is_no_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(AccessError, match="one word of printable ASCII"):
        read_token(path)
    with pytest.raises(AccessError, match="cannot read the token"):
        read_token(tmp_path / "absent")


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "localhost:7070", "[::1]:7070", "127.8.0.1:1"])
def test_loopback_needs_neither_token_nor_tls(address):
    check_listen(address, token=False, encrypted=False)
    assert read_access(address, None, None, insecure=False).tls is None


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:1", "hub.example.org:7070"])
def test_an_open_port_needs_a_token_and_tls_or_the_word_insecure(address):
    for encrypted, insecure in ((False, False), (True, False), (False, True)):
        with pytest.raises(AccessError, match="a token is needed: give --keys or --token-file"):
            check_listen(address, token=False, encrypted=encrypted, insecure=insecure)
    with pytest.raises(AccessError, match=r"would not be encrypted: give --keys DIR .* --insecure"):
        check_listen(address, token=True, encrypted=False)
    check_listen(address, token=True, encrypted=True)
    check_listen(address, token=True, encrypted=False, insecure=True)


@pytest.mark.parametrize("address", ["192.0.2.1:1", "hub.example.org:7070"])
def test_a_node_sends_nothing_in_the_clear_to_another_machine_unless_told_to(address, tmp_path, monkeypatch):
    with pytest.raises(AccessError, match=r"--hub .* is another machine, and without --keys everyone on the way"):
        read_access(address, None, None, insecure=False)
    monkeypatch.setenv("SPES_MEGA_TOKEN", "shared")
    assert read_access(address, None, None, insecure=True).token == "shared"
    keys = make_keys(tmp_path / "keys") / "node-0"
    assert read_access(address, keys, None, insecure=False).tls is not None


NO_ADDRESSES = [
    "7070",
    "host:",
    "host:port",
    "host:70000",
    "host:-1",
    "host:٣",
    ":7070",
    "http://host:7070",
    "grpc://host:7070",
    "dns:///host:7070",
    "unix:/run/hub:1",
    "host:7070/path",
    "::1:7099",
    "2001:db8::1:7070",
    "[::1:7070",
    "[host]:7070",
    "[1.2.3.4]:7070",
    "256.1.1.1:70",
    "127.1:70",
    "my host:7070",
    "user@host:7070",
    "-host:7070",
    "höst:7070",
    "a..b:7070",
    "x" * 64 + ":7070",
]


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_refused(address, tmp_path):
    with pytest.raises(AccessError, match=r"--listen .*expected HOST:PORT"):
        check_listen(address, token=True, encrypted=True)
    with pytest.raises(AccessError, match=r"--hub .*expected HOST:PORT"):
        read_access(address, None, None, insecure=False)
    with pytest.raises(AccessError, match=r"--hub .*expected HOST:PORT"):
        read_access(address, make_keys(tmp_path / "keys") / "node-0", None, insecure=False)


def test_of_several_tokens_the_file_comes_first_then_the_keys_then_the_environment(tmp_path, monkeypatch):
    keys = make_keys(tmp_path / "keys") / "node-1"
    own = (keys / "token").read_text().strip()
    file = tmp_path / "token"
    file.write_text("from-file")
    monkeypatch.setenv("SPES_MEGA_TOKEN", "from-env")

    def token(keys, token_file):
        return read_access("127.0.0.1:1", keys, token_file, insecure=False).token

    assert token(keys, None) == own
    assert token(keys, file) == "from-file"
    (keys / "token").unlink()
    assert token(keys, None) == "from-env"
    for name in ("node.pem", "node.key"):
        (keys / name).unlink()
    assert read_access("hub.example.org:1", keys, None, insecure=False).tls.certificate is None  # a CA is enough


def test_the_hub_has_only_hashes_of_tokens(tmp_path):
    keys = make_keys(tmp_path / "keys")
    tokens = {name: (keys / name / "token").read_text().strip() for name in ("node-0", "node-1", "watch")}
    assert read_hub(keys / "hub").callers == {token_hash(token): name for name, token in tokens.items()}
    for file in (keys / "hub").iterdir():
        assert not any(token in file.read_text() for token in tokens.values())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ca.pem", None, "ca.pem: no such file; --keys takes one of the directories"),
        ("ca.pem", "x", "ca.pem: not a certificate in PEM"),
        ("hub.pem", None, "hub.pem: no such file"),
        ("hub.pem", "x", "hub.pem: not a certificate in PEM that hub.key belongs to"),
        ("tokens.json", "[]", "tokens.json: expected names of callers"),
        ("tokens.json", '{"node-0": "12"}', "tokens.json: expected names of callers"),
        ("tokens.json", '{"../0": "' + 64 * "0" + '"}', "tokens.json: expected names of callers"),
        ("tokens.json", json.dumps(dict.fromkeys(("node-0", "node-1"), 64 * "0")), "two callers have the same token"),
    ],
)
def test_keys_of_a_hub_that_cannot_be_used_are_named(tmp_path, name, content, message):
    path = make_keys(tmp_path / "keys") / "hub" / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(AccessError, match=message):
        read_hub(path.parent)


def test_a_key_of_another_certificate_and_an_expired_certificate_are_named(tmp_path):
    keys = make_keys(tmp_path / "keys")
    (keys / "node-0/node.key").write_bytes((keys / "node-1/node.key").read_bytes())
    with pytest.raises(AccessError, match=r"node-0/node.pem: not a certificate in PEM that node.key belongs to"):
        read_caller(keys / "node-0")
    old = make_keys(tmp_path / "old", days=-1)
    with pytest.raises(AccessError, match=r"node-1/node.pem: expired on .*: `spes-mega keys node` makes a new one"):
        read_caller(old / "node-1")
    with pytest.raises(AccessError, match=r"hub/hub.pem: expired on .*: `spes-mega keys hub` makes a new one"):
        read_hub(old / "hub")


def test_a_caller_does_not_call_port_0_and_a_hub_may_listen_on_it():
    with pytest.raises(AccessError, match="a number from 1 to 65535"):
        read_access("127.0.0.1:0", None, None, insecure=False)
    check_listen("127.0.0.1:0", token=False, encrypted=False)


@pytest.mark.parametrize(
    "address", ["a.example:1", "a.example.:1", "node_1-x:65535", "[2001:db8::1]:7070", "10.0.0.1:7"]
)
def test_what_is_an_address_is_taken(address):
    assert read_access(address, None, None, insecure=True).tls is None


def test_files_with_secrets_that_others_can_read_are_named_with_their_mode(tmp_path):
    keys = make_keys(tmp_path / "keys")
    for directory in ("hub", "node-0", "watch", "ca"):
        assert exposed(keys / directory, None) == []
    (keys / "node-0/token").chmod(0o644)
    (keys / "node-0/node.key").chmod(0o640)
    token = tmp_path / "token"
    token.write_text("shared")
    token.chmod(0o604)
    warnings = exposed(keys / "node-0", token)
    assert [warning.partition(" is open to others on this machine ")[0] for warning in warnings] == [
        f"warning: {path}" for path in (keys / "node-0/token", keys / "node-0/node.key", token)
    ]
    assert ["(mode 0644)" in warnings[0], "(mode 0640)" in warnings[1], "(mode 0604)" in warnings[2]] == [True] * 3
    (keys / "hub/hub.key").chmod(0o666)
    assert "hub.key is open to others on this machine (mode 0666): chmod 600" in exposed(keys / "hub", None)[0]
