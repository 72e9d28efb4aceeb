import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from spes_mega.errors import CheckpointError, RecipeError, VerificationError
from spes_mega.layout import CheckpointWriter, expected_tensors, initial_tensor, open_checkpoint
from spes_mega.recipe import ModelSection, UpcycleSection
from upcycle.command import command
from upcycle.plan import make_plan
from upcycle.verify import verify

ROOT = Path(__file__).parents[2]


def call(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)


def test_without_options_it_is_the_published_setup(make_dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    src = make_dense(name="Qwen3-1.7B")
    report = json.loads(call(src, "--json").stdout)
    assert report["out"] == "Qwen3-1.7B-moe"
    assert (report["num_experts"], report["top_k"], report["method"]) == (8, 2, "noise")
    with open_checkpoint(tmp_path / "Qwen3-1.7B-moe") as moe:
        sizes = {name: moe.read(name).numel() for name in moe.names}
    experts = 8 * 2 * 3 * 32 * 48
    assert report["params_total"] == sum(sizes.values())
    assert report["params_active"] == sum(sizes.values()) - experts + experts // 4
    facts = json.loads((tmp_path / "Qwen3-1.7B-moe/upcycle.json").read_text())
    assert facts["settings"]["noise_std"] == 0.02
    assert facts["settings"]["noise_fraction"] == 0.5


def test_verify_prints_the_largest_difference(make_dense, tmp_path):
    src = make_dense("llama")
    exact = json.loads(call(src, "--out", tmp_path / "a", "--method", "copy", "--verify", "--json").stdout)
    assert exact["should_be_equal"] is True
    assert exact["max_logit_difference"] <= 1e-4
    noisy = json.loads(call(src, "--out", tmp_path / "b", "--verify", "--json").stdout)
    assert noisy["should_be_equal"] is False
    assert noisy["max_logit_difference"] > 1e-2
    text = call(src, "--out", tmp_path / "c", "--method", "copy", "--verify").stdout
    assert "largest difference of logits on 128 random tokens" in text
    assert "should be equal, and are" in text


@pytest.mark.parametrize("kind", ["safetensors", "pt", "given config"])
def test_verify_opens_single_files(make_dense, tmp_path, kind):
    src = make_dense(tie_word_embeddings=True)
    config, file = src / "config.json", src / "model.safetensors"
    if kind == "pt":
        file = tmp_path / "a.pt"
        torch.save({"model": load_file(src / "model.safetensors")}, file)
    options = ["--config", config] if kind != "safetensors" else []
    source = src if kind == "given config" else file
    done = call(source, *options, "--out", tmp_path / "moe", "--method", "copy", "--verify", "--json")
    assert json.loads(done.stdout)["max_logit_difference"] <= 1e-4


def test_verify_finds_a_wrong_result(make_dense, tmp_path):
    src, out = make_dense(), tmp_path / "moe"
    call(src, "--out", out, "--method", "copy")
    state = load_file(out / "model.safetensors")
    for expert in range(8):
        state[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"][4] += 0.01
    save_file(state, out / "model.safetensors", {"format": "pt"})
    with open_checkpoint(src) as source:
        plan = make_plan(source, UpcycleSection(method="copy"))
    with pytest.raises(VerificationError, match=r"moe: its logits differ .* at most 0.0001 was expected"):
        verify(src, None, out, plan)


def test_verify_without_transformers_says_what_to_install(make_dense, tmp_path, monkeypatch):
    src = make_dense()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(VerificationError, match=r"pip install 'spes-mega\[hf\]'"):
        call(src, "--out", tmp_path / "moe", "--verify")
    assert not (tmp_path / "moe").exists()


def test_a_dry_run_gives_the_plan_and_writes_nothing(make_dense, tmp_path):
    src = make_dense()
    before = set(tmp_path.iterdir())
    plan = json.loads(call(src, "--out", tmp_path / "moe", "--num-experts", 3, "--dry-run", "--json").stdout)
    text = call(src, "--out", tmp_path / "moe", "--num-experts", 3, "--dry-run").stdout
    assert set(tmp_path.iterdir()) == before
    assert "6 x model.layers.*.mlp.experts.*.gate_proj.weight  [48, 32] float32" in text
    done = json.loads(call(src, "--out", tmp_path / "moe", "--num-experts", 3, "--json").stdout)
    assert {key: plan[key] for key in done if key in plan and key != "dry_run"} == {
        key: done[key] for key in done if key in plan and key != "dry_run"
    }
    with open_checkpoint(tmp_path / "moe") as moe:
        assert [(t["name"], tuple(t["shape"])) for t in plan["tensors"]] == [(n, moe.shape(n)) for n in moe.names]


def test_settings_from_a_recipe_which_the_result_must_fit(make_dense, tmp_path):
    src = make_dense()
    call(src, "--out", tmp_path / "a", "--num-experts", 4, "--seed", 77, "--method", "copy")
    recipe = tmp_path / "a/recipe.yaml"
    call(src, "--out", tmp_path / "b", "--recipe", recipe)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    with pytest.raises(RecipeError, match=r"recipe.yaml: .*num_experts: 4 expected, 6 found"):
        call(src, "--out", tmp_path / "c", "--recipe", recipe, "--num-experts", 6)


def test_settings_that_make_no_sense(make_dense, tmp_path):
    src = make_dense()
    for options, said in (
        (["--top-k", 9], "top_k 9 is more than num_experts 8"),
        (["--top-k", 1], "top_k 1 renormalized is always 1, so the router would get no gradient"),
        (["--num-experts", 1], "num_experts must be at least 2"),
        (["--noise-fraction", 1.5], "noise_fraction"),
    ):
        with pytest.raises(RecipeError, match=said):
            call(src, "--out", tmp_path / "moe", *options)
    call(src, "--out", tmp_path / "moe")
    with pytest.raises(CheckpointError, match="exists already"):
        call(src, "--out", tmp_path / "moe")


def test_help_names_every_setting():
    text = call("--help").stdout
    for name in UpcycleSection.model_fields:
        assert "--" + name.replace("_", "-") in text


@pytest.fixture(scope="module")
def larger_dense(tmp_path_factory):
    """104 MB in fp32, of which the largest tensor takes 4 MB."""
    model = ModelSection(
        family="qwen3", num_layers=12, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=32,
        ffn_hidden_size=1024, vocab_size=1000, max_seq_len=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("larger") / "dense"
    with CheckpointWriter(path, model, torch.float32, max_shard_bytes=20_000_000, fsync=False) as writer:
        for name, shape in expected_tensors(model).items():
            writer.write(name, initial_tensor(model, name, shape, 1))
    return path


MEASURE = """
import re, sys
from pathlib import Path
from spes_mega.layout import open_checkpoint
from spes_mega.recipe import UpcycleSection
from upcycle.pipeline import upcycle
from upcycle.plan import make_plan
def peak():  # not ru_maxrss: a child inherits that of its parent
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
with open_checkpoint(Path(sys.argv[1])) as source:
    upcycle(source, Path(sys.argv[2]), make_plan(source, UpcycleSection(num_experts=int(sys.argv[3]))))
print(peak() - before)
"""


def test_memory_stays_bounded(larger_dense, tmp_path):
    total = sum(file.stat().st_size for file in larger_dense.glob("*.safetensors"))
    assert total > 80_000_000
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, larger_dense, tmp_path / "moe", "6"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sum(file.stat().st_size for file in (tmp_path / "moe").glob("*.safetensors")) > 400_000_000
    # A matrix of 2 MB in and out, the draws of its noise, and what torch sets up once: 19 to 29 MB were seen.
    assert int(done.stdout) < 45_000_000


def test_sigterm_leaves_nothing_half_written(larger_dense, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "spes_mega.cli", "upcycle", larger_dense, "--out", tmp_path / "moe",
         "--num-experts", "16"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip().endswith("interrupted")
    assert list(tmp_path.iterdir()) == []
