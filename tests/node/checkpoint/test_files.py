"""Checkpoints as files: what is whole, what is kept, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from spes_mega.data.samples import DataIdentity
from spes_mega.errors import CheckpointError
from spes_mega.layout.storage.checksums import checksum_of
from spes_mega.layout.storage.safetensors_format import CODES
from spes_mega.node.checkpoint.files import Shelf, TensorFileWriter, finish
from spes_mega.node.checkpoint.state import (
    MOMENTS,
    RNG,
    WEIGHTS,
    CheckpointState,
    Identity,
    find_checkpoint,
    open_checkpoint_directory,
    random_state,
    set_random_state,
)
from spes_mega.node.sync.weight_source import Position
from spes_mega.recipe import Recipe
from spes_mega.recipe.agreement import BALANCE

MOE = {
    "family": "qwen3_moe", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
    "num_experts": 4, "top_k": 2, "expert_hidden_size": 32, "vocab_size": 100,
}  # fmt: skip

DATA = DataIdentity(num_tokens=100, index_sha256="ab" * 32, sharding="shared")
MINE = Identity(node=0, recipe="12" * 32, seed=1, data=DATA)
VALUES = {"a": torch.arange(6.0).view(2, 3), "b": torch.full((2,), -1.5)}


def write_file(path, tensors):
    with TensorFileWriter(path, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.checksum()


def write(folder, step, identity=MINE, keep_last=2, commit=True):
    shelf = Shelf(folder)
    path = shelf.begin(step)
    moments = {f"{n} {key}": t + i for n, t in VALUES.items() for i, key in enumerate(("exp_avg", "exp_avg_sq"), 1)}
    files = {WEIGHTS: VALUES, MOMENTS: moments, RNG: {"rank-0": random_state()}}
    state = CheckpointState(
        identity=identity, position=Position(step // 2, step, 7), owned=(0, 1), steps={"a": step, "b": step},
        residual_round=None, ranks=1, zero_stage=2, dtype="bf16",
    )  # fmt: skip
    finish(path, state.model_dump(mode="json"), {name: write_file(path / name, ts) for name, ts in files.items()})
    if commit:
        shelf.commit(path, keep_last)
    return folder / f"step-{step:06d}"


def test_what_was_written_is_read(tmp_path):
    checkpoint = open_checkpoint_directory(write(tmp_path, 5))
    assert checkpoint.position == Position(2, 5, 7)
    assert checkpoint.state.steps == {"a": 5, "b": 5}
    assert checkpoint.names == ["a", "b"]
    assert all(torch.equal(checkpoint.read(name), value) for name, value in VALUES.items())
    assert torch.equal(checkpoint.moments("b").exp_avg, VALUES["b"] + 1)
    assert torch.equal(checkpoint.moments("b").exp_avg_sq, VALUES["b"] + 2)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors: has no c"):
        checkpoint.read("c")
    checkpoint.close()


def test_its_tensors_open_in_safetensors(tmp_path):
    from safetensors import safe_open

    assert CODES[torch.float32] == "F32"
    with safe_open(write(tmp_path, 5) / WEIGHTS, "pt") as file:
        assert torch.equal(file.get_tensor("a"), VALUES["a"])


def test_the_newest_are_kept_and_found(tmp_path):
    assert find_checkpoint("auto", tmp_path / "none", print) is None
    for step in (2, 4, 6, 1_000_000):
        write(tmp_path, step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-1000000"]
    assert find_checkpoint("auto", tmp_path, print).position.step == 1_000_000
    assert find_checkpoint("never", tmp_path, print) is None
    assert find_checkpoint(str(tmp_path / "step-000006"), tmp_path, print).position.step == 6
    write(tmp_path, 8, keep_last=1)  # later ones are not its business
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000008", "step-1000000"]


def test_one_that_was_being_written_is_not_there(tmp_path):
    write(tmp_path, 2)
    write(tmp_path, 4, commit=False)
    assert find_checkpoint("auto", tmp_path, print).position.step == 2
    write(tmp_path, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000006"]


def test_one_that_is_written_again_takes_the_place_of_the_old_one(tmp_path):
    path = write(tmp_path, 4)
    path.rename(tmp_path / "step-000004.old")  # killed between the two renames
    assert find_checkpoint("auto", tmp_path, print).position.step == 4
    write(tmp_path, 4)
    write(tmp_path, 4, MINE.model_copy(update={"seed": 2}))
    assert [p.name for p in Shelf(tmp_path).newest_first()] == ["step-000004"]
    assert open_checkpoint_directory(path).state.identity.seed == 2


@pytest.mark.parametrize("file", [WEIGHTS, MOMENTS, RNG, "state.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_seen_and_the_one_before_is_taken(tmp_path, file, damage):
    write(tmp_path, 2)
    path = write(tmp_path, 4) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-1])
    if damage == "remove":
        path.unlink()
    said = []
    assert find_checkpoint("auto", tmp_path, said.append).position.step == 2
    assert len(said) == 1
    where = "step-000004/" if file == "checksums.json" else f"step-000004/{file}: "
    assert where in said[0]
    with pytest.raises(CheckpointError, match=where):
        find_checkpoint(str(path.parent), tmp_path, print)


@pytest.mark.parametrize("file", [WEIGHTS, MOMENTS, RNG, "state.json"])
def test_a_file_without_a_checksum_is_damage(tmp_path, file):
    write(tmp_path, 2)
    path = write(tmp_path, 4)
    checksums = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({name: c for name, c in checksums.items() if name != file}))
    said = []
    assert find_checkpoint("auto", tmp_path, said.append).position.step == 2
    assert said == [f"cannot go on from a checkpoint: {path / 'checksums.json'}: damaged: it has no checksum of {file}"]
    (path / "checksums.json").write_text("{}")
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"checksums\.json: damaged: it has no checksum of state\.json"):
        open_checkpoint_directory(path)


def test_a_residual_without_a_checksum_is_damage(tmp_path):
    path = write(tmp_path, 2)
    checksums = json.loads((path / "checksums.json").read_text())
    state = json.loads((path / "state.json").read_text())
    finish(path, state | {"residual_round": 1}, checksums)
    with pytest.raises(CheckpointError, match=r"it has no checksum of residual\.safetensors"):
        open_checkpoint_directory(path)


def test_the_folder_of_checkpoints_is_none_but_the_newest_whole_one_is_named(tmp_path):
    whole, damaged = write(tmp_path, 2), write(tmp_path, 4)
    (damaged / RNG).unlink()
    with pytest.raises(CheckpointError) as refused:
        find_checkpoint(str(tmp_path), tmp_path / "other", print)
    assert str(refused.value) == f"{tmp_path}: a folder with checkpoints, the newest whole one is {whole}: pass that"
    (whole / RNG).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        find_checkpoint(str(tmp_path), tmp_path / "other", print)
    with pytest.raises(CheckpointError, match=r"state\.json: missing or damaged: not a checkpoint of a node\?"):
        find_checkpoint(str(whole.parent / "none"), tmp_path, print)


def test_without_a_whole_one_nobody_begins_anew_unasked(tmp_path):
    (write(tmp_path, 2) / RNG).unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole; begin anew with --resume never"):
        find_checkpoint("auto", tmp_path, print)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"node": 1}, "of node 1, but this is one of node 0"),
        ({"seed": 2}, r"with train\.seed 2, but this is one with train\.seed 1"),
        ({"recipe": "ff" * 32}, "recipe with digest ffffffffffff, but .* 121212121212: set the fields"),
        ({"data": DataIdentity(100, "cd" * 32, "shared")}, "index cdcdcdcdcdcd, .* index abababababab"),
        ({"data": DataIdentity(100, "ab" * 32, "own")}, r"data\.sharding own, but .* data\.sharding shared"),
    ],
)
def test_those_of_others_are_refused_by_name(tmp_path, other, message):
    checkpoint = open_checkpoint_directory(write(tmp_path, 2, MINE.model_copy(update=other)))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check(MINE, 2)


def identity(agreed, recipe="34" * 32):
    return MINE.model_copy(update={"recipe": recipe, "agreed": agreed})


def test_what_differs_between_the_recipes_is_named(tmp_path):
    before = {"train": {"lr": 0.001, "steps": 5}, "model": {"rope_scaling": None}, "spes": {"ownership": [[0], [1]]}}
    now = {"train": {"lr": 0.002, "steps": 5}, "model": {"rope_scaling": {"factor": 2}}, "spes": {"ownership": "all"}}
    now["spes"]["overlap"] = False
    checkpoint = open_checkpoint_directory(write(tmp_path, 2, identity(before)))
    with pytest.raises(CheckpointError) as refused:
        checkpoint.check(identity(now, "56" * 32), 2)
    assert (
        "digest 343434343434, but this is one of a recipe with digest 565656565656: set back what differs "
        "(train.lr: 0.001 in the checkpoint, 0.002 in the recipe; "
        'model.rope_scaling: null in the checkpoint, {"factor": 2} in the recipe; '
        'spes.ownership: [[0], [1]] in the checkpoint, "all" in the recipe; '
        "spes.overlap: nothing in the checkpoint, false in the recipe), or begin anew"
    ) in str(refused.value)
    checkpoint.check(identity(before), 2)


def test_a_checkpoint_of_before_recipes_were_kept_is_read_and_refused_by_digest(tmp_path):
    path = write(tmp_path, 2, identity(None))
    state, sums = (json.loads((path / name).read_text()) for name in ("state.json", "checksums.json"))
    del state["identity"]["agreed"]
    finish(path, state, sums)
    checkpoint = open_checkpoint_directory(path)
    checkpoint.check(identity({"train": {"lr": 0.1}}), 2)
    with pytest.raises(CheckpointError, match="digest 565656565656: set the fields that are not local back, or begin"):
        checkpoint.check(identity({"train": {"lr": 0.1}}, "56" * 32), 2)


def test_another_format_is_refused(tmp_path):
    path = write(tmp_path, 2)
    raw = json.loads((path / "state.json").read_text())
    finish(path, raw | {"format": 2}, {})
    with pytest.raises(CheckpointError, match="of another version of spes-mega"):
        open_checkpoint_directory(path)


def test_what_a_run_does_not_go_on_from_is_set_aside_and_kept(tmp_path):
    folder = tmp_path / "checkpoints"
    shelf = Shelf(folder)
    two, four = write(folder, 2), write(folder, 4)
    assert shelf.set_aside([]) is None
    assert shelf.set_aside([four]) == tmp_path / "checkpoints.old"
    assert shelf.set_aside([two]) == tmp_path / "checkpoints.old-2"
    (tmp_path / "checkpoints.old-3").write_text("somebody's file")
    assert shelf.set_aside([write(folder, 4)]) == tmp_path / "checkpoints.old-4"
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("checkpoints.old*/*")}
    assert found == {"checkpoints.old/step-000004", "checkpoints.old-2/step-000002", "checkpoints.old-4/step-000004"}
    assert find_checkpoint("auto", folder, print) is None


def test_one_killed_while_it_sets_aside_leaves_the_newest(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    paths = [write(folder, step, keep_last=3) for step in (2, 4, 6)]
    rename = Path.rename

    def end(path, to):
        if path == doomed:
            raise OSError(5, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", end)
    for left in (3, 2, 1):
        doomed = paths[-left]
        with pytest.raises(CheckpointError, match=r"checkpoints\.old\S*: cannot move checkpoints there: Input/output"):
            Shelf(folder).set_aside(Shelf(folder).newest_first())
        assert len(Shelf(folder).newest_first()) == left
        assert find_checkpoint("auto", folder, print).position.step == 6


def test_a_folder_that_has_no_checkpoints_name_is_refused(tmp_path):
    """One that is being written is swept away by the run that would go on from it."""
    write(tmp_path, 4, commit=False)
    with pytest.raises(CheckpointError, match=r"\.writing-step-000004: not the name of a whole checkpoint, which is"):
        find_checkpoint(str(tmp_path / ".writing-step-000004"), tmp_path, print)
    path = write(tmp_path, 4)
    (tmp_path / "newest").symlink_to(path)
    assert find_checkpoint(str(tmp_path / "newest"), tmp_path, print).position.step == 4
    moved = path.rename(tmp_path / "step-000099")
    with pytest.raises(CheckpointError, match="step-000099: a checkpoint of step 4: give it back the name"):
        find_checkpoint(str(moved), tmp_path, print)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_state_that_nobody_wrote_is_damage_whatever_its_checksum(tmp_path, text):
    write(tmp_path, 2)
    path = write(tmp_path, 4)
    sums = json.loads((path / "checksums.json").read_text())
    (path / "state.json").write_bytes(text)
    (path / "checksums.json").write_text(json.dumps(sums | {"state.json": checksum_of(path / "state.json")}))
    said = []
    assert find_checkpoint("auto", tmp_path, said.append).position.step == 2
    assert len(said) == 1
    assert "step-000004" in said[0]


def test_checksums_nested_without_end_are_damage(tmp_path):
    write(tmp_path, 2)
    (write(tmp_path, 4) / "checksums.json").write_text("[" * 100_000)
    assert find_checkpoint("auto", tmp_path, print).position.step == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": {"round": -5, "step": 4, "tokens": 0}}, r"position\.round: .*greater than or equal to 0"),
        ({"position": {"round": 2, "step": 4, "tokens": -1}}, r"position\.tokens: .*greater than or equal to 0"),
        ({"owned": [-1]}, r"owned\.0: .*greater than or equal to 0"),
        ({"owned": [0, 99]}, "damaged: it owns expert 99, of 2"),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, change, message):
    path = write(tmp_path, 4)
    state, sums = (json.loads((path / name).read_text()) for name in ("state.json", "checksums.json"))
    finish(path, state | change, sums)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint_directory(path).check(MINE, 2)


def test_a_full_disk_is_an_error_and_leaves_the_last_one(tmp_path, monkeypatch):
    import os

    write(tmp_path, 2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="step-000004: cannot write: No space left on device"):
        write(tmp_path, 4)
    assert find_checkpoint("auto", tmp_path, print).position.step == 2


def test_random_numbers_go_on(tmp_path):
    state = random_state()
    expected = torch.rand(5)
    set_random_state(state)
    assert torch.equal(torch.rand(5), expected)


def test_a_checkpoint_made_under_another_meaning_is_refused_unless_told_to(tmp_path):
    recipe = Recipe.model_validate({"model": MOE})
    agreed = recipe.agreed()
    mine = MINE.model_copy(update={"recipe": recipe.digest(), "agreed": agreed})
    before = {key: value for key, value in agreed.items() if key != "meaning"}
    earlier = mine.model_copy(update={"recipe": "34" * 32, "agreed": before})
    checkpoint = open_checkpoint_directory(write(tmp_path, 2, earlier))
    with pytest.raises(CheckpointError, match=r"give --change train\.aux_loss_coeff to the hub and to its nodes"):
        checkpoint.check(mine, 4)
    checkpoint.check(mine, 4, change=[BALANCE])
    other = mine.model_copy(update={"agreed": agreed | {"train": agreed["train"] | {"lr": 1.0}}, "recipe": "56" * 32})
    with pytest.raises(CheckpointError, match=r"train\.lr: 0\.0005 in the checkpoint, 1\.0 in the recipe"):
        checkpoint.check(other, 4, change=[BALANCE])
