"""A node's memory on a GPU against what `spes-mega plan` says of it, and its speed by how many experts it owns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spes_mega.recipe import load_recipe
from spes_mega.tools.plan.memory import rank_memory

pytestmark = [pytest.mark.requires_gpu, pytest.mark.timeout(900)]
EXPERTS = 16
OWNED = {"1/16": 1, "1/4": EXPERTS // 4, "all": EXPERTS}
# 0.9 B parameters: with all of them trained, 16 GB of weights, gradients and Adam, beside some GB of activations.
MODEL = {
    "family": "qwen3_moe", "num_layers": 8, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 16, "head_dim": 64,
    "num_experts": EXPERTS, "top_k": 2, "expert_hidden_size": 2048, "vocab_size": 32768, "max_seq_len": 2048,
    "tie_embeddings": True,
}  # fmt: skip
TRAIN = {"seq_len": 2048, "micro_batch_size": 4, "lr": 1e-4, "warmup_steps": 0, "steps": 1000, "dtype": "bf16"}


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """(implementation, owned experts) -> figures of a process of its own, each run when first asked for."""
    found = {}

    def run(implementation, owned):
        if (implementation, owned) not in found:
            recipe = recipe_file(tmp_path_factory.mktemp("recipe"), implementation)
            command = [sys.executable, "-m", "tests.gpu.node_steps", recipe, str(owned)]
            done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            found[implementation, owned] = json.loads(done.stdout.splitlines()[-1])
        return found[implementation, owned]

    return run


def recipe_file(folder, implementation="local"):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL | {"implementation": implementation}, "train": TRAIN}))
    return path


@pytest.mark.parametrize("share", OWNED)
def test_memory_is_the_planned_one(figures, implementation, share, tmp_path):
    found = figures(implementation, OWNED[share])
    assert found["transformer_engine"] == (implementation == "transformer_engine")
    assert found["losses"][-1] < found["losses"][0]  # it does train
    memory = rank_memory(load_recipe(recipe_file(tmp_path)), OWNED[share], 1, "cuda")
    planned = memory.peak - memory.runtime  # what the allocator does not see
    assert planned == pytest.approx(found["peak_bytes"], rel=0.15), memory.as_json()


def test_fewer_owned_experts_need_less(figures, implementation):
    peaks = [figures(implementation, owned)["peak_bytes"] for owned in OWNED.values()]
    assert peaks == sorted(peaks)
    assert peaks[0] < 0.6 * peaks[-1]


def test_tokens_a_second_are_shown(figures, implementation, capsys):
    """Printed only: how fast a machine is says nothing about the code."""
    speeds = {share: figures(implementation, owned)["tokens_per_s"] for share, owned in OWNED.items()}
    found = figures(implementation, EXPERTS)
    with capsys.disabled():
        print(f"\n{implementation} on {found['device']}, torch {found['torch']}:")
        for share, owned in OWNED.items():
            peak = figures(implementation, owned)["peak_bytes"] / 1e9
            ratio = speeds[share] / speeds["all"]
            print(f"  {share:>5} owned: {speeds[share]:9,.0f} tokens/s, {ratio:.2f} x all; peak {peak:.2f} GB")
    assert all(speed > 0 for speed in speeds.values())
