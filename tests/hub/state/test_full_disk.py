"""A full disk, which is a small file system: what there is no room for is tried again, or ends the run."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from spes_mega.errors import DeadlineError, StoreError
from spes_mega.hub.state import disk_full as room_module
from spes_mega.layout import writer as writer_module
from spes_mega.tools.status import describe
from tests.hub.fabricated import (
    assert_same,
    fabricate,
    make_recipe,
    next_state,
    pull,
    push,
    raw_recipe,
    read_state,
    until_durable,
)
from tests.hub.rpc.test_hub import until

MODEL = {"vocab_size": 20_000}
STATE = 20_000 * 16 * 4 * 2 + 100_000
DISK = 12 * STATE
DILOCO = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}


@pytest.fixture
def disk(tmp_path):
    """A state directory that is a disk of its own, and all but `free` bytes of it taken by others."""
    path = tmp_path / "state"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", path], check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", path], check=True)


class Disk:
    def __init__(self, path):
        self.path = path
        self._ballast = path / "ballast"

    def leave(self, free):
        self._ballast.unlink(missing_ok=True)
        status = os.statvfs(self.path)
        self._ballast.write_bytes(bytes(status.f_bavail * status.f_frsize - free))

    def clear(self):
        self._ballast.unlink()

    def files(self):
        names = {path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()}
        return {name for name in names if "/" in name and not name.startswith("rounds/000000/")}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(room_module, "RETRY_S", 0.2)


def both(recipe, connect, hub):
    clients = [connect(hub, node) for node in (0, 1)]
    for client in clients:
        client.join()
    return clients


def expected(recipe, initial):
    return next_state(recipe, initial, {node: fabricate(recipe, node, 0) for node in (0, 1)})


@pytest.mark.usefixtures("quick")
def test_a_push_waits_for_room(disk, start_hub, connect, capsys):
    recipe = make_recipe(MODEL)
    hub = start_hub(recipe, disk.path)
    zero, one = both(recipe, connect, hub)
    initial = pull(zero)[1]
    disk.leave(STATE // 2)
    with ThreadPoolExecutor() as pool:
        stuck = pool.submit(push, zero, 0, fabricate(recipe, 0, 0))
        until(lambda: one.status()["trouble"])
        assert any("waiting: the hub's disk is full" in line for line in describe(one.status()))
        assert disk.files() == set()
        assert not stuck.done()
        disk.clear()
        stuck.result(timeout=20)
    status = one.status()
    assert (status["trouble"], status["waiting_for"], status["rejected"]) == ("", [1], [])
    push(one, 0, fabricate(recipe, 1, 0))
    assert one.wait_round(1) == 1
    assert_same(pull(one)[1], expected(recipe, initial))
    said = capsys.readouterr().out
    assert said.count("waiting until there is room (spes.on_full_disk: wait)") == 1
    assert said.count("there is room on the hub's disk again") == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("surprised", [False, True])
def test_a_round_waits_for_room_and_is_closed_once(disk, start_hub, connect, monkeypatch, surprised):
    if surprised:  # others fill the disk while the state is being written
        monkeypatch.setattr(writer_module.CheckpointWriter, "_check_room", lambda self, needed: None)
    recipe = make_recipe(MODEL)
    hub = start_hub(recipe, disk.path)
    zero, one = both(recipe, connect, hub)
    initial = pull(zero)[1]
    push(zero, 0, fabricate(recipe, 0, 0))
    disk.leave(STATE + STATE // 2)
    with ThreadPoolExecutor() as pool:
        push(one, 0, fabricate(recipe, 1, 0))
        waiting = pool.submit(zero.wait_round, 1)
        until(lambda: one.status()["trouble"])
        until(lambda: not list(disk.path.glob("rounds/.*")))
        assert one.status()["round"] == 0
        with connect(hub, 1, recipe=make_recipe(MODEL, rpc_deadline_s=0.5)) as newcomer:
            newcomer._caller.CopyFrom(one._caller)
            with pytest.raises(DeadlineError, match="last: the hub's disk is full"):
                newcomer.pull()
        disk.clear()
        assert waiting.result(timeout=20) == 1
    assert_same(pull(one)[1], expected(recipe, initial))
    status = one.status()
    assert ([r["round"] for r in status["rounds"]], status["trouble"]) == ([0, 1], "")
    assert status["rounds"][1]["bytes_up"] == zero.bytes_up + one.bytes_up
    assert list(disk.path.glob("*/.*")) == []


@pytest.mark.usefixtures("quick")
def test_a_first_state_waits_for_room(disk, start_hub, capsys, tmp_path):
    recipe, said = make_recipe(MODEL), []

    def waiting():
        said.append(capsys.readouterr().out)
        return "waiting until there is room" in "".join(said)

    disk.leave(STATE // 2)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(start_hub, recipe, disk.path / "state")
        until(waiting)
        assert not starting.done()
        assert list((disk.path / "state/rounds").iterdir()) == []
        disk.clear()
        hub = starting.result(timeout=20)
    assert hub.run.state.newest.round == 0
    drawn = start_hub(recipe, tmp_path / "elsewhere")
    assert_same(read_state(disk.path / "state/rounds/000000"), read_state(drawn.state / "rounds/000000"))


def test_a_first_state_without_room_ends_a_hub_that_is_to_stop(disk, start_hub):
    disk.leave(STATE // 2)
    with pytest.raises(StoreError, match="the hub's disk is full"):
        start_hub(make_recipe(MODEL, on_full_disk="stop"), disk.path / "state")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("outer", [{}, {"shared": DILOCO, "experts": DILOCO}])
def test_the_files_beside_a_state_need_room_too(disk, start_hub, connect, outer):
    """Residual, the change that was sent, and momentum: without room for all of them nothing is begun."""
    recipe = make_recipe(MODEL, wire={"down": "int8"}, outer=outer)
    hub = start_hub(recipe, disk.path)
    zero, one = both(recipe, connect, hub)
    for client in (zero, one):
        pull(client)
    push(zero, 0, fabricate(recipe, 0, 0))
    disk.leave(2 * STATE + STATE // 10)  # the node's push, and the weights
    push(one, 0, fabricate(recipe, 1, 0))
    until(lambda: one.status()["trouble"])
    needed, free = (int(n.replace(",", "")) for n in re.findall(r"([\d,]{8,})", one.status()["trouble"]))
    assert free > STATE
    assert list(disk.path.glob("rounds/.*")) == []
    disk.clear()
    assert one.wait_round(1) == 1
    used = sum(path.stat().st_size for path in until_durable(disk.path / "rounds/000001").glob("*.safetensors"))
    assert abs(needed - used) < 80_000  # headers, some of them generously


def test_a_round_without_room_ends_the_run_if_it_is_to_stop_and_nothing_is_lost(disk, start_process):
    raw = raw_recipe(MODEL, on_full_disk="stop")
    hub = start_process(raw)
    recipe = hub.recipe
    zero, one = hub.client(0), hub.client(1)
    with zero, one:
        zero.join()
        one.join()
        push(zero, 0, fabricate(recipe, 0, 0))
        disk.leave(STATE + STATE // 2)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(zero.wait_round, 1)
            push(one, 0, fabricate(recipe, 1, 0))
            with pytest.raises(StoreError, match=r"the hub's disk is full: .* bytes of disk space"):
                waiting.result(timeout=30)
    assert hub.end() == 8
    assert "error: the hub's disk is full" in hub.output
    assert {name.split("/")[0] for name in disk.files()} == {"pushes"}
    disk.clear()
    initial = read_state(disk.path / "rounds/000000")
    again = start_process(raw)
    with again.client(0) as client:
        assert client.join().round in (0, 1)
        assert client.wait_round(1) == 1
        assert_same(pull(client)[1], expected(recipe, initial))
