"""The demo as `make demo` runs it: the main job from text to a snapshot that transformers opens."""

import json

import pytest

from tests.integration.processes import COMMAND, Process

KEYS = {
    "dense_val_loss", "upcycled_val_loss", "final_val_loss", "transformers_val_loss", "nodes", "rounds", "merges",
    "params_total", "params_active", "params_trainable_per_node", "bytes_up_per_node_round",
    "bytes_down_per_node_round", "snapshot", "seconds",
}  # fmt: skip


@pytest.mark.timeout(900)
def test_demo_trains_an_upcycled_model_together_and_says_what_it_measured(tmp_path):
    out = tmp_path / "demo"
    demo = Process([*COMMAND, "demo", "--out", out])
    assert demo.wait(timeout=840) == 0, demo.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["final_val_loss"] < summary["upcycled_val_loss"]
    assert summary["transformers_val_loss"] == pytest.approx(summary["final_val_loss"], abs=1e-3)
    assert summary["nodes"] == 2
    assert summary["rounds"] >= 4
    assert summary["merges"] == 1
    assert summary["params_trainable_per_node"][0] < summary["params_total"]
    for k in range(2):
        rows = [json.loads(line) for line in (out / f"node-{k}/metrics.jsonl").read_text().splitlines()]
        pushes = [row["bytes_up"] for row in rows if row["bytes_up"]]
        assert len(pushes) == summary["rounds"]
        # fp32 weights that the node trains, and a header for their names
        weights = 4 * summary["params_trainable_per_node"][k]
        assert all(weights < sent < weights * 1.01 for sent in pushes)
    assert (out / "loss.png").stat().st_size > 10_000
