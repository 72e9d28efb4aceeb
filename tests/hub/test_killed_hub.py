"""The hub's process is killed with SIGKILL where it hurts most, and started again on the same port."""

from concurrent.futures import ThreadPoolExecutor

from spes_mega.client.client import HubClient
from spes_mega.node.launch.command import free_port
from spes_mega.security.access import Access
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, pull, push, raw_recipe, read_state
from tests.hub.process import TOKEN
from tests.hub.relay import Relay
from tests.hub.rpc.test_hub import until

WIDE = {"vocab_size": 300_000}  # 19 MB for each of the two embeddings
PATIENT = {"num_nodes": 1, "rpc_deadline_s": 120, "round_deadline_s": 240}


def test_a_hub_killed_while_it_writes_a_state_and_while_it_sends_one_loses_nothing(start_process, tmp_path):
    raw, port, rounds = raw_recipe(WIDE, **PATIENT), free_port(), tmp_path / "state/rounds"
    recipe = make_recipe(WIDE, **PATIENT)
    hub = start_process(raw, port=port)
    initial = read_state(rounds / "000000")
    line = Relay(hub.address)
    with HubClient.for_recipe(recipe, line.address, 0, access=Access(TOKEN)) as client:
        client.join()
        push(client, 0, trained := fabricate(recipe, 0, 0))
        until(lambda: list(rounds.glob("*000001*")), 60)  # begun: .000001.partial-…; on a fast disk done
        hub.kill()
        hub = start_process(raw, port=port)
        assert client.wait_round(1) == 1
        expected = next_state(recipe, initial, {0: trained})
        assert_same(read_state(rounds / "000001"), expected)
        assert list(rounds.glob(".*")) == []
        line.bytes_per_s = 10_000_000  # the state takes 4 s
        with ThreadPoolExecutor() as pool:
            before = line.passed["down"]
            pulling = pool.submit(pull, client)
            until(lambda: line.passed["down"] > before + 5_000_000, 60)
            assert not pulling.done()
            hub.kill()
            start_process(raw, port=port)
            round_, state = pulling.result(timeout=120)
        assert round_ == 1
        assert_same(state, expected)
        # It went on where the line broke: a few buffers beside the 38.5 MB of the state.
        assert line.passed["down"] - before < 38_500_000 + 10_000_000
