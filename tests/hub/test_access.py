import pytest

from spes_mega.errors import HubRefusedError
from spes_mega.hub.access import check_listen, read_token


def test_a_token_comes_from_the_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("SPES_MEGA_TOKEN", raising=False)
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
    with pytest.raises(HubRefusedError, match="one word of printable ASCII"):
        read_token(path)
    with pytest.raises(HubRefusedError, match="cannot read the token"):
        read_token(tmp_path / "absent")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7070", "[::1]:7070", "127.8.0.1:1"])
def test_loopback_needs_no_token(address):
    check_listen(address, None)


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "192.0.2.1:1", "hub.example.org:7070"])
def test_an_open_port_needs_one(address):
    with pytest.raises(HubRefusedError, match="a token is needed"):
        check_listen(address, None)
    check_listen(address, "secret")


@pytest.mark.parametrize("address", ["7070", "host:", "host:port", "host:70000"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(HubRefusedError, match="expected HOST:PORT"):
        check_listen(address, "secret")
