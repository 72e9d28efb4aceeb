"""What a lone node goes on with equals what it had, bit for bit, in ZeRO 1-3, fp32 and bf16; all in this process."""

import itertools
import json
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from spes_mega.data.samples import NodeData
from spes_mega.errors import CheckpointError, SpesError
from spes_mega.layout.storage.checksums import checksum_of
from spes_mega.node.checkpoint.files import finish
from spes_mega.node.checkpoint.resume import Resume
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.lone_node import LoneNode
from spes_mega.node.trainer import Trainer
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.node.zero.moments import Moments, collect_moments
from spes_mega.recipe import load_recipe


class Node:
    """A lone node in one of its lives: a process would do the same, in main.py."""

    def __init__(self, folder, recipe, ranks, resume="auto"):
        folder.mkdir(exist_ok=True)
        self.said, self.recipe, self.ranks = [], recipe, ranks
        options = SimpleNamespace(node=0, change=(), out=folder / "out", resume=resume)
        data = NodeData(recipe, 0)
        self.resume = Resume(recipe, options, data, ranks, self.said.append)
        self.source = LoneNode(recipe, ranks, folder / "out", None)
        steps = self.resume.steps(self.source.owned)
        self.model = LocalModel(recipe, self.source.owned, ranks, StopRequest(), folder, steps)
        self.at = self.resume.take_up(self.model, self.source)
        self.trainer = Trainer(recipe, self.model, data, ranks, StopRequest())

    def train(self, count):
        """Figures of `count` steps, without those of time."""
        rows = []
        for _ in range(count):
            rows.append(asdict(self.trainer.step(self.at)) | {"tokens_per_s": None})
            self.at = self.trainer.after(self.at)
        return rows

    def save(self):
        with self.resume.saver(self.model, self.at, self.source) as saver:
            saver.save(self.model, self.at, self.source)

    def state(self):
        """Masters, moments, and how often Adam has updated them."""
        weights, moments = {}, {}
        self.model.collect(
            self.model.shapes, lambda shapes, tensors: weights.update((n, t.clone()) for n, t in tensors), rounded=True
        )

        def keep(steps, stream):
            moments.update((name, Moments(*(value.clone() for value in values))) for name, values in stream)

        return weights, moments, collect_moments(self.model.engine, self.model.map.entries, self.ranks, keep)


def same(a, b):
    (weights, moments, steps), (other_weights, other_moments, other_steps) = a, b
    return (
        steps == other_steps
        and weights.keys() == other_weights.keys()
        and all(torch.equal(weights[name], other_weights[name]) for name in weights)
        and moments.keys() == other_moments.keys()
        and all(torch.equal(x, y) for name in moments for x, y in zip(moments[name], other_moments[name], strict=True))
    )


@pytest.fixture
def recipe_of(tmp_path, write_recipe):
    def make(stage, dtype, **train):
        more = {"zero_optimization": {"stage3_param_persistence_threshold": 100}} if stage == 3 else {}
        train = {"dtype": dtype, "zero_stage": stage, "steps": 20} | train
        name = f"{stage}-{dtype}-{len(list(tmp_path.iterdir()))}"
        return load_recipe(write_recipe(tmp_path, name, train=train, spes={"sync_every": 20}, deepspeed=more))

    return make


@pytest.mark.parametrize(("stage", "dtype"), itertools.product((1, 2, 3), ("fp32", "bf16")))
def test_the_next_steps_are_the_same(tmp_path, ranks, recipe_of, stage, dtype):
    recipe = recipe_of(stage, dtype)
    node = Node(tmp_path, recipe, ranks)
    node.train(3)
    node.save()
    expected = node.state()
    again = Node(tmp_path, recipe, ranks)
    assert again.at == node.at
    assert set(expected[2].values()) == {3}
    assert same(again.state(), expected)
    assert again.train(2) == node.train(2)
    assert same(again.state(), node.state())


def test_a_checkpoint_of_one_stage_and_precision_is_that_of_all(tmp_path, ranks, recipe_of):
    node = Node(tmp_path, recipe_of(1, "fp32"), ranks)
    node.train(3)
    node.save()
    expected = node.state()
    for stage, dtype in ((3, "bf16"), (2, "bf16"), (3, "fp32"), (2, "fp32"), (1, "bf16"), (1, "fp32")):
        node = Node(tmp_path, recipe_of(stage, dtype), ranks)
        assert same(node.state(), expected)
        node.save()  # so that the next one has it from this one
    (only,) = (tmp_path / "out/checkpoints").iterdir()
    assert only.name == "step-000003"
    counted = 12 * sum(value.numel() for value in expected[0].values())  # of the plan
    assert counted < sum(path.stat().st_size for path in only.iterdir()) < counted + 40_000  # names, and generators


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.02}, r"a checkpoint of a recipe with digest .*\(train\.lr: 0\.01 in the checkpoint, 0\.02 in the re"),
        ({"seed": 2}, r"a checkpoint with train\.seed 1234"),
    ],
)
def test_what_is_not_its_own_is_refused_before_anything_is_built(tmp_path, ranks, recipe_of, change, message):
    node = Node(tmp_path, recipe_of(1, "fp32"), ranks)
    node.train(1)
    node.save()
    with pytest.raises(SpesError, match=message) as error:
        Node(tmp_path, recipe_of(1, "fp32", **change), ranks)
    assert error.value.exit_code == CheckpointError.exit_code


def test_a_lone_node_does_not_train_weights_that_its_checkpoint_lacks(tmp_path, ranks, recipe_of):
    """They would be what the memory of the new model happened to hold."""
    node = Node(tmp_path, recipe_of(1, "fp32"), ranks)
    node.train(1)
    node.save()
    (path,) = (tmp_path / "out/checkpoints").iterdir()
    weights = load_file(path / "weights.safetensors")
    lacking = next(name for name in weights if "experts.2." in name)
    expert = lacking.split("experts.2.")[0] + "experts.2."
    save_file({n: t for n, t in weights.items() if not n.startswith(expert)}, path / "weights.safetensors")
    checksums = json.loads((path / "checksums.json").read_text())
    checksums["weights.safetensors"] = checksum_of(path / "weights.safetensors")
    (path / "checksums.json").write_text(json.dumps(checksums))
    with pytest.raises(SpesError, match=r"weights\.safetensors: has no model\.layers\..*experts\.2\.") as error:
        Node(tmp_path, recipe_of(1, "fp32"), ranks)
    assert error.value.exit_code == CheckpointError.exit_code


def checkpoints(out):
    return sorted(str(path.relative_to(out)) for path in out.glob("checkpoints*/step-*"))


def life(folder, recipe, ranks, resume, steps=0):
    """A process that saves after so many steps, or is killed before its first."""
    node = Node(folder, recipe, ranks, resume)
    if steps:
        node.train(steps)
        node.save()
    else:
        with node.resume.saver(node.model, node.at, node.source):
            pass
    return node


def test_one_that_was_set_aside_is_gone_on_from_and_nothing_is_lost(tmp_path, ranks, recipe_of):
    recipe, out = recipe_of(1, "fp32"), tmp_path / "out"
    expected = life(tmp_path, recipe, ranks, "auto", 2).state()
    life(tmp_path, recipe, ranks, "never", 3)
    assert checkpoints(out) == ["checkpoints.old/step-000002", "checkpoints/step-000003"]
    node = life(tmp_path, recipe, ranks, str(out / "checkpoints.old/step-000002"))
    assert any("are now in" in said and said.endswith("checkpoints.old-2") for said in node.said)
    everything = ["checkpoints.old-2/step-000003", "checkpoints.old/step-000002", "checkpoints/step-000002"]
    assert checkpoints(out) == everything
    again = life(tmp_path, recipe, ranks, "auto")
    assert again.at.step == 2
    assert same(again.state(), expected)
    assert checkpoints(out) == everything


def test_the_one_in_whose_place_it_comes_is_set_aside_too(tmp_path, ranks, recipe_of):
    recipe, out = recipe_of(1, "fp32"), tmp_path / "out"
    life(tmp_path, recipe, ranks, "auto", 2)
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    life(tmp_path, recipe, ranks, "auto", 1)
    life(tmp_path, recipe, ranks, "auto", 1)
    life(tmp_path, recipe, ranks, "auto", 1)
    life(tmp_path, recipe, ranks, str(tmp_path / "elsewhere/step-000002"))
    assert checkpoints(out) == [
        "checkpoints.old/step-000002.old", "checkpoints.old/step-000003", "checkpoints/step-000002"
    ]  # fmt: skip


def test_a_full_disk_leaves_all_as_it_was(tmp_path, ranks, recipe_of, monkeypatch):
    recipe, out = recipe_of(1, "fp32"), tmp_path / "out"
    life(tmp_path, recipe, ranks, "auto", 2)
    life(tmp_path, recipe, ranks, "never", 3)
    before = checkpoints(out)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SpesError, match="No space left"):
        life(tmp_path, recipe, ranks, str(out / "checkpoints.old/step-000002"))
    assert checkpoints(out) == before


@pytest.mark.parametrize("resume", ["never", "path"])
def test_the_later_processes_of_an_attempt_go_on_from_what_the_first_has_saved(
    tmp_path, ranks, recipe_of, monkeypatch, resume
):
    recipe, out = recipe_of(1, "fp32"), tmp_path / "out"
    life(tmp_path, recipe, ranks, "auto", 2)
    life(tmp_path, recipe, ranks, "auto", 2)
    monkeypatch.setenv("SPES_MEGA_ATTEMPT", "first")
    asked = "never" if resume == "never" else str(out / "checkpoints/step-000002")
    Node(tmp_path, recipe, ranks, asked)  # ends before it has begun: --resume is still to be done
    node = Node(tmp_path, recipe, ranks, asked)
    begun = 0 if resume == "never" else 2
    assert node.at.step == begun
    node.train(1)
    node.save()
    before = checkpoints(out)
    again = life(tmp_path, recipe, ranks, asked)
    assert again.at == node.at
    assert checkpoints(out) == before
    monkeypatch.setenv("SPES_MEGA_ATTEMPT", "second")
    assert Node(tmp_path, recipe, ranks, asked).at.step == begun


def test_without_checkpoints_none_are_written(tmp_path, ranks, recipe_of):
    recipe = recipe_of(1, "fp32")
    recipe = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every": 0})})
    node = Node(tmp_path, recipe, ranks)
    with node.resume.saver(node.model, node.at, node.source) as saver:
        assert saver is None


@pytest.mark.parametrize("batch", [{"micro_batch_size": 2}, {"grad_accumulation": 3}])
def test_another_batch_goes_on_with_the_first_sample_that_was_not_trained_on(tmp_path, ranks, recipe_of, batch):
    node = Node(tmp_path, recipe_of(1, "fp32"), ranks)
    node.train(3)  # of 4 samples
    node.save()
    again = Node(tmp_path, recipe_of(1, "fp32", **batch), ranks)
    assert again.at == node.at
    assert again.at.samples == 12
    data, read = again.trainer.data, []
    sample = data.sample
    data.sample = lambda number: read.append(number) or sample(number)
    again.train(2)
    assert read == list(range(12, 12 + 2 * data.samples_per_step))
    assert again.at.tokens == node.at.tokens + 2 * data.samples_per_step * 16


def test_a_checkpoint_of_an_earlier_version_goes_on_where_that_would_have(tmp_path, ranks, recipe_of):
    recipe = recipe_of(1, "fp32")
    node = Node(tmp_path, recipe, ranks)
    node.train(3)
    node.save()
    (path,) = (tmp_path / "out/checkpoints").glob("step-*/state.json")
    state = json.loads(path.read_text())
    del state["position"]["samples"], state["samples_per_step"], state["identity"]["data"]["contents"]
    checksums = json.loads((path.parent / "checksums.json").read_text())
    finish(path.parent, state, {file: known for file, known in checksums.items() if file != "state.json"})
    again = Node(tmp_path, recipe, ranks)
    assert again.at == node.at
    assert any("does not say how many samples it had seen: taken to be 4 a step" in line for line in again.said)
    assert any("whether the dataset has the same contents is not known" in line for line in again.said)
    assert again.train(2) == node.train(2)


def test_other_text_in_documents_of_the_same_lengths_is_refused(tmp_path, ranks, recipe_of):
    recipe = recipe_of(1, "fp32")
    copied = tmp_path / "copied"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{recipe.data.train}{suffix}", f"{copied}{suffix}")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": copied})})
    node = Node(tmp_path, recipe, ranks)
    node.train(1)
    node.save()
    tokens = bytearray((tmp_path / "copied.bin").read_bytes())
    tokens[200], tokens[202] = tokens[202], tokens[200] ^ 1
    (tmp_path / "copied.bin").write_bytes(tokens)
    with pytest.raises(SpesError, match=r"contents \w{12}, .* but this is one .* contents \w{12}.* give the dataset"):
        Node(tmp_path, recipe, ranks)
