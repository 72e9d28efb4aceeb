import hashlib
import json

import pytest
import torch
from safetensors import safe_open

from spes_mega.errors import CheckpointError, StoreError
from spes_mega.hub.rounds.members import Member, Presence
from spes_mega.hub.state import store as store_module
from spes_mega.hub.state.initial import commit_initial
from spes_mega.hub.state.ledger import Ledger, RoundRecord
from spes_mega.hub.state.run_lock import take_lock
from spes_mega.hub.state.store import Store, Template
from spes_mega.layout.initialize import initial_tensor
from spes_mega.layout.names import expected_tensors
from spes_mega.layout.storage.checksums import check_files
from spes_mega.recipe.agreement import BALANCE
from tests.hub.fabricated import assert_same, make_recipe, read_state


@pytest.fixture
def recipe():
    return make_recipe(snapshot_every=2)


@pytest.fixture
def store(recipe, tmp_path):
    store = Store(tmp_path / "state", recipe)
    commit_initial(store, recipe, None)
    yield store
    store.close()


def drawn(recipe):
    seed = recipe.train.seed
    return {name: initial_tensor(recipe.model, name, s, seed) for name, s in expected_tensors(recipe.model).items()}


def commit_next(store, recipe):
    newest = store.newest()
    ledger = store.read_ledger(newest)

    with store.committing(newest + 1, Template()) as draft:
        for name, tensor in drawn(recipe).items():
            draft.writer.write(name, tensor + (newest + 1))
        step = recipe.step_at(newest + 1)
        ledger.close_round(RoundRecord(newest + 1, step, nodes=(0, 1), seconds=1.5, tokens=100))
        draft.complete(ledger)
    return ledger.rounds[-1]


def test_the_initial_state_is_drawn_from_the_seed(store, recipe):
    assert store.newest() == 0
    assert_same(read_state(store.round_dir(0)), drawn(recipe))
    assert store.read_ledger(0).rounds[-1].round == 0


def test_a_failed_commit_leaves_the_last_round_and_nothing_else(store, recipe, tmp_path):
    name = next(iter(expected_tensors(recipe.model)))
    with pytest.raises(CheckpointError, match="not filled"), store.committing(1, Template()) as draft:
        draft.writer.write(name, drawn(recipe)[name])
    assert [path.name for path in (tmp_path / "state" / "rounds").iterdir()] == ["000000"]


def test_what_a_crash_left_is_swept_and_what_was_committed_stays(store, recipe, tmp_path):
    commit_next(store, recipe)
    state = tmp_path / "state"
    store.pushes_dir(0)
    committed = store.pushes_dir(1) / "node-001-0123456789abcdef.safetensors"
    committed.write_bytes(b"x")
    for leftover in ("rounds/.000002.partial-ab", "snapshots/.round-000001.partial-cd", "pushes/.000000.partial-old"):
        (state / leftover).mkdir()
        (state / leftover / "model.safetensors").write_bytes(b"half")
    (store.pushes_dir(1) / "node-000.1234.part").write_bytes(b"half")
    (store.pushes_dir(1) / "node-000-0123456789abcdef.spare").write_bytes(b"old")
    store.close()
    again = Store(state, recipe)
    try:
        assert again.newest() == 1
        again.sweep()
        assert sorted(path.name for path in (state / "rounds").iterdir()) == ["000000", "000001"]
        assert list((state / "snapshots").iterdir()) == []
        assert [path.relative_to(state).as_posix() for path in (state / "pushes").rglob("*")] == [
            "pushes/000001",
            "pushes/000001/node-001-0123456789abcdef.safetensors",
        ]
    finally:
        again.close()
        store._lock = take_lock(again.root)


def test_only_the_last_two_rounds_stay_and_snapshots_are_links_that_outlive_them(store, recipe, tmp_path):
    for _ in range(4):
        record = commit_next(store, recipe)
        store.prune(record.round)
        store.snapshot(record)
    state = tmp_path / "state"
    assert sorted(path.name for path in (state / "rounds").glob("[!.]*")) == ["000003", "000004"]
    # every second round, and the last of the run
    assert sorted(path.name for path in (state / "snapshots").iterdir()) == ["round-000002", "round-000004"]
    linked = state / "snapshots/round-000004/model.safetensors"
    assert linked.stat().st_ino == (state / "rounds/000004/model.safetensors").stat().st_ino
    assert sorted(path.name for path in linked.parent.iterdir()) == ["config.json", "model.safetensors"]
    expected = {name: tensor + 2 for name, tensor in drawn(recipe).items()}
    assert_same(read_state(state / "snapshots/round-000002"), expected)
    assert store.snapshot(record) is None


def test_the_next_state_overwrites_files_of_one_that_nobody_needs(store, recipe, tmp_path):
    rounds = tmp_path / "state" / "rounds"

    def commit():
        record = commit_next(store, recipe)
        store.prune(record.round)
        return (rounds / f"{record.round:06d}" / "model.safetensors").stat().st_ino

    inodes = [(rounds / "000000" / "model.safetensors").stat().st_ino, *(commit() for _ in range(3))]
    assert inodes[3] == inodes[0]
    assert inodes[0] not in inodes[1:3]
    assert_same(read_state(rounds / "000003"), {name: tensor + 3 for name, tensor in drawn(recipe).items()})
    check_files(rounds / "000003")
    # A snapshot has the file of round 2; somebody reads round 3, and a program that has nothing to do with us round 4.
    store.snapshot(store.read_ledger(2).rounds[-1])
    commit()
    reader = store.open_state(3)
    with safe_open(rounds / "000004/model.safetensors", "pt") as stranger:
        for _ in range(3):
            assert commit() not in inodes
        assert commit() not in inodes
        for name, tensor in drawn(recipe).items():
            assert torch.equal(reader.rows(name, 0, len(tensor)), tensor + 3)
            assert torch.equal(stranger.get_tensor(name), tensor + 4)
    reader.close()
    assert_same(read_state(tmp_path / "state/snapshots/round-000002"), {n: t + 2 for n, t in drawn(recipe).items()})
    store.close()
    again = Store(tmp_path / "state", recipe)
    try:
        again.sweep()
        assert not list(rounds.glob(".*spare"))
    finally:
        again.close()
        store._lock = take_lock(again.root)


def test_snapshots_are_copied_where_links_are_not_possible(store, recipe, monkeypatch):
    def refuse(*paths):
        raise OSError("no links here")

    commit_next(store, recipe)
    record = commit_next(store, recipe)
    monkeypatch.setattr(store_module.os, "link", refuse)
    assert_same(read_state(store.snapshot(record)), read_state(store.round_dir(2)))


def test_another_recipe_and_another_hub_are_refused(store, tmp_path):
    with pytest.raises(StoreError, match="another hub is using"):
        Store(tmp_path / "state", make_recipe())
    store.close()
    fields = r"\(fabricated: spes\.sync_every: 10 in the state, 5 in the recipe\): choose another --state"
    with pytest.raises(StoreError, match="holds the rounds of another recipe " + fields):
        Store(tmp_path / "state", make_recipe(sync_every=5))
    run = tmp_path / "state/run.json"
    known = json.loads(run.read_text())
    run.write_text(json.dumps({key: known[key] for key in ("format", "name", "digest")}))  # by an earlier version
    with pytest.raises(StoreError, match=rf"another recipe \(fabricated: digest {known['digest'][:12]}; this one is"):
        Store(tmp_path / "state", make_recipe(sync_every=5))
    store._lock = take_lock(store.root)


def as_before_the_balance_loss_was_a_mean(run):
    """Rewrite run.json as versions had it that added the layers up, and had no fields for what they always did."""
    known = json.loads(run.read_text())
    agreed = known["agreed"]
    del agreed["meaning"], agreed["model"]["init"]
    for field in ("warmup_from", "decay_norms", "aux_loss_warmup"):
        del agreed["train"][field]
    known["digest"] = hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()
    run.write_text(json.dumps(known))


def test_a_state_made_under_another_meaning_is_refused_unless_told_to(store, tmp_path):
    recipe, run = make_recipe(), tmp_path / "state/run.json"
    store.close()
    as_before_the_balance_loss_was_a_mean(run)
    with pytest.raises(StoreError) as refused:
        Store(tmp_path / "state", recipe)
    assert (
        'train.aux_loss_coeff: "weight of the sum over MoE layers" in the state, "weight of the mean over MoE layers" '
        "in the recipe; to go on with what is meant today, give --change train.aux_loss_coeff to the hub"
    ) in str(refused.value)
    with pytest.raises(StoreError, match=r"spes\.sync_every: 10 in the state, 5 in the recipe"):
        Store(tmp_path / "state", make_recipe(sync_every=5), change=[BALANCE])
    Store(tmp_path / "state", recipe, change=[BALANCE]).close()
    with pytest.raises(StoreError) as refused:  # its meaning is today's by now: only the value differs
        Store(tmp_path / "state", with_coefficient(recipe, 0.5), change=[BALANCE])
    assert "train.aux_loss_coeff: 0.01 in the state, 0.5 in the recipe): choose another --state" in str(refused.value)
    store._lock = Store(tmp_path / "state", recipe)._lock  # from now on without being told


def test_with_its_meaning_the_value_of_a_field_may_change(store, tmp_path):
    """What was a sum goes on as the mean of twice as much, over two layers."""
    recipe = with_coefficient(make_recipe(), 0.02)
    store.close()
    as_before_the_balance_loss_was_a_mean(tmp_path / "state/run.json")
    both = r'0\.01, "weight of the sum over MoE layers" in the state, 0\.02, "weight of the mean over MoE layers" in'
    with pytest.raises(StoreError, match=both):
        Store(tmp_path / "state", recipe)
    with pytest.raises(StoreError, match=r"aux_loss_coeff: 0\.01 in the state, 0\.0 in the recipe\): choose"):
        Store(tmp_path / "state", with_coefficient(recipe, 0.0), change=[BALANCE])
    store._lock = Store(tmp_path / "state", recipe, change=[BALANCE])._lock


def with_coefficient(recipe, value):
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"aux_loss_coeff": value})})


def test_where_nothing_changed_its_meaning_an_earlier_state_goes_on(tmp_path):
    recipe = with_coefficient(make_recipe(), 0.0)
    store = Store(tmp_path / "earlier", recipe)
    commit_initial(store, recipe, None)
    store.close()
    as_before_the_balance_loss_was_a_mean(tmp_path / "earlier/run.json")
    Store(tmp_path / "earlier", recipe).close()
    assert json.loads((tmp_path / "earlier/run.json").read_text())["digest"] == recipe.digest()


@pytest.mark.parametrize(
    ("names", "message"),
    [(["notes.txt"], "other files: notes.txt;"), (["a", "b", "rounds"], "other files: a and 1 more;")],
)
def test_a_folder_of_something_else_is_refused_and_left_as_it_was(recipe, tmp_path, names, message):
    root = tmp_path / "home"
    for name in names:
        (root / name).mkdir(parents=True)
    with pytest.raises(StoreError, match=message):
        Store(root, recipe)
    assert sorted(path.name for path in root.iterdir()) == sorted(names)


@pytest.mark.parametrize("left", [[], ["lost+found"], ["rounds", "pushes", "snapshots", "lock", ".run.json.partial"]])
def test_an_empty_folder_and_what_a_failed_first_start_left_are_taken(recipe, tmp_path, left):
    root = tmp_path / "state"
    root.mkdir()
    for name in left:
        (root / name).touch() if name in ("lock", ".run.json.partial") else (root / name).mkdir()
    Store(root, recipe).close()
    assert (root / "run.json").exists()


def test_damage_is_named(store, recipe, tmp_path):
    path = tmp_path / "state/rounds/000000/round.json"
    path.write_text(path.read_text().replace('"merges"', '"m"'))
    with pytest.raises(StoreError, match=r"round\.json: damaged"):
        store.read_ledger(0)
    store.close()
    (tmp_path / "state/run.json").write_text("{")
    with pytest.raises(StoreError, match=r"run\.json: damaged"):
        Store(tmp_path / "state", recipe)
    (tmp_path / "state/run.json").unlink()
    with pytest.raises(StoreError, match="missing beside committed rounds"):
        Store(tmp_path / "state", recipe)
    store._lock = take_lock(store.root)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "round.json"])
def test_a_file_whose_checksum_is_missing_is_damaged(store, recipe, file):
    commit_next(store, recipe)
    path = store.round_dir(1) / "checksums.json"
    sums = json.loads(path.read_text())
    del sums[file]
    path.write_text(json.dumps(sums))
    with pytest.raises(StoreError, match=f"checksums.json: damaged: it has no checksum of {file}.*round 0 is whole"):
        store.check_state(1)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "round.json", "checksums.json"])
def test_a_bit_that_flipped_in_a_state_is_found_and_the_way_back_is_named(store, recipe, file):
    commit_next(store, recipe)
    store.check_state(1)
    path = store.round_dir(1) / file
    flip(path, -100 if file == "model.safetensors" else -20)
    with pytest.raises(StoreError, match="damaged") as raised:
        store.check_state(1)
    named = f"{path}: damaged" if file != "checksums.json" else f"{store.round_dir(1)}/"
    assert str(raised.value).startswith(named)
    assert f"or remove {store.round_dir(1)} and start again: round 0 is whole" in str(raised.value)
    flip(store.round_dir(0) / "model.safetensors", 100)
    with pytest.raises(StoreError, match=r"from a copy; round 0 is damaged too .*000000/model.safetensors: "):
        store.check_state(1)


def test_a_state_with_a_file_that_is_gone_or_cut_is_refused(store):
    path = store.round_dir(0) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"model\.safetensors: missing or damaged.*no earlier round is kept"):
        store.check_state(0)
    path.unlink()
    with pytest.raises(StoreError, match=r"model\.safetensors: missing or damaged"):
        store.check_state(0)


def test_the_ledger_survives_json_and_is_bounded():
    ledger = Ledger.empty(2)
    for round_ in range(1, 100):
        ledger.count_up(1, 10)
        ledger.count_down(0, round_)
        ledger.pushed(1, round_ - 1)
        ledger.reject(0, round_, "x" * 10_000)
        ledger.reject(0, round_, "y")
        alpha = 0.5 if round_ % 10 == 0 else None
        ledger.close_round(RoundRecord(round_, round_ * 5, (1,), 2.0, tokens=7, merge_alpha=alpha))
    again = Ledger.from_json(json.loads(json.dumps(ledger.as_json())))
    assert again == ledger
    assert again.merges == 9
    assert again.nodes[1].bytes_up == 990
    assert again.nodes[1].last_pushed_round == 98
    assert (again.rounds[-1].bytes_up, again.rounds[-1].bytes_down) == (10, 99)
    assert len(json.dumps(ledger.as_json())) < 40_000


def test_members_are_kept(store):
    assert store.read_members() == {}
    members = {0: Member(Presence.MISSED, "a"), 1: Member(Presence.NEVER_JOINED)}
    store.write_members({0: Member(Presence.JOINED, "a")})
    store.write_members(members)
    assert store.read_members() == members


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[1]", "damaged"),
        ('[{"node": 0, "presence": "here", "session": null}]', "damaged.*'here'"),
        ('[{"node": 0, "presence": "joined", "session": 1}]', "damaged.*a session is a text"),
        ('[{"node": 2, "presence": "joined", "session": null}]', "speaks of node 2"),
    ],
)
def test_damaged_members_are_named(store, tmp_path, text, message):
    (tmp_path / "state/members.json").write_text(text)
    with pytest.raises(StoreError, match=rf"members\.json: {message}.*remove it"):
        store.read_members()


def test_members_that_cannot_be_written_are_a_store_error(store, tmp_path):
    (tmp_path / "state/.members.json.partial").mkdir()
    with pytest.raises(StoreError, match=r"members\.json: the hub cannot note who takes part: Is a directory"):
        store.write_members({0: Member(Presence.JOINED, "a")})
