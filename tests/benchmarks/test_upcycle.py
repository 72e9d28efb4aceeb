import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("method", ["copy", "noise"])
def test_the_benchmark_runs(tmp_path, method):
    done = subprocess.run(
        [sys.executable, "benchmarks/upcycle/run.py", "--size", "tiny", "--method", method, "--folder", tmp_path,
         "--shards", "3", "--experts", "4", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    figures = json.loads(done.stdout)
    experts = 4 * 4 * 3 * 512 * 1536
    assert figures["bytes_out"] > 2 * experts
    assert figures["randn_numbers"] == (experts // 2 if method == "noise" else 0)
    assert figures["dd_s"] > 0
    assert figures["wall_s"] > 0
    # two matrices of 1.6 MB are worked on at a time; the rest is code, of which a CUDA build of torch brings more
    assert 1 < figures["peak_rss_bytes"] / figures["torch_rss_bytes"] < 1.5
    assert len(list((tmp_path / "dense-tiny-3").glob("*.safetensors"))) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["dense-tiny-3"]
