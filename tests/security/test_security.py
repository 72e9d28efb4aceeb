"""TLS, mutual TLS and tokens over real gRPC: who is let in, and what everybody else is told."""

import shutil

import pytest

from spes_mega.client.client import HubClient
from spes_mega.client.status import read_status
from spes_mega.errors import AccessError, DeadlineError, HubRefusedError
from spes_mega.hub.rpc.auth import Guard
from spes_mega.security.access import OPEN, Access, read_access
from spes_mega.security.keys import HubKeys, read_hub
from tests.hub.fabricated import fabricate, make_recipe, push
from tests.hub.keyring import make_keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory):
    """Of another run."""
    return make_keys(tmp_path_factory.mktemp("other") / "keys")


@pytest.fixture(params=[False, True], ids=["tls", "mutual"])
def mutual(request):
    return request.param


def access_of(directory, address="127.0.0.1:1"):
    return read_access(address, directory, None, insecure=False)


def guard_of(keys, mutual, shared_token=None):
    return Guard.of(read_hub(keys / "hub"), shared_token, mutual)


def expired(keys):
    """The hub's keys with a certificate that expired while the hub was running."""
    return HubKeys(
        (keys / "hub/ca.pem").read_bytes(), (keys / "hub/hub.pem").read_bytes(), (keys / "hub/hub.key").read_bytes(), {}
    )


def test_nodes_with_their_own_keys_make_a_round_and_a_watcher_sees_it(start_hub, connect, keys, mutual):
    recipe = make_recipe()
    hub = start_hub(recipe, guard=guard_of(keys, mutual))
    clients = [connect(hub, node, access=access_of(keys / f"node-{node}")) for node in (0, 1)]
    for node, client in enumerate(clients):
        client.join()
        push(client, 0, fabricate(recipe, node, 0))
    assert clients[0].wait_round(1) == 1
    assert read_status(hub.address, access_of(keys / "watch"), 20)["round"] == 1


def test_a_node_of_which_nothing_is_left_comes_back_with_the_same_keys(start_hub, connect, keys, mutual):
    recipe = make_recipe(num_nodes=1)
    hub = start_hub(recipe, guard=guard_of(keys, mutual))
    first = connect(hub, 0, access=access_of(keys / "node-0"))
    first.join()
    first.pull().close()
    first.close()
    again = connect(hub, 0, access=access_of(keys / "node-0"))
    assert again.join().round == 0
    push(again, 0, fabricate(recipe, 0, 0))
    assert again.wait_round(1) == 1


def assert_refused(hub, access, message, node=0):
    client = HubClient.for_recipe(hub.recipe, hub.address, node, access=access)
    with client:
        for call in (client.join, client.pull, lambda: push(client, 0, fabricate(hub.recipe, node, 0))):
            with pytest.raises(HubRefusedError, match=message):
                call()


def test_no_token_a_wrong_one_and_one_of_another_node_are_refused(start_hub, keys, mutual):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual))
    mine = access_of(keys / "node-0")
    assert_refused(hub, Access(None, mine.tls), "the token is missing or wrong")
    assert_refused(hub, Access("0" * 64, mine.tls), "the token is missing or wrong")
    other = access_of(keys / "node-1")
    message = r"the token is that of node-1, and the caller says that it is node 0: give each node the keys of its own"
    assert_refused(hub, Access(other.token, mine.tls), message)
    assert_refused(hub, access_of(keys / "watch"), "are for `spes-mega status` alone")
    assert hub.run.state.rounds.attendance.presence()[0].value == "never joined"


def test_with_mutual_tls_the_certificate_has_to_be_that_of_the_caller(start_hub, keys):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual=True, shared_token="shared"))
    message = "the certificate is that of node-1, and the caller says that it is node 0"
    assert_refused(hub, Access("shared", access_of(keys / "node-1").tls), message)
    with HubClient.for_recipe(
        hub.recipe, hub.address, 1, access=Access("shared", access_of(keys / "node-1").tls)
    ) as one:
        assert one.join().round == 0


def test_with_mutual_tls_a_certificate_has_to_be_shown(start_hub, keys, tmp_path):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual=True))
    shutil.copytree(keys / "node-0", tmp_path / "node-0")
    (tmp_path / "node-0/node.pem").unlink()
    assert_refused(
        hub, access_of(tmp_path / "node-0"), r"it hangs up on callers that show no certificate \(--mutual-tls\)"
    )


def test_keys_of_another_run_are_refused_on_both_sides(start_hub, keys, other_keys, tmp_path, mutual):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual))
    assert_refused(hub, access_of(other_keys / "node-0"), r"its certificate is not signed by .*/node-0/ca.pem")
    if mutual:  # a node that trusts the hub, with a certificate of somebody else
        shutil.copytree(other_keys / "node-0", tmp_path / "node-0")
        shutil.copy(keys / "node-0/ca.pem", tmp_path / "node-0/ca.pem")
        assert_refused(
            hub,
            access_of(tmp_path / "node-0"),
            r"it does not accept .*/node-0/node.pem: the certificate has expired, or is of another",
        )


def test_an_expired_certificate_of_the_hub_and_a_wrong_name_are_named(start_hub, tmp_path):
    keys = make_keys(tmp_path / "keys", days=-1)
    hub = start_hub(make_recipe(), guard=Guard({}, expired(keys)))
    (keys / "node-0/node.pem").unlink()
    assert_refused(
        hub, access_of(keys / "node-0"), r"its certificate has expired: `spes-mega keys hub` makes a new one"
    )


def test_a_hub_under_a_name_that_its_certificate_lacks_is_refused(start_hub, keys):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual=False), listen="127.0.0.2:0")
    message = r"its certificate is not for 127\.0\.0\.2 .*keys hub --host 127\.0\.0\.2"
    assert_refused(hub, access_of(keys / "node-0"), message)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_always_among_the_names(start_hub, keys, host):
    hub = start_hub(make_recipe(), guard=guard_of(keys, mutual=False))
    port = hub.address.rpartition(":")[2]
    assert read_status(f"{host}:{port}", access_of(keys / "node-0"), 20)["round"] == 0


def test_one_side_with_tls_and_one_without(start_hub, keys, tmp_path):
    secured = start_hub(make_recipe(), guard=guard_of(keys, mutual=False))
    assert_refused(secured, OPEN, "it speaks TLS: give --keys DIR")
    plain = start_hub(make_recipe(), tmp_path / "plain", token="shared")
    assert_refused(plain, access_of(keys / "node-0"), r"it does not speak TLS: start it with --keys DIR/hub")


def test_a_shared_token_takes_the_place_of_the_nodes_own_under_tls(start_hub, connect, keys):
    hub = start_hub(make_recipe(), guard=guard_of(keys, False, shared_token="shared"))
    mine = access_of(keys / "node-0")
    assert_refused(hub, mine, "the token is missing or wrong")
    assert connect(hub, 0, access=Access("shared", mine.tls)).join().round == 0


def test_a_hub_that_is_down_is_waited_for_under_tls_too(keys):
    client = HubClient("127.0.0.1:1", 0, "", rpc_deadline_s=1, access=access_of(keys / "node-0"))
    with client, pytest.raises(DeadlineError, match=r"hub at 127\.0\.0\.1:1: no success within 1 s"):
        client.join()


def test_mutual_tls_without_keys_is_refused():
    with pytest.raises(AccessError, match="--mutual-tls needs the certificates of --keys DIR"):
        Guard.of(None, "shared", mutual=True)
