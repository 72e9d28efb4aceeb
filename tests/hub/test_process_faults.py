"""Faults in real processes. After each the run goes on, with the state that the surviving valid pushes give.

| fault | test |
|---|---|
| a node never joins, never pushes | test_hub: who_never_joins, who_never_pushes |
| is killed before, in the middle of, after a push | here |
| comes back with the old round; a closed or a future round | test_hub: a_late_push; test_rounds: closed_and |
| pushes twice, the same or other bytes | test_hub: the_same_push_again |
| NaN, Inf, name, shape, not owned, truncated, corrupt after valid | test_hub: a_faulty_push, no_push; test_payload |
| another dtype | test_wire: a_push_in_another_codec |
| a bad checksum | test_hub: a_damaged_chunk; test_frames |
| two processes of one id | test_hub: a_second_process; test_rounds |
| pushes in the same instant, in any order | test_hub: pushes_in_the_same_instant |
| begun again with other chunk sizes | test_transfer: may_have_other_chunk_sizes |
| hundreds of stray pushes | test_transfer: uploads_of_one_node_are_few; test_limits; here |
| another digest, another protocol | test_hub: strangers_are_refused |
| the hub is killed while it waits, writes a state, sends one | test_hub_process: a_killed_hub; test_killed_hub |
| disk full | test_full_disk |
| state directory of another run, or damaged | test_store; test_wire: residual; test_hub: damaged_on; test_lost_push |
| the link drops, is slow, delays, is silent | test_transfer; test_hub: falls_silent |
| a straggler with min_nodes met and not met | test_rounds: min_nodes_suffice; test_hub: a_straggler, never_pushes |
| clock skew | here |
"""

import ast
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import torch

import spes_mega
from spes_mega.client.client import HubClient
from spes_mega.hub.rpc import service as service_module
from spes_mega.hub.state.ledger import KEPT_REJECTIONS
from spes_mega.wire.frames import frame_of
from tests.hub.fabricated import (
    assert_same,
    fabricate,
    make_recipe,
    next_state,
    pull,
    push,
    pushes_in,
    read_state,
    shapes_of,
)
from tests.hub.relay import Relay
from tests.hub.rpc.test_hub import push_messages, until

NODE = """
import sys
from tests.hub.fabricated import fabricate, make_recipe, push
from spes_mega.client.client import HubClient
address, node, digest, pushes = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
client = HubClient(address, node, digest)
client.join()
if pushes:
    recipe = make_recipe({"vocab_size": 80_000}, num_nodes=4)
    push(client, 0, fabricate(recipe, node, 0))
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node_process():
    processes = []

    def start(address, node, recipe, pushes):
        root = Path(__file__).parents[2]
        arguments = [sys.executable, "-c", NODE, address, str(node), recipe.digest(), str(pushes)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(arguments, cwd=root, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_nodes_killed_before_in_and_after_a_push_leave_what_was_accepted(start_hub, connect, node_process, tmp_path):
    recipe = make_recipe({"vocab_size": 80_000}, num_nodes=4, min_nodes=2, round_deadline_s=60, join_deadline_s=120)
    hub = start_hub(recipe)
    initial = read_state(tmp_path / "state/rounds/000000")
    pushes = tmp_path / "state/pushes/000000"
    slow = Relay(hub.address)
    before = node_process(hub.address, 0, recipe, False)
    middle = node_process(slow.address, 1, recipe, True)
    after = node_process(hub.address, 2, recipe, True)
    slow.bytes_per_s = 500_000  # the push takes 20 s
    assert before.stdout.readline() == after.stdout.readline() == b"done\n"
    until(lambda: any(pushes.glob("node-001.*.part")), 60)
    for process in (before, middle, after):
        process.kill()
    slow.cut()
    three = connect(hub, 3)
    three.join()
    push(three, 0, fabricate(recipe, 3, 0))
    with connect(hub, 2) as again:
        assert again.join().pushed
        for node in (0, 1):  # nobody waits for them any more
            with HubClient(hub.address, node, recipe.digest()) as gone:
                gone.join()
                gone.leave()
        assert again.wait_round(1) == 1
        assert_same(pull(again)[1], next_state(recipe, initial, {n: fabricate(recipe, n, 0) for n in (2, 3)}))
    assert three.status()["rounds"][-1]["nodes"] == [2, 3]
    until(lambda: not list((tmp_path / "state/pushes").glob("*/*.part")))


def test_hundreds_of_stray_pushes_leave_few_files_and_the_round_closes(start_hub, connect, tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "CUT_S", 0.01)
    recipe = make_recipe()
    hub = start_hub(recipe)
    initial = read_state(tmp_path / "state/rounds/000000")
    zero, one = connect(hub, 0), connect(hub, 1)
    zero.join()
    one.join()
    size = sum(torch.Size(shape).numel() for shape in shapes_of(recipe, 0).values()) * 4 + 1000
    staged = tmp_path / "state/pushes/000000"
    for number in range(300):
        # of the open round, a closed one, and one to come; never whole
        call = zero._channel._stub.Push.future(
            push_messages(zero, [frame_of(0, bytes(5000))], size, payload=f"{number}", round=number % 3)
        )
        with suppress(grpc.RpcError):
            call.result(timeout=20)
        assert len(list(staged.iterdir())) <= 2
    status = one.status()
    assert len(status["rejected"]) == KEPT_REJECTIONS
    assert {(r["node"], r["round"]) for r in status["rejected"]} == {(0, 0), (0, 1), (0, 2)}
    push(zero, 0, fabricate(recipe, 0, 0))
    push(one, 0, fabricate(recipe, 1, 0))
    assert one.wait_round(1) == 1
    assert_same(pull(one)[1], next_state(recipe, initial, {n: fabricate(recipe, n, 0) for n in (0, 1)}))
    until(lambda: not pushes_in(tmp_path / "state"))


def test_nothing_between_hub_and_nodes_depends_on_wall_clocks():
    """Nodes and hub may disagree about the time: only the validity of certificates is a matter of dates.

    A node's message says until when, by its own clock, it will try.
    """
    wall = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime", "st_mtime", "st_ctime", "getmtime"}
    found = {
        (path.name, node.attr)
        for room in ("wire", "security", "client", "hub")
        for path in (Path(spes_mega.__path__[0]) / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in wall
    }
    assert found == {("authority.py", "now"), ("keys.py", "now"), ("retry_notice.py", "now")}
