"""How a node's processes end: refused by the hub, or asked to stop."""

import json
import signal
import time

import psutil
import pytest

from spes_mega.client.client import HubClient
from spes_mega.recipe import load_recipe


def test_another_recipe_is_refused_on_all_ranks_with_one_message(tmp_path, write_recipe, start_hub, start_node):
    hub = start_hub(write_recipe(tmp_path, "hubs"), tmp_path / "hub")
    other = write_recipe(tmp_path, "mine", train={"lr": 0.02})
    node = start_node(other, "--hub", hub.address, "--out", tmp_path / "out", ranks=2)
    assert node.wait() == 6
    assert node.output.count("error: ") == 1
    assert "recipe" in node.output
    assert "Traceback" not in node.output


# in the middle of a round; or at its end, while the push of the one before waits for the other node
@pytest.mark.parametrize("spes", [{"sync_every": 90_000}, {"sync_every": 2, "overlap": True}])
def test_sigterm_ends_all_ranks_and_the_hub_is_told(tmp_path, write_recipe, start_hub, start_node, spes):
    spes = {"num_nodes": 2, "join_deadline_s": 200} | spes
    recipe = write_recipe(tmp_path, spes=spes, train={"steps": 100_000, "log_every": 1})
    hub = start_hub(recipe, tmp_path / "hub")
    node = start_node(recipe, "--node", 1, "--hub", hub.address, "--out", tmp_path / "out", ranks=2)
    node.wait_for("step 3/", timeout=190)
    family = node.family()
    assert len(family) == 7  # spes-mega, the launcher and its child, two ranks with their monitors
    second = start_node(recipe, "--node", 0, "--hub", hub.address, "--out", tmp_path / "out")
    assert second.wait() == 3
    assert f"error: --out {tmp_path}/out: another node is using this directory" in second.output
    asked = time.monotonic()
    node.popen.send_signal(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - asked < 20
    assert "stopped on request" in node.output
    assert "Traceback" not in node.output
    assert psutil.wait_procs(family, timeout=1)[1] == []
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["checkpoints", "lock", "metrics.jsonl"]
    with HubClient.for_recipe(load_recipe(recipe), hub.address, 0) as client:
        (status,) = [n for n in client.status()["nodes"] if n["node"] == 1]
        assert status["state"] == "left"
