"""Nodes are given a state before it is on the disk; a hub that dies in between makes the same one again."""

import threading

import pytest

from spes_mega.client import replica as replica_module
from spes_mega.errors import SpesError, StoreError
from spes_mega.hub.run import Run
from spes_mega.hub.state.checksummed import read_sealed
from spes_mega.layout.names import expert_of
from spes_mega.layout.writer import CheckpointWriter
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, pull, push, pushes_in, read_state
from tests.hub.rpc.test_hub import moved, until


class Disk:
    """One that takes its time to make files durable, or dies meanwhile."""

    def __init__(self, monkeypatch):
        self.is_there = threading.Event()
        self.error = None
        commit = CheckpointWriter._commit

        def late(writer):
            if writer._out.name != "000000":
                writer.complete()
                assert self.is_there.wait(60)
                if self.error:
                    raise self.error
            commit(writer)

        monkeypatch.setattr(CheckpointWriter, "_commit", late)

    def die(self):
        self.error = OSError(5, "Input/output error")
        self.is_there.set()

    def recover(self):
        self.error = None
        self.is_there.set()


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


LOSSY = {"wire": {"up": "int8", "down": "bf16"}, "outer": {"shared": {"optimizer": "nesterov", "momentum": 0.9}}}


MERGING = {"merge_interval": 10, "merge_steps": 30}


@pytest.mark.parametrize("spes", [{}, LOSSY, MERGING, LOSSY | MERGING], ids=["fp32", "lossy", "merge", "lossy merge"])
def test_a_state_that_was_lost_is_made_again_bit_for_bit(start_hub, connect, disk, tmp_path, spes):
    recipe, state = make_recipe(train={"steps": 30}, **spes), tmp_path / "state"
    hub = start_hub(recipe)
    zero, one = connect(hub, 0), connect(hub, 1)
    for client in (zero, one):
        client.join()
        pull(client)
        push(client, 0, fabricate(recipe, client.node, 0))
    assert zero.wait_round(1) == 1
    assert pull(zero, 0)[0] == 1
    (pending,) = (state / "rounds").glob(".000001.partial-*")
    given, files = read_state(pending), contents(pending)
    push(zero, 1, fabricate(recipe, 0, 1))  # the next round is open
    assert not (state / "rounds/000001").exists()
    disk.die()
    assert "Input/output error" in str(hub.join().error)
    assert [path.name for path in (state / "rounds").iterdir()] == ["000000"]

    disk.recover()
    again = start_hub(recipe)
    assert contents(state / "rounds/000001") == files
    status = connect(again, 1).status()
    assert (status["round"], status["waiting_for"]) == (1, [1])  # the push for the next round is still there
    assert [path.parent.name for path in pushes_in(state)] == ["000001"]
    one = moved(one, again) if not spes else connect(again, 1)
    one.join()
    pull(one)
    push(one, 1, fabricate(recipe, 1, 1))
    assert one.wait_round(2) == 2
    if not spes:
        pushes = {node: fabricate(recipe, node, 1) for node in (0, 1)}
        assert_same(read_state(state / "rounds/000002"), next_state(recipe, given, pushes))


def contents(directory):
    """All of a state, but for times."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".safetensors"}


def test_a_state_is_not_made_again_without_a_push_that_it_had(start_hub, connect, disk, tmp_path):
    recipe, state = make_recipe(), tmp_path / "state"
    hub = start_hub(recipe)
    for node in (0, 1):
        client = connect(hub, node)
        client.join()
        push(client, 0, fabricate(recipe, node, 0))
    assert client.wait_round(1) == 1
    disk.die()
    hub.join()
    disk.recover()
    note = state / "pushes/000000/closing.json"
    assert read_sealed(note, "") == {"nodes": [0, 1], "absent": []}
    lost = next(note.parent.glob("node-001-*"))
    lost.write_bytes(lost.read_bytes()[:-4] + b"oops")
    with pytest.raises(StoreError, match=r"the push of node 1 is missing or damaged, and round 0 was closed with it"):
        start_hub(recipe)
    note.write_text("{}")
    with pytest.raises(StoreError, match=r"closing\.json: damaged"):
        start_hub(recipe)
    for path in note.parent.iterdir():
        path.unlink()
    note.parent.rmdir()  # as the message says
    assert start_hub(recipe).run.state.newest.round == 0


def test_the_next_round_is_not_closed_before_the_state_is_durable(start_hub, connect, disk, tmp_path):
    recipe, state = make_recipe(), tmp_path / "state"
    hub = start_hub(recipe)
    clients = [connect(hub, node) for node in (0, 1)]
    for round_ in (0, 1):
        for client in clients:
            client.join()
            push(client, round_, fabricate(recipe, client.node, round_))
        if round_ == 0:
            assert clients[0].wait_round(1) == 1
    assert sorted({path.parent.name for path in pushes_in(state)}) == ["000000", "000001"]
    assert clients[0].status()["round"] == 1
    disk.recover()
    assert clients[0].wait_round(2) == 2
    until(lambda: not (state / "pushes/000000").exists())


def test_a_damaged_note_ends_a_store_that_is_opened(tmp_path):
    recipe = make_recipe()
    run = Run(recipe, tmp_path / "state", None, Quiet())
    run.close()
    note = tmp_path / "state/pushes/000000/closing.json"
    note.write_text("[1]")
    with pytest.raises(SpesError, match=r"closing\.json: damaged"):
        Run(recipe, tmp_path / "state", None, Quiet())


class Quiet:
    def say(self, *arguments, **fields):
        pass


def pushed_by_all(start_hub, connect, recipe):
    hub = start_hub(recipe)
    clients = [connect(hub, node) for node in (0, 1)]
    for client in clients:
        client.join()
        pull(client)
        push(client, 0, fabricate(recipe, client.node, 0))
    assert clients[0].wait_round(1) == 1
    return hub, clients


def test_a_hub_that_is_stopped_finishes_what_nodes_were_given(start_hub, connect, disk, tmp_path):
    hub, _ = pushed_by_all(start_hub, connect, recipe := make_recipe(wire="int8"))
    hub.run.state.rounds.shutdown.stop()
    disk.recover()
    assert hub.join().error is None
    assert (tmp_path / "state/rounds/000001").exists()
    assert start_hub(recipe).run.state.newest.round == 1


def test_the_last_state_is_made_again_when_all_nodes_have_left(start_hub, connect, disk, tmp_path):
    recipe, state = make_recipe(train={"steps": 10}, wire="int8"), tmp_path / "state"
    hub, clients = pushed_by_all(start_hub, connect, recipe)
    given = [pull(client, 0)[1] for client in clients]
    for client in clients:
        client.leave()
    disk.die()
    hub.join()
    disk.recover()
    assert start_hub(recipe).join(60).finished
    made = read_state(state / "snapshots/round-000001")
    shared = [name for name in made if expert_of(name) is None]
    assert_same({n: made[n] for n in shared}, {n: given[0][n] for n in shared})
    assert [path.name for path in (state / "rounds").iterdir()] == ["000000", "000001"]


def test_files_to_be_overwritten_are_not_left_over(start_hub, connect, disk, tmp_path):
    hub, _ = pushed_by_all(start_hub, connect, recipe := make_recipe(train={"steps": 30}))
    disk.die()
    hub.join()
    disk.recover()
    hub = start_hub(recipe)
    assert list((tmp_path / "state").rglob("*.spare")) == []
    for round_ in (1, 2):
        for client in (clients := [connect(hub, node) for node in (0, 1)]):
            client.join()
            push(client, round_, fabricate(recipe, client.node, round_))
        assert clients[0].wait_round(round_ + 1) == round_ + 1
    for client in clients:
        client.leave()
    assert hub.join().finished
    assert sorted(path.name for path in (tmp_path / "state/rounds").iterdir()) == ["000002", "000003"]


def test_a_node_that_could_not_keep_what_it_pulled_pulls_all_of_it(start_hub, connect, monkeypatch):
    recipe = make_recipe(wire="int8")
    _, (zero, one) = pushed_by_all(start_hub, connect, recipe)
    shared = {name: tensor for name, tensor in pull(one, 0)[1].items() if expert_of(name) is None}
    write, room = replica_module._Versions.write, iter(range(4))

    def full(versions, *arguments):
        if next(room, None) is None:
            raise OSError(28, "No space left on device")
        write(versions, *arguments)

    monkeypatch.setattr(replica_module._Versions, "write", full)
    pull(zero, 0)  # all of it has come, and is kept while the node trains
    with pytest.raises(OSError, match="No space left"):
        push(zero, 1, fabricate(recipe, 0, 1))
    monkeypatch.setattr(replica_module._Versions, "write", write)
    state = pull(zero, 0)[1]
    assert_same({name: state[name] for name in shared}, shared)
