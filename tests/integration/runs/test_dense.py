"""A dense model on a lone node, started as the guides do it by hand: `deepspeed launchers/train.py`."""

import json
import math
import sys
from pathlib import Path

import torch

from spes_mega.layout import CheckpointWriter, expected_tensors, initial_tensor, open_checkpoint
from spes_mega.node.launch.command import free_port
from spes_mega.recipe import load_recipe
from tests.integration.processes import ROOT, Process

MODEL = {
    "family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "ffn_hidden_size": 48, "vocab_size": 48, "max_seq_len": 64, "tie_embeddings": True,
}  # fmt: skip


def test_dense_bf16_zero_3_from_a_checkpoint_and_back(tmp_path, write_recipe, running):
    """At learning rate 0 what comes out is what went in, through two ranks, bf16 and the fp32 masters."""
    train = {"lr": 0.0, "weight_decay": 0.1, "dtype": "bf16", "zero_stage": 3, "grad_accumulation": 2, "steps": 3}
    recipe_file = write_recipe(tmp_path, model=MODEL, train=train)
    model = load_recipe(recipe_file).model
    values = {n: initial_tensor(model, n, shape, 7) for n, shape in expected_tensors(model).items()}
    with CheckpointWriter(tmp_path / "init", model, torch.float32) as writer:
        for name, value in values.items():
            writer.write(name, value)
    deepspeed = Path(sys.executable).with_name("deepspeed")
    launcher = [deepspeed, "--num_gpus=2", f"--master_port={free_port()}", ROOT / "launchers/train.py"]
    out = tmp_path / "out"
    running(Process([*launcher, recipe_file, "--out", out, "--init", tmp_path / "init"])).succeed()
    with open_checkpoint(out / "final") as final:
        assert set(final.names) == set(values)
        assert all(torch.equal(final.read(name), value) for name, value in values.items())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(abs(row["lm_loss"] - math.log(48)) < 0.2 and row["grad_norm"] > 0 for row in rows)
    assert all(row["tokens_per_expert"] == [] and row["aux_loss"] == 0 for row in rows)
