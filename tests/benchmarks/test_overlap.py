import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs(tmp_path):
    small = ["--steps", "5", "--sync-every", "1", "--runs", "1", "--folder", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "benchmarks/overlap/run.py", *small, "--json"],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["lost_ratio"] == pytest.approx(figures["overlap_lost_s"] / figures["plain_lost_s"])
    # what the line needs for some 300 kB each way
    assert figures["plain_lost_s"] > 0.4
    assert figures["heldout_differences"] == [figures["overlap_heldout_loss"] - figures["plain_heldout_loss"]]
    # of 64 tokens, before anything is learned
    assert 3.5 < figures["plain_heldout_loss"] < 4.4
    assert not (tmp_path / "out").exists()
