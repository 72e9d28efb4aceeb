"""`spes-mega inspect`: figures against sums over the files themselves."""

import json

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from spes_mega.cli import main
from spes_mega.errors import CheckpointError
from spes_mega.hub.state.initial import commit_initial
from spes_mega.hub.state.ledger import RoundRecord
from spes_mega.hub.state.store import Store, Template
from spes_mega.layout import CheckpointWriter, open_checkpoint
from spes_mega.tools import similarity
from spes_mega.tools.inspect import command
from spes_mega.tools.similarity import expert_similarity
from tests.model import tiny


@pytest.fixture
def make(tmp_path):
    def make(family, dtype=torch.float32, change=None, **changes):
        model = tiny.section(family, **changes)
        weights = tiny.random_weights(model)
        if change:
            change(weights)
        with CheckpointWriter(tmp_path / family, model, dtype) as writer:
            for name, tensor in weights.items():
                writer.write(name, tensor)
        return tmp_path / family, weights

    return make


def report(path, *options):
    result = CliRunner().invoke(command, [str(path), "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def gate(layer, expert):
    return f"model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"


def test_counts_of_a_mixture_with_a_shared_expert_and_a_dense_layer(make):
    path, weights = make("qwen2_moe", dense_layers=(1,), ffn_hidden_size=72, num_layers=3)
    facts = report(path, "--no-similarity")
    sizes = {name: tensor.numel() for name, tensor in weights.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert facts["params_total"] == sum(sizes.values())
    assert facts["params_shared"] == sum(sizes.values()) - experts
    assert facts["params_expert"] == 3 * 48 * 64
    assert facts["params_active"] == facts["params_shared"] + 2 * 2 * facts["params_expert"]
    assert facts["bytes"] == 4 * facts["params_total"]
    assert facts["bytes_experts"] == 4 * experts
    assert facts["dtypes"] == {"float32": facts["bytes"]}
    assert (facts["moe_layers"], facts["num_experts"], facts["top_k"]) == (2, 6, 2)
    assert (facts["family"], facts["architecture"]) == ("qwen2_moe", "Qwen2MoeForCausalLM")
    assert (facts["qkv_bias"], facts["qk_norm"], facts["shared_expert_hidden_size"]) == (True, "none", 40)
    assert "similarity" not in facts


def test_rope_and_dtypes(make):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    path, _ = make(
        "llama",
        lambda name: torch.float32 if name.endswith("norm.weight") else torch.bfloat16,
        rope_scaling=rope,
        tie_embeddings=True,
    )
    facts = report(path)
    assert facts["rope_scaling"] == rope
    assert facts["rope_theta"] == 500_000.0
    norms = 5 * 64
    assert facts["dtypes"] == {"bfloat16": 2 * (facts["params_total"] - norms), "float32": 4 * norms}
    assert facts["params_active"] == facts["params_total"]
    text = CliRunner().invoke(command, [str(path)]).stdout
    assert 'RoPE         base 500000, {"rope_type": "llama3"' in text
    assert text.splitlines()[-1] == f"next: spes-mega upcycle {path}"


@pytest.mark.parametrize("block", [1, 1 << 26])
def test_similarity_is_the_cosine_of_whole_matrices(make, monkeypatch, block):
    monkeypatch.setattr(similarity, "_BLOCK_BYTES", block)  # one row at a time, or all

    def change(weights):
        weights[gate(0, 3)] = weights[gate(0, 1)] * 2.5
        weights[gate(1, 2)] = -weights[gate(1, 0)]
        weights[gate(1, 5)] = torch.zeros_like(weights[gate(1, 5)])

    path, weights = make("mixtral", change=change)
    with open_checkpoint(path) as checkpoint:
        found = expert_similarity(checkpoint)
    assert list(found) == [0, 1]
    for layer, matrix in found.items():
        rows = torch.stack([weights[gate(layer, e)].flatten().double() for e in range(6)])
        expected = F.cosine_similarity(rows[:, None], rows[None], dim=-1)
        torch.testing.assert_close(matrix, expected, atol=1e-12, rtol=0)
    assert found[0][1, 3] == pytest.approx(1, abs=1e-12)
    assert found[1][0, 2] == pytest.approx(-1, abs=1e-12)
    assert not found[1][5].any()
    facts = report(path)["similarity"]
    assert facts[1]["min"] == pytest.approx(-1)
    assert facts[0]["max"] == pytest.approx(1)
    pairs = [found[0][a, b].item() for a in range(6) for b in range(a)]
    assert facts[0]["mean"] == pytest.approx(sum(pairs) / 15)


def test_plot(make, tmp_path):
    path, _ = make("olmoe")
    result = CliRunner().invoke(command, [str(path), "--plot", str(tmp_path / "heat.png")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "heat.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert result.stdout.splitlines()[-1] == f"plot: {tmp_path}/heat.png"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_plot_of_nothing_is_refused(make, family, tmp_path, capsys):
    path, _ = make(family)
    with pytest.raises(SystemExit) as e:
        main(["inspect", str(path), "--no-similarity", "--plot", str(tmp_path / "heat.png")])
    assert e.value.code == CheckpointError.exit_code
    assert "no similarity of experts" in capsys.readouterr().err
    assert not (tmp_path / "heat.png").exists()


def test_a_hubs_rounds_and_snapshots_are_checkpoints(tmp_path):
    recipe = tiny.recipe(tiny.section("qwen3_moe"), steps=1)
    store = Store(tmp_path / "state", recipe)
    commit_initial(store, recipe, None)
    ledger = store.read_ledger(0)

    with store.committing(1, Template()) as draft:
        for name, tensor in tiny.random_weights(recipe.model).items():
            draft.writer.write(name, tensor)
        ledger.close_round(RoundRecord(1, 1, nodes=(0,), seconds=1.5, tokens=100))
        draft.complete(ledger)
    snapshot = store.snapshot(ledger.rounds[-1])
    count = sum(tensor.numel() for tensor in tiny.random_weights(recipe.model).values())
    for folder in (store.round_dir(0), store.round_dir(1), snapshot):
        facts = report(folder)
        assert facts["params_total"] == count
        assert facts["dtypes"] == {"float32": 4 * count}
        assert max(layer["max"] for layer in facts["similarity"]) < 0.2  # drawn apart from each other
    store.close()


@pytest.mark.parametrize("file", ["nowhere/heat.png", "heat.xyz"])
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_compared(make, file, tmp_path, capsys):
    path, _ = make("mixtral")
    with pytest.raises(SystemExit) as e:
        main(["inspect", str(path), "--plot", str(tmp_path / file)])
    assert e.value.code == CheckpointError.exit_code
    captured = capsys.readouterr()
    assert "a file in an existing folder, ending in .png" in captured.err
    assert "compare" not in captured.err
