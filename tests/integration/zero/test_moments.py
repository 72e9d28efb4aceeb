"""Adam's moments through ZeRO 1-3 under the deepspeed launcher, with one rank and two: see moments_exactness.py."""

import json
import re
from pathlib import Path

import pytest

from spes_mega.node.launch.command import free_port
from tests.integration.processes import PYTHON, Process

SCRIPT = Path(__file__).with_name("moments_exactness.py")
KINDS = {"first_step": 6, "carried_over": 4, "change_of_owner": 10}
CASES = [(1, "bf16", 2), *((stage, dtype, 1) for stage in (1, 2, 3) for dtype in ("fp32", "bf16"))]


@pytest.fixture(scope="module", params=[1, 2])
def reports(request):
    launcher = ["-m", "deepspeed.launcher.runner", "--quiet", f"--num_gpus={request.param}"]
    process = Process([*PYTHON, *launcher, f"--master_port={free_port()}", SCRIPT])
    try:
        process.succeed(600)
    finally:
        process.end()
    found = [json.loads(line) for line in re.findall(r"\{.*?\}+(?=\n|\{)", process.output)]
    assert len(found) == request.param * len(KINDS) * len(CASES)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "dtype", "accumulation"), CASES)
def test_the_optimizers_state_is_read_set_and_kept_exactly(reports, kind, stage, dtype, accumulation):
    which = {"kind": kind, "stage": stage, "dtype": dtype, "accumulation": accumulation}
    for report in (r for r in reports if which.items() <= r.items()):
        facts = {key: value for key, value in report.items() if key not in ("rank", *which)}
        assert len(facts) == KINDS[kind]
        assert set(facts.values()) == {True}, facts
