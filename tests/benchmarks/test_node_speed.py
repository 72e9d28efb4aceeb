import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_benchmark_runs():
    done = subprocess.run(
        [sys.executable, "benchmarks/node_speed/run.py", "--small", "--rounds", "3", "--json"],
        cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    for suffix in ("", "_cpu"):
        speed = {name: figures[f"{name}_tokens_per{suffix}_s"] for name in ("ours_all", "ours_quarter", "hf")}
        assert figures[f"ours_all_over_hf{suffix}"] == pytest.approx(speed["ours_all"] / speed["hf"])
        assert figures[f"ours_quarter_over_all{suffix}"] == pytest.approx(speed["ours_quarter"] / speed["ours_all"])
        assert min(speed.values()) > 0
