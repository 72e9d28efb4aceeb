"""What is said of bytes before a run, against real rounds: payloads to the byte, and files on both disks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spes_mega.client.client import HubClient
from spes_mega.layout.names import expected_tensors
from spes_mega.tools.plan.wire_sizes import lost_bytes, round_bytes, spool_bytes, state_bytes
from tests.hub.fabricated import make_recipe, ownership, until_durable
from tests.wire.test_wire import DILOCO, UNALIKE, Node

MODEL = {"hidden_size": 128, "expert_hidden_size": 192, "vocab_size": 2048}
TOKENS = {0: 300, 1: 100}
SETTINGS = [
    {},
    {"wire": "int8"},
    {"wire": UNALIKE},
    {"wire": {"up": "bf16"}},
    {"wire": {"down": {"experts": "int8"}}},
    {"outer": {"shared": DILOCO, "experts": DILOCO}},
    {"wire": "int8", "outer": {"shared": DILOCO, "experts": DILOCO}},
    {"wire": "bf16", "ownership": "all"},
    {"wire": "int8", "ownership": [[0, 1, 2], [2, 3]]},
]


class Measured(Node):
    """A node whose traffic is taken round by round, and whose files lie in a folder of their own."""

    def __init__(self, client, recipe, folder):
        super().__init__(client, recipe)
        self.folder, self.moved, self.first = folder, [], client.bytes_down

    def pull(self):
        before = self.client.bytes_down
        super().pull()
        self.moved.append((self.client.bytes_up - sum(up for up, _ in self.moved), self.client.bytes_down - before))

    def disk_bytes(self):
        """Of the files without a name that this process has open there."""
        total = 0
        for fd in Path("/proc/self/fd").iterdir():
            if fd.is_symlink() and str(fd.readlink()).startswith(f"{self.folder}/"):
                total += 512 * fd.stat().st_blocks
        return total


@pytest.fixture
def played(start_hub, tmp_path):
    """Recipe, hub directory, and nodes after four rounds, of which the second and the fourth end with a merge."""
    nodes = []

    def play(**spes):
        recipe = make_recipe(MODEL, merge_interval=20, merge_steps=41, merge_alpha=0.5, **spes)
        hub = start_hub(recipe)
        for number in (0, 1):
            folder = tmp_path / f"node-{number}"
            folder.mkdir()
            client = HubClient.for_recipe(recipe, hub.address, number, spool_dir=folder)
            nodes.append(Measured(client, recipe, folder))
        for _ in range(4):
            with ThreadPoolExecutor() as pool:
                list(pool.map(Measured.push, nodes))
                list(pool.map(Measured.pull, nodes))
        return recipe, hub.state, nodes

    yield play
    for node in nodes:
        node.client.close()


@pytest.mark.parametrize("spes", SETTINGS, ids=str)
def test_payloads_and_files_are_those_of_real_rounds(played, spes):
    recipe, state, nodes = played(**spes)
    shapes = expected_tensors(recipe.model)
    for node in nodes:
        said = (shapes, recipe.spes, ownership(recipe), node.node, TOKENS[node.node])
        expected = round_bytes(*said)
        plain, merged = (expected.up, expected.down), (expected.up, expected.down_after_merge)
        assert node.moved == [plain, merged, plain, merged]
        spools = spool_bytes(*said)
        assert spools.state == node.first
        # The file for states is cut to what came last; and the system counts whole pages.
        there = spools.total - spools.state + node.moved[-1][1]
        assert node.disk_bytes() == pytest.approx(there, rel=0.02)
    last = until_durable(state / "rounds/000004")
    said = state_bytes(shapes, recipe.spes, ownership(recipe))
    files = {"residual": said.residual, "velocity": said.velocity, "delta": said.delta + said.merge}
    for part, size in files.items():
        file = last / f"{part}.safetensors"
        assert size == (file.stat().st_size if file.exists() else 0), part
    assert said.weights == pytest.approx((last / "model.safetensors").stat().st_size, rel=0.001)


@pytest.mark.parametrize("wire", ["fp32", {"up": {"experts": "int8"}}])
def test_what_a_checkpoint_keeps_of_lost_bytes(played, wire, tmp_path):
    recipe, _, nodes = played(wire=wire)
    said = lost_bytes(expected_tensors(recipe.model), recipe.spes, ownership(recipe), 0)
    nodes[0].client.save_residual(tmp_path / "residual")
    found = (tmp_path / "residual").stat().st_size if (tmp_path / "residual").exists() else 0
    assert said == pytest.approx(found, rel=0.05)
