"""The result does not depend on how its source lies on disk; a broken source leaves nothing behind."""

import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spes_mega import __version__
from spes_mega.errors import CheckpointError, SpesError
from spes_mega.layout import open_checkpoint
from tests.upcycle.making import run

Q_NORM = "model.layers.0.self_attn.q_norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def result(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_same_bytes_from_every_kind_of_source(make_dense, tmp_path, family):
    one = make_dense(family, "one")
    two = make_dense(family, "two", max_shard_size="60KB")
    assert len(list(two.glob("*.safetensors"))) > 1
    state = load_file(one / "model.safetensors")
    save_file(state, tmp_path / "alone.safetensors")
    torch.save(dict(reversed(state.items())), tmp_path / "a.pt")
    torch.save({"state_dict": state}, tmp_path / "b.ckpt", _use_new_zipfile_serialization=False)
    config = one / "config.json"
    run(one, tmp_path / "moe")
    expected = result(tmp_path / "moe")
    sources = [(two, None), (one / "model.safetensors", None)]
    sources += [(tmp_path / name, config) for name in ("alone.safetensors", "a.pt", "b.ckpt")]
    for k, (src, given) in enumerate(sources):
        run(src, tmp_path / f"moe-{k}", given)
        assert result(tmp_path / f"moe-{k}") == expected, src


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "copy", "router_init": "mlp_std"},
        {"method": "noise", "router_init": "mlp_std"},
        {"method": "drop"},
        {"method": "split", "granularity": 3, "router_init": "mlp_std"},
        {"method": "partition"},
        {"method": "partition", "partition_by": "kmeans"},
        {"method": "mix"},
    ],
)
def test_the_same_bytes_whatever_the_threads_and_shards(make_dense, tmp_path, settings):
    before, results = torch.get_num_threads(), []
    try:
        for threads, shards in ((1, "5GB"), (3, "60KB")):
            torch.set_num_threads(threads)
            folders = [make_dense(name=f"{name}/{threads}", max_shard_size=shards) for name in "ab"]
            src = folders if settings["method"] == "mix" else folders[0]
            run(src, tmp_path / f"moe-{threads}", **settings)
            results.append(result(tmp_path / f"moe-{threads}"))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


def test_the_source_is_fingerprinted_whatever_its_files(make_dense, tmp_path):
    one, two = make_dense(name="one"), make_dense(name="two", max_shard_size="60KB")
    state = load_file(one / "model.safetensors")
    with open_checkpoint(one) as checkpoint:
        lines = [
            f"{name} float32 {list(state[name].shape)} {hashlib.sha256(state[name].numpy().tobytes()).hexdigest()}\n"
            for name in checkpoint.names
        ]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    for src in (one, two):
        run(src, tmp_path / f"moe-{src.name}", method="copy")
        facts = json.loads((tmp_path / f"moe-{src.name}/upcycle.json").read_text())
        assert facts["sources"] == [{"name": src.name, "sha256": expected}]
    state[UP][0, 0] += 1e-6
    save_file(state, one / "model.safetensors", {"format": "pt"})
    run(one, tmp_path / "moe-other", method="copy")
    assert json.loads((tmp_path / "moe-other/upcycle.json").read_text())["sources"][0]["sha256"] != expected


def test_recipe_digest_and_version_are_also_in_the_weights_and_no_path_or_time_is(make_dense, tmp_path):
    plan = run(make_dense(), tmp_path / "moe", method="drop", drop_ratio=0.25)
    with safe_open(tmp_path / "moe/model.safetensors", "pt") as file:
        metadata = file.metadata()
    facts = json.loads((tmp_path / "moe/upcycle.json").read_text())
    assert json.loads(metadata["upcycle"]) == facts["settings"] == plan.settings.model_dump()
    assert json.loads(metadata["upcycle_sources"]) == [source["sha256"] for source in facts["sources"]]
    assert metadata["spes_mega_version"] == facts["version"] == __version__
    assert facts["result"]["differs_from_source"] == "25% of the units of each expert were drawn anew"
    for text in ((tmp_path / "moe/upcycle.json").read_text(), json.dumps(metadata)):
        assert str(tmp_path) not in text
        assert not re.search(r"20\d\d-\d\d-\d\d", text)
    again = run(tmp_path / "dense", tmp_path / "again", **facts["settings"])
    assert again.settings == plan.settings
    for file in ("model.safetensors", "upcycle.json", "recipe.yaml", "config.json"):
        assert (tmp_path / "moe" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_another_seed_gives_other_bytes(make_dense, tmp_path):
    src = make_dense()
    run(src, tmp_path / "a", seed=1)
    run(src, tmp_path / "b", seed=2)
    assert result(tmp_path / "a") != result(tmp_path / "b")


def edit_weights(change):
    def edit(src):
        state = load_file(src / "model.safetensors")
        change(state)
        save_file(state, src / "model.safetensors", {"format": "pt"})

    return edit


def edit_config(**changes):
    def edit(src):
        raw = json.loads((src / "config.json").read_text())
        (src / "config.json").write_text(json.dumps(raw | changes))

    return edit


def set_value(name, value):
    def change(state):
        state[name][3, 5] = value

    return edit_weights(change)


def lose_a_shard(src):
    state = load_file(src / "model.safetensors")
    weight_map = dict.fromkeys(state, "model-00001-of-00002.safetensors")
    (src / "model.safetensors").rename(src / "model-00001-of-00002.safetensors")
    weight_map[UP] = "model-00002-of-00002.safetensors"
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BROKEN = {
    "missing shard": (lose_a_shard, "model-00002-of-00002.safetensors: this shard is missing"),
    "truncated": (lambda src: os.truncate(src / "model.safetensors", 50_000), "model.safetensors: truncated"),
    "wrong shape": (edit_weights(lambda s: s.update({UP: torch.zeros(47, 32)})), rf"{UP}: shape \[47, 32\]"),
    "norm of all heads": (
        edit_weights(lambda s: s.update({Q_NORM: torch.ones(64)})),
        rf"{Q_NORM}: shape \[64\], but config.json asks for \[16\]",
    ),
    "unexpected": (edit_weights(lambda s: s.update(extra=torch.zeros(2))), "unexpected tensor: extra"),
    "missing": (edit_weights(lambda s: s.pop(UP)), f"missing tensor: {UP}"),
    "NaN": (set_value(UP, float("nan")), f"{UP}: has NaN or infinite values"),
    "Inf": (set_value("model.embed_tokens.weight", float("inf")), "embed_tokens.weight: has NaN or infinite"),
    "unknown": (edit_config(model_type="falcon"), "model_type 'falcon' is not supported"),
    "bias": (edit_config(attention_bias=True), "attention_bias is True"),
    "other width": (edit_config(intermediate_size=64), r"but config.json asks for \[32, 64\]|\[64, 32\]"),
    "no config": (lambda src: (src / "config.json").unlink(), "config.json: cannot read"),
    "no weights": (lambda src: (src / "model.safetensors").unlink(), "no weights"),
    "too large for fp16": (set_value(UP, 1e6), "too large for fp16"),
    "no JSON": (lambda src: (src / "config.json").write_text("{"), "config.json:1: not valid JSON"),
    "garbage": (lambda src: (src / "model.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
}


@pytest.mark.parametrize("method", ["noise", "drop", "split", "partition", "mix"])
@pytest.mark.parametrize("case", BROKEN)
def test_broken_sources_give_one_error_and_no_output(make_dense, tmp_path, case, method):
    edit, said = BROKEN[case]
    src = make_dense()
    edit(src)
    before = set(tmp_path.iterdir())
    settings = {"method": method, "router_init": "mlp_std", "partition_by": "kmeans"}
    with pytest.raises(SpesError, match=said) as error:
        run(
            [src, src] if method == "mix" else src,
            tmp_path / "moe",
            dtype="fp16" if case == "too large for fp16" else "source",
            **settings,
        )
    assert "\n" not in str(error.value)
    assert set(tmp_path.iterdir()) == before


def test_an_moe_is_not_upcycled_again(make_dense, tmp_path):
    run(make_dense(), tmp_path / "moe")
    with pytest.raises(CheckpointError, match="is a Mixture-of-Experts already"):
        run(tmp_path / "moe", tmp_path / "again")


def test_too_small_a_disk_is_found_before_anything_is_written(make_dense, tmp_path, monkeypatch):
    src = make_dense()
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 5000, 5000))
    with pytest.raises(CheckpointError, match=r"moe: needs 373,376 bytes of disk space, 5,000 are free"):
        run(src, tmp_path / "moe")
    assert set(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_nothing(make_dense, tmp_path, monkeypatch):
    src = make_dense()
    before = set(tmp_path.iterdir())
    real, written = os.pwrite, []

    def full_after_a_while(fd, data, offset):
        written.append(len(data))
        if len(written) > 20:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full_after_a_while)
    with pytest.raises(CheckpointError, match="cannot write: No space left on device"):
        run(src, tmp_path / "moe")
    assert set(tmp_path.iterdir()) == before
