"""A node of one rank in this process, with its DeepSpeed engine, against a real hub process: what can go wrong."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spes_mega.client import client as client_module
from spes_mega.client.client import HubClient
from spes_mega.errors import SpesError
from spes_mega.layout import expert_of
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.hub_node import HubNode
from spes_mega.node.sync.lone_node import LoneNode
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.outer.ownership import ownership_of, pushed_names
from spes_mega.recipe import load_recipe
from tests.integration.processes import Hub

OWNED = {0: (0, 1), 1: (2, 3)}


@pytest.fixture(scope="module")
def weights(ranks, write_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    recipe = load_recipe(write_recipe(folder, spes={"num_nodes": 2}))
    return LocalModel(recipe, OWNED[0], ranks, StopRequest(), folder)


class Run:
    """A hub process, node 0 as a HubNode, and node 1 as a bare client."""

    def __init__(self, recipe_file, state, ranks):
        self.hub = Hub(recipe_file, state)
        self.recipe_file, self.recipe, self.ranks = recipe_file, load_recipe(recipe_file), ranks
        self.said = []
        self.other = HubClient.for_recipe(self.recipe, self.hub.address, 1)

    def node(self):
        client = HubClient.for_recipe(self.recipe, self.hub.address, 0)
        ownership = ownership_of(4, 2, self.recipe.spes.ownership)
        return HubNode(0, ownership, self.ranks, StopRequest(), client, self.said.append)

    def push_as_node_1(self, weights, round_):
        names = pushed_names(weights.shapes, ownership_of(4, 2), 1, expert_of)
        with self.other.pull() as pulled:
            self.other.push(round_, {n: pulled.shapes[n] for n in names}, ((n, pulled.read(n) + 1) for n in names))


@pytest.fixture
def start(tmp_path, write_recipe, ranks):
    runs = []

    def start(**spes):
        recipe_file = write_recipe(tmp_path, spes={"num_nodes": 2, "rpc_deadline_s": 5} | spes)
        runs.append(Run(recipe_file, tmp_path / "hub", ranks))
        return runs[-1]

    yield start
    for run in runs:
        run.hub.end()


def masters(weights):
    out = {}
    weights.collect(
        weights.shapes, lambda shapes, tensors: out.update((n, t.clone()) for n, t in tensors), rounded=True
    )
    return out


def test_a_straggler_takes_the_newest_state_and_goes_on(start, weights):
    run = start(min_nodes=1, round_deadline_s=6)
    run.other.join()
    node = run.node()
    node.join()
    assert node.start(weights) == 0
    run.push_as_node_1(weights, 0)
    assert run.other.wait_round(1) == 1  # at the deadline, without node 0
    assert node.exchange(weights, 0, tokens=1) == 1
    assert "too late for round 0" in run.said[-1]
    with run.other.pull() as state:
        found = masters(weights)
        for name, tensor in state:
            frozen = (key := expert_of(name)) and key.expert not in OWNED[0]
            assert torch.equal(found[name], tensor.bfloat16().float() if frozen else tensor), name
    run.push_as_node_1(weights, 1)
    assert node.exchange(weights, 1, tokens=1) == 2  # in time again


def test_a_node_that_came_back_after_its_push_waits_for_the_round(start, weights):
    run = start()
    run.other.join()
    first = run.node()
    first.join()
    first.start(weights)
    first._push(weights, 0, tokens=1)
    run.push_as_node_1(weights, 0)
    again = run.node()
    again.join()
    assert again.start(weights) == 1
    # node 1 pushed everything plus 1, node 0 what it had: of shared weights that is plus 1/2 on average
    drawn_norm = masters(weights)["model.norm.weight"]
    assert torch.equal(drawn_norm, torch.full_like(drawn_norm, 1.5))


def test_a_node_that_came_back_trains_again_what_the_hub_loses_meanwhile(start, weights, monkeypatch):
    monkeypatch.setattr(client_module, "POLL_S", 0.5)
    run = start(rpc_deadline_s=60)
    run.other.join()
    first = run.node()
    first.join()
    first.start(weights)
    first._push(weights, 0, tokens=1)
    again = run.node()

    def lose():
        while not run.said:
            time.sleep(0.05)
        run.hub.end()
        (path,) = (run.hub.state / "pushes").rglob("node-000-*.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        run.hub = Hub(run.recipe_file, run.hub.state, "--listen", run.hub.address)

    with ThreadPoolExecutor() as pool:
        losing = pool.submit(lose)
        again.join()
        losing.result()
    assert "has lost the push of node 0 for round 0; training that round again" in run.said[-1]
    assert again.start(weights) == 0
    run.push_as_node_1(weights, 0)
    assert again.exchange(weights, 0, tokens=1) == 1


def test_what_is_only_a_rounded_copy_is_never_pushed(start, weights):
    """Should hub and node ever differ about who trains what: `weights` trains experts 0 and 1 alone."""
    run = start(ownership="all")
    node = run.node()
    node.join()
    assert node.owned == (0, 1, 2, 3)
    with pytest.raises(
        SpesError, match=r"layers\.0\.mlp\.experts\.2\.\w+\.weight: this node does not train it.*bfloat16"
    ):
        node._push(weights, 0, tokens=1)
    status = node.client.status()["nodes"][0]
    assert (status["last_pushed_round"], status["bytes_up"]) == (None, 0)
    node.leave()


def test_an_absent_node_is_named(start, weights):
    run = start(round_deadline_s=6)
    run.other.join()
    node = run.node()
    node.join()
    node.start(weights)
    with pytest.raises(SpesError, match="node 1") as error:
        node.exchange(weights, 0, tokens=1)
    assert error.value.exit_code == 7
    assert run.hub.wait(30) == 7


def test_traffic_is_counted_and_taken_once(start, weights):
    run = start()
    run.other.join()
    node = run.node()
    node.join()
    node.start(weights)
    traffic = node.take_traffic()
    assert traffic.seconds > 0
    assert traffic.bytes_up == 0
    assert traffic.bytes_down > sum(4 * torch.Size(shape).numel() for shape in weights.shapes.values())
    assert node.take_traffic().bytes_down == 0


def test_a_lone_node_never_trains_towards_a_result_that_it_cannot_write(ranks, weights, write_recipe, tmp_path):
    (tmp_path / "final").mkdir()
    lone = LoneNode(load_recipe(write_recipe(tmp_path)), ranks, tmp_path, None)
    with pytest.raises(SpesError, match=r"final: an earlier run's result is there: choose another --out"):
        lone.start(weights)
