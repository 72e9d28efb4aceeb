"""Codecs and outer optimizers over real gRPC: hub and nodes hold, bit for bit, what plain torch gives."""

import json
import os
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from spes_mega.client.client import PayloadError, StaleRoundError
from spes_mega.client.replica import Replica
from spes_mega.errors import StoreError
from spes_mega.hub.console import Console
from spes_mega.hub.run import Run
from spes_mega.layout.names import expected_tensors
from spes_mega.layout.storage.checksums import check_files
from spes_mega.wire.payload import StoredPayload
from spes_mega.wire.policy import WirePolicy
from tests.hub.fabricated import assert_same, fabricate, make_recipe, pull, push, read_state
from tests.hub.reference import Reference
from tests.hub.rpc.test_hub import until

DILOCO = {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
UNALIKE = {"up": {"shared": "bf16", "experts": "int8"}, "down": {"shared": "int8", "experts": "bf16"}}
TOKENS = {0: 300, 1: 100, 2: 200}


def lead_to(client, other):
    """Let a client go on with the hub of another one that was connected just now."""
    client._channel, other._channel = other._channel, client._channel
    client._delivery._channel = client._channel


def read_payload(path):
    with closing(StoredPayload.open(path, path.name)) as payload:
        return {name: payload.read(name) for name in payload.forms}


class Node:
    """A client that trains by fabrication."""

    def __init__(self, client, recipe, lost=None):
        """`lost` is a file with what the pushes of an earlier process of this node have lost."""
        self.client, self.recipe, self.node = client, recipe, client.node
        self.client.join()
        with client.pull() as pulled:
            if lost is not None:
                client.restore_residual(lost)
            self.round, self.state = pulled.round, dict(pulled)

    def train(self):
        """What comes out of local training: small steps away from what the node holds."""
        steps = fabricate(self.recipe, self.node, self.round)
        return {name: self.state[name] + 0.01 * step for name, step in steps.items()}

    def push(self):
        mine = self.train()
        push(self.client, self.round, mine, TOKENS[self.node])
        self.state.update(mine)

    def pull(self):
        self.client.wait_round(self.round + 1)
        self.round, news = pull(self.client, self.round)
        self.state.update(news)

    def follow(self):
        """Give up what it has trained, and take the newest state."""
        self.round, self.state = pull(self.client)


class Play:
    """Nodes at a hub, and the reference beside them."""

    def __init__(self, start_hub, connect, recipe):
        self.recipe, self.connect, self.start_hub = recipe, connect, start_hub
        self.hub = start_hub(recipe)
        self.nodes = [Node(connect(self.hub, node), recipe) for node in range(recipe.spes.num_nodes)]
        self.reference = Reference(recipe, read_state(self.hub.state / "rounds/000000"))
        self.alphas = {}

    def round(self, *contributing):
        nodes = [self.nodes[n] for n in contributing] if contributing else self.nodes
        trained = {node.node: node.train() for node in nodes}
        with ThreadPoolExecutor() as pool:
            list(pool.map(Node.push, nodes))
            list(pool.map(Node.pull, nodes))
        number = nodes[0].round
        record = nodes[0].client.status()["rounds"][-1]
        tokens = TOKENS if self.recipe.spes.weight_by_tokens else None
        self.reference.close(trained, tokens, record["merge_alpha"])
        self.check(number, nodes)

    def check(self, number, nodes):
        assert_same(read_state(self.hub.state / f"rounds/{number:06d}"), self.reference.published)
        check_files(self.hub.state / f"rounds/{number:06d}")
        for node in nodes:
            assert_same(node.state, self.reference.nodes[node.node])

    def beside(self, number, file):
        return read_payload(self.hub.state / f"rounds/{number:06d}" / file)

    def restart(self):
        self.hub.stop()
        self.hub = self.start_hub(self.recipe)
        for node in self.nodes:
            lead_to(node.client, self.connect(self.hub, node.node))


@pytest.fixture
def play(start_hub, connect):
    def begin(**spes):
        steps = 10 * spes.pop("rounds", 4)
        return Play(start_hub, connect, make_recipe(train={"steps": steps}, **spes))

    return begin


@pytest.mark.parametrize("merging", [False, True])
@pytest.mark.parametrize(
    "spes",
    [
        {"wire": "bf16"},
        {"wire": "int8"},
        {"wire": UNALIKE},
        {"wire": {"up": "bf16"}},
        {"wire": {"down": "int8"}},
        {"wire": "int8", "ownership": "all", "outer": {"shared": DILOCO, "experts": DILOCO}},
        {"wire": "bf16", "outer": {"shared": DILOCO}, "weight_by_tokens": True},
        {"wire": {"down": "bf16"}, "num_nodes": 3, "ownership": [[0, 1], [1, 2], [3]], "weight_by_tokens": True},
        {"wire": {"up": "int8"}, "outer": {"experts": {"lr": 0.5}}},
        {"outer": {"shared": DILOCO, "experts": DILOCO}},
        {"weight_by_tokens": True, "ownership": "all"},
    ],
    ids=str,
)
def test_rounds_equal_plain_torch_bit_for_bit(play, spes, merging):
    run = play(**spes, merge_interval=10 if merging else 1000, merge_steps=31, merge_alpha=0.62)
    for number in range(1, 4):
        run.round()
        wire = run.recipe.spes.wire
        if not wire.down.lossless:
            for name, residual in run.beside(number, "residual.safetensors").items():
                assert torch.equal(residual, run.reference.residual[name]), name
        if run.recipe.spes.outer.shared.momentum:
            for name, velocity in run.beside(number, "velocity.safetensors").items():
                assert torch.equal(velocity, run.reference.velocity[name]), name
    newcomer = Node(run.connect(run.hub, 0), run.recipe)
    for name, tensor in newcomer.state.items():
        private = run.reference.private(name, 0)
        assert torch.equal(tensor, run.reference.exact(name) if private else run.reference.published[name]), name


def test_a_late_and_a_new_node_catch_up_and_nobody_drifts_apart(start_hub, connect):
    recipe = make_recipe(
        wire=UNALIKE, num_nodes=3, min_nodes=2, round_deadline_s=3, rpc_deadline_s=3, train={"steps": 90}
    )
    run = Play(start_hub, connect, recipe)
    run.round()
    late = run.nodes[1]
    missed = late.train()
    run.round(0, 2)
    lost = dict(late.client._replica._residual._current)
    before = late.client.bytes_down
    with pytest.raises(StaleRoundError):
        push(late.client, late.round, missed, TOKENS[1])
    assert late.client._replica._residual._current == lost  # what the refused push lost is not carried on
    late.follow()
    assert late.round == 2
    # a change for what all hold, and the exact values of its own experts: far less than all in fp32
    assert late.client.bytes_down - before < 0.7 * sum(4 * tensor.numel() for tensor in late.state.values())
    for name in late.state:
        run.reference.nodes[1][name] = run.reference.given(name, 1)
    run.check(2, [late])
    run.nodes[2] = Node(connect(run.hub, 2), recipe)  # a new process has lost what its pushes lost
    run.reference.lost[2] = {}
    for name in late.state:
        run.reference.nodes[2][name] = run.reference.given(name, 2)
    run.check(2, [run.nodes[2]])
    run.round()
    run.round()


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_hub_and_owner_differ_by_what_the_last_push_lost_also_after_a_merge(play, wire):
    run = play(wire=wire, merge_interval=10, merge_steps=21)
    for _ in range(3):
        run.round()
        for node in run.nodes:
            for name in filter(lambda name: run.reference.private(name, node.node), node.state):
                lost = run.reference.lost[node.node][name]
                # sums in another order; what a push loses is 1e-5 and more
                assert torch.allclose(run.reference.exact(name) + lost, node.state[name], rtol=0, atol=1e-6)
                assert lost.abs().max() > 1e-5


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_hub_that_is_started_again_in_the_middle_goes_on_bit_for_bit(play, wire):
    run = play(wire=wire, outer={"shared": DILOCO}, num_nodes=2, rounds=5, snapshot_every=2)
    run.round()
    trained = {node.node: node.train() for node in run.nodes}
    run.nodes[0].push()
    run.restart()  # one push is there
    run.nodes[1].push()
    for node in run.nodes:
        node.client.wait_round(2)
    run.restart()  # the round is closed, and nobody has it yet
    for node in run.nodes:
        node.pull()
    run.reference.close(trained)
    run.check(2, run.nodes)
    run.round()
    snapshot = run.hub.state / "snapshots/round-000002"
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors"]
    metrics = run.hub.state / "metrics.jsonl"
    until(lambda: len(metrics.read_text().splitlines()) == 3)  # the last line comes after nodes are told of the round
    assert [json.loads(line)["round"] for line in metrics.read_text().splitlines()] == [1, 2, 3]


def test_a_state_whose_residual_is_damaged_or_missing_is_refused(play):
    run = play(wire="bf16")
    run.round()
    run.hub.stop()
    path = run.hub.state / "rounds/000001/residual.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"residual.safetensors: damaged: its checksum is .*Restore"):
        Run(run.recipe, run.hub.state, None, Console())
    path.unlink()
    with pytest.raises(StoreError, match=r"residual.safetensors: missing or damaged: .*Restore"):
        Run(run.recipe, run.hub.state, None, Console())


def test_lossy_payloads_are_as_small_as_they_should_be(start_hub, connect, tmp_path):
    moved = {}
    model = {"hidden_size": 64, "expert_hidden_size": 128, "vocab_size": 512}
    for wire in ("fp32", "bf16", "int8"):
        recipe = make_recipe(model, wire=wire)
        hub = start_hub(recipe, tmp_path / wire)
        nodes = [Node(connect(hub, node), recipe) for node in (0, 1)]
        first = [node.client.bytes_down for node in nodes]
        for node in nodes:
            node.push()
        for node in nodes:
            node.pull()
        moved[wire] = nodes[0].client.bytes_up, nodes[0].client.bytes_down - first[0]
        traffic = nodes[0].client.status()["nodes"][0]
        assert (traffic["bytes_up"], traffic["bytes_down"]) == (nodes[0].client.bytes_up, nodes[0].client.bytes_down)
    for wire, ratio in (("bf16", 0.5), ("int8", 0.25)):
        for fp32, lossy in zip(moved["fp32"], moved[wire], strict=True):
            assert ratio < lossy / fp32 < ratio + 0.05  # headers, and scales of 64 and 128 columns


def test_what_pushes_lost_can_be_kept_for_another_process(play, tmp_path):
    run = play(wire="int8", rounds=6)
    run.round()
    run.round()
    node = run.nodes[0]
    node.client.save_residual(tmp_path / "lost")
    again = Node(run.connect(run.hub, 0), run.recipe, tmp_path / "lost")
    with pytest.raises(ValueError, match="something was read already"):
        again.client.restore_residual(tmp_path / "lost")
    lost = run.reference.lost[0]
    assert_same(read_payload(tmp_path / "lost"), lost)
    run.nodes[0] = again
    for name in again.state:
        run.reference.nodes[0][name] = run.reference.given(name, 0)
    run.round()
    other = make_recipe({"hidden_size": 32}, wire="int8")
    replica = Replica(expected_tensors(other.model), WirePolicy(other.spes), tmp_path, lambda absent: ())
    with closing(replica), pytest.raises(PayloadError, match="was not expected"):
        replica.restore_residual(tmp_path / "lost")


def spoiled_push(node, spoil):
    """Pushes what `spoil` makes of the bytes of a push."""
    replica = node.client._replica
    encode = replica.encode

    def spoiling(file, *rest):
        size = encode(file, *rest)
        spoil(file, StoredPayload(file, "push"))
        return size

    replica.encode = spoiling
    try:
        node.push()
    finally:
        replica.encode = encode


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -0.5])
def test_a_push_with_a_scale_that_cannot_be_is_refused_and_the_next_one_counts(play, scale):
    run = play(wire="int8")

    def spoil(file, payload):
        offset, _ = next(payload.raw("model.norm.weight"))
        os.pwrite(file.fileno(), struct.pack("<f", scale), offset)

    state = dict(run.nodes[0].state)
    with pytest.raises(PayloadError, match=r"model\.norm\.weight has a scale that is negative or gives infinite"):
        spoiled_push(run.nodes[0], spoil)
    run.nodes[0].state = state
    run.round()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_in_any_codec(play, value):
    for wire in ("bf16", "int8"):
        run = play(wire=wire, num_nodes=1)
        node = run.nodes[0]
        state = dict(node.state)
        node.state["model.norm.weight"] = torch.full_like(state["model.norm.weight"], value)
        with pytest.raises(PayloadError, match=r"NaN or infinite|infinite values"):
            node.push()
        node.state = state
        run.round()
        run.hub.stop()
        shutil.rmtree(run.hub.state)


def test_a_push_in_another_codec_is_refused(play):
    run = play(wire="bf16")
    client = run.nodes[0].client
    client._replica = None  # sends fp32
    with pytest.raises(PayloadError, match=r"a push of .* bytes: the tensors of this node take"):
        push(client, 0, run.nodes[0].train())
