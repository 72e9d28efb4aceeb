"""Branch-Train-MiX: several checkpoints of one shape become one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spes_mega.errors import CheckpointError, RecipeError
from spes_mega.layout import open_checkpoint
from tests.upcycle.making import run, verified

NAMES = ("math", "code", "law")


@pytest.fixture
def branches(make_dense):
    """Three models of one shape with different weights."""

    def make(**changes):
        folders = []
        for k, name in enumerate(NAMES):
            folder = make_dense(name=name, **changes)
            state = load_file(folder / "model.safetensors")
            for tensor in state.values():
                tensor += torch.randn(tensor.shape, generator=torch.Generator().manual_seed(k)) * 0.1
            save_file(state, folder / "model.safetensors", {"format": "pt"})
            folders.append(folder)
        return folders

    return make


def test_experts_come_from_their_source_and_the_rest_is_the_average(branches, tmp_path):
    sources = branches()
    run(sources, tmp_path / "moe", method="mix", num_experts=6)
    states = [load_file(source / "model.safetensors") for source in sources]
    with open_checkpoint(tmp_path / "moe") as moe:
        for name in moe.names:
            if ".experts." in name:
                source = states[int(name.split(".experts.")[1].split(".")[0]) // 2]
                dense = ".mlp.".join((name.split(".mlp.")[0], name.split(".", 6)[-1]))
                assert torch.equal(moe.read(name), source[dense]), name
            elif ".mlp.gate." not in name:
                mean = torch.stack([state[name].double() for state in states]).mean(0)
                assert torch.equal(moe.read(name), mean.float()), name


def test_verify_compares_each_expert_with_its_own_source(branches, tmp_path):
    sources = branches()
    plan = run(sources, tmp_path / "moe", method="mix", num_experts=6, router_init="normal")
    found = verified(sources, tmp_path / "moe", plan)
    assert "different checkpoints" in found.difference
    assert all(layer.experts <= 1e-5 < 0.01 < layer.output for layer in found.layers)
    assert found.equal_tensors == 2 * 8 + 3


def test_a_model_mixed_with_itself_is_a_copy(make_dense, logits_of, tmp_path):
    src = make_dense(dtype=torch.bfloat16)
    run([src, src, src], tmp_path / "mix", method="mix", num_experts=6)
    run(src, tmp_path / "copy", method="copy", num_experts=6)
    mixed, copied = (load_file(tmp_path / name / "model.safetensors") for name in ("mix", "copy"))
    assert all(torch.equal(mixed[name], copied[name]) for name in copied)


def test_layers_that_stay_dense_are_averaged(branches, tmp_path):
    sources = branches()
    plan = run(sources, tmp_path / "moe", method="mix", num_experts=3, moe_layers="1")
    verified(sources, tmp_path / "moe", plan)
    name = "model.layers.0.mlp.down_proj.weight"
    mean = torch.stack([load_file(s / "model.safetensors")[name].double() for s in sources]).mean(0).float()
    with open_checkpoint(tmp_path / "moe") as moe:
        assert torch.equal(moe.read(name), mean)


def tokenizer(folder, **changes):
    raw = {"model": {"vocab": {"a": 0}}, "added_tokens": [], "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(raw | changes))


def test_sources_that_do_not_match_are_refused_by_name(branches, make_dense, tmp_path):
    sources = branches()
    narrow = make_dense(name="narrow", intermediate_size=40)
    other_rope = make_dense(name="other_rope", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    for wrong, said in ((narrow, "ffn_hidden_size: 48 expected, 40 found"), (other_rope, "rope_theta: 50000.0 expec")):
        with pytest.raises(CheckpointError, match=rf"/{wrong.name}: does not match .*/math: {said}"):
            run([*sources, wrong], tmp_path / "moe", method="mix")
    assert not (tmp_path / "moe").exists()


def test_sources_with_another_tokenizer_are_refused_by_name(branches, tmp_path):
    sources = branches()
    tokenizer(sources[0])
    settings = {"method": "mix", "num_experts": 3}
    with pytest.raises(CheckpointError, match=r"/code: its tokenizer is not .*/math: tokenizer.json \(missing in code"):
        run(sources, tmp_path / "moe", **settings)
    for source in sources[1:]:
        tokenizer(source, padding={"length": 5})  # no part of what turns text into ids
    run(sources, tmp_path / "moe", **settings)
    tokenizer(sources[2], model={"vocab": {"b": 0}})
    with pytest.raises(CheckpointError, match=r"/law: its tokenizer is not that of .*/math: tokenizer.json \(model\)"):
        run(sources, tmp_path / "again", **settings)
    tokenizer(sources[2])
    for source, data in zip(sources, (b"1", b"1", b"2"), strict=True):
        (source / "tokenizer.json").unlink()
        (source / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"/law: its tokenizer is not that of .*/math: tokenizer.model$"):
        run(sources, tmp_path / "again", **settings)


def test_numbers_of_sources_that_make_no_sense(branches, make_dense, tmp_path):
    sources = branches()
    for given, settings, said in (
        (sources[:1], {"method": "mix"}, "method mix needs at least two source checkpoints"),
        (sources, {"method": "copy"}, "method copy takes one source checkpoint, 3 were given"),
        (sources, {"method": "mix", "num_experts": 8}, "num_experts 8 is not a multiple of the number of sources, 3"),
    ):
        with pytest.raises(RecipeError, match=said):
            run(given, tmp_path / "moe", **settings)


def test_nan_in_any_source_is_found(branches, tmp_path):
    sources = branches()
    state = load_file(sources[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    save_file(state, sources[1] / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"/code: model.norm.weight: has NaN"):
        run(sources, tmp_path / "moe", method="mix", num_experts=3)
    assert not (tmp_path / "moe").exists()
