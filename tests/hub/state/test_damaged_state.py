"""A state directory that something else has damaged: the hub names the path and the cause, and changes nothing."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from spes_mega.hub.state.checksummed import read_sealed, write_sealed
from tests.hub.fabricated import fabricate, push, raw_recipe, until_durable
from tests.hub.process import HubProcess


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """The folder of a hub that was killed in round 2, with a push of node 0, and a copy of the state."""
    folder = tmp_path_factory.mktemp("hub")
    hub = HubProcess(folder, raw_recipe(snapshot_every=1))
    clients = [hub.client(node) for node in (0, 1)]
    for client in clients:
        client.join()
    for round_ in (0, 1):
        for client in clients:
            push(client, round_, fabricate(hub.recipe, client.node, round_))
        assert clients[0].wait_round(round_ + 1) == round_ + 1
        until_durable(folder / f"state/snapshots/round-{round_ + 1:06d}")
    push(clients[0], 2, fabricate(hub.recipe, 0, 2))
    hub.kill()
    for client in clients:
        client.close()
    return folder


def replace(make):
    def damage(path):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return damage


def text(content):
    return lambda path: path.write_text(content)


def dangling(path):
    path.symlink_to("nowhere")


def flip(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def other_members(path):
    path.write_text(path.read_text().replace('"joined"', '"left"', 1))


def closed_without(path):
    write_sealed(path, {"nodes": [], "absent": []})


def closed_with_node_1(path):
    write_sealed(path, {"nodes": [0, 1], "absent": []})


def copy_push(name):
    return lambda path: (path / name).write_bytes(next(path.glob("node-000-*")).read_bytes())


ROUND, PUSHES = "rounds/000002", "pushes/000002"
# what is damaged, how, and what is said of which path
TABLE = [
    ("run.json", text("{"), "run.json: damaged"),
    ("run.json", text("[]"), "run.json: not a state directory of format"),
    ("run.json", text("[" * 100_000), "run.json: damaged"),
    ("run.json", replace(os.mkdir), "run.json: a directory; a file was expected"),
    ("run.json", replace(lambda path: None), "has other files|missing beside committed rounds"),
    ("members.json", text('{"nodes": []}'), "members.json: damaged: it has no checksum; remove it"),
    ("members.json", text("[[]]"), "members.json: damaged"),
    ("members.json", other_members, "members.json: damaged: its checksum is"),
    ("members.json", replace(dangling), "members.json: a symbolic link that leads nowhere"),
    ("members.json", replace(os.mkfifo), "members.json: a named pipe; a file was expected"),
    ("metrics.jsonl", replace(os.mkdir), "metrics.jsonl: a directory; a file was expected"),
    ("metrics.jsonl", replace(os.mkfifo), "metrics.jsonl: a named pipe"),
    ("lock", replace(os.mkdir), "lock: a directory; a file was expected"),
    ("rounds", replace(text("")), "rounds: a file; a directory was expected"),
    ("rounds", replace(os.mkdir), "rounds: holds no state, but .* is there, so that there was one"),
    (ROUND, replace(text("")), "rounds/000002: a file; a directory was expected"),
    (ROUND, replace(dangling), "rounds/000002: a symbolic link that leads nowhere"),
    (f"{ROUND}/round.json", text("{}"), "round.json: damaged: its checksum"),
    (f"{ROUND}/round.json", replace(os.mkdir), "round.json: a directory; a file was expected"),
    (f"{ROUND}/checksums.json", text("[1]"), "checksums.json: missing or damaged"),
    (f"{ROUND}/config.json", replace(dangling), "config.json: a symbolic link that leads nowhere"),
    (f"{ROUND}/model.safetensors", flip, "model.safetensors: damaged: its checksum"),
    (f"{ROUND}/model.safetensors", replace(os.mkfifo), "model.safetensors: a named pipe"),
    ("snapshots/round-000002", replace(dangling), "snapshots/round-000002: a symbolic link that leads nowhere"),
    ("snapshots/round-000002", replace(text("")), "snapshots/round-000002: a file; a directory was expected"),
    (PUSHES, replace(text("")), "pushes/000002: a file; a directory was expected"),
    (
        PUSHES,
        copy_push("node-007-0123456789abcdef.safetensors"),
        "node-007-.*: a push of node 7, which this run",
    ),
    (PUSHES, copy_push("node-000-0123456789abcdef.safetensors"), "is a push of node 0 too"),
    (f"{PUSHES}/closing.json", text('{"nodes": [], "absent": []}'), "closing.json: damaged: it has no checksum"),
    (f"{PUSHES}/closing.json", text("[]"), "closing.json: damaged"),
    (f"{PUSHES}/closing.json", closed_without, "that of node 0 is there but not among them"),
    (f"{PUSHES}/closing.json", closed_with_node_1, "the push of node 1 is missing or damaged"),
    (f"{PUSHES}/closing.json", replace(os.mkdir), "closing.json: a directory; a file was expected"),
]


def tree(root):
    """All that is there, by name, with its kind and content."""
    found = {}
    for path in sorted(root.rglob("*")):
        kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file" if path.is_file() else "other"
        found[path.relative_to(root).as_posix()] = (kind, path.read_bytes() if kind == "file" else None)
    return found


def start(folder, state):
    command = [sys.executable, "-m", "spes_mega.cli", "hub", folder / "recipe.yaml", "--state", state]
    return subprocess.run(
        [*map(str, command), "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("name", "damage", "said"), TABLE, ids=[f"{number} {row[0]}" for number, row in enumerate(TABLE)]
)
def test_a_damage_is_named_and_nothing_is_changed(used, tmp_path, name, damage, said):
    state = tmp_path / "state"
    subprocess.run(["cp", "-a", used / "state", state], check=True)
    leftover = state / "rounds/.000003.partial-ab"  # which a hub that goes on would remove
    leftover.mkdir()
    damage(state / name)
    before = tree(state)
    ended = start(used, state)
    assert ended.returncode == 8, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(state) in line
    assert re.search(said, line), line
    assert tree(state) == before


def test_without_damage_it_goes_on_and_sweeps(used, tmp_path):
    subprocess.run(["cp", "-a", used / "state", tmp_path / "state"], check=True)
    (tmp_path / "state/rounds/.000003.partial-ab").mkdir()
    (tmp_path / "state/rounds/.link.partial-cd").symlink_to(tmp_path)
    hub = HubProcess(tmp_path, raw_recipe(snapshot_every=1))
    try:
        status = hub.client(1).status()
        assert (status["round"], status["waiting_for"]) == (2, [1])
        assert list((tmp_path / "state/rounds").glob(".*")) == []
        assert tmp_path.exists()
    finally:
        hub.kill()


def test_a_note_is_read_as_it_was_written_or_not_at_all(tmp_path):
    path = tmp_path / "note.json"
    write_sealed(path, {"nodes": [0], "absent": []})
    assert read_sealed(path, "") == {"nodes": [0], "absent": []}
    content = json.loads(path.read_text())
    assert sorted(content) == ["content", "xxh3_64"]
