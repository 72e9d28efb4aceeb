"""Nodes that train on while they synchronize, against a simulation of the delayed rule in plain torch.

Each node is one rank in this process, with its DeepSpeed engine; the hub is a real process. What stands for training
is a step towards a target of the node's own, so that it depends on what the node holds. (With one length of step for
both, their mean would not.)
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spes_mega.client.client import HubClient
from spes_mega.errors import SpesError
from spes_mega.layout import expert_of, open_checkpoint
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.background import moved
from spes_mega.node.sync.overlap import OverlappingHubNode
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.outer.ownership import ownership_of, pushed_names
from spes_mega.recipe import load_recipe
from tests.integration.processes import Hub

ROUNDS = 5
RATES = (0.6, 0.2)
OWNED = {0: (0, 1), 1: (2, 3)}
OWNERSHIP = ownership_of(4, 2)


@pytest.fixture
def models(ranks, write_recipe, tmp_path):
    """Of node 0 and of node 1."""
    recipe = load_recipe(write_recipe(tmp_path, "models", spes={"num_nodes": 2}))
    return [LocalModel(recipe, OWNED[k], ranks, StopRequest(), tmp_path) for k in (0, 1)]


class Run:
    """A hub process, and nodes that join it."""

    def __init__(self, recipe_file, folder, ranks):
        self.hub = Hub(recipe_file, folder / "hub")
        self.recipe, self.folder, self.ranks = load_recipe(recipe_file), folder, ranks
        self.said = []

    def client(self, node):
        return HubClient.for_recipe(self.recipe, self.hub.address, node)

    def node(self, node):
        made = OverlappingHubNode(
            node, OWNERSHIP, self.ranks, StopRequest(), self.client(node), self.said.append,
            num_rounds=self.recipe.num_rounds, spool_dir=self.folder,
        )  # fmt: skip
        made.join()
        return made

    def state(self):
        """The last snapshot, once the hub has ended."""
        assert self.hub.wait(60) == 0
        with open_checkpoint(max((self.folder / "hub/snapshots").iterdir())) as checkpoint:
            return {name: checkpoint.read(name) for name in checkpoint.names}


@pytest.fixture
def start(tmp_path, write_recipe, ranks):
    runs = []

    def start(**spes):
        spes = {"num_nodes": 2, "overlap": True, "rpc_deadline_s": 5, "sync_every": 2} | spes
        recipe_file = write_recipe(tmp_path, spes=spes, train={"steps": 2 * ROUNDS})
        runs.append(Run(recipe_file, tmp_path, ranks))
        return runs[-1]

    yield start
    for run in runs:
        run.hub.end()


def masters(weights, names=None):
    out = {}
    names = weights.shapes if names is None else names
    weights.collect(names, lambda shapes, tensors: out.update((n, t.clone()) for n, t in tensors), rounded=True)
    return out


def trained(shapes, node):
    return pushed_names(shapes, OWNERSHIP, node, expert_of)


def targets_of(initial, node):
    draw = torch.Generator().manual_seed(node)
    return {name: initial[name] + 0.1 * torch.randn(initial[name].shape, generator=draw) for name in initial}


def step(values, targets, rate):
    return {name: value + rate * (targets[name] - value) for name, value in values.items()}


def train(weights, node, targets, rates):
    after = step(masters(weights, trained(weights.shapes, node)), targets[node], rates[node])
    weights.assign(after, after.get)


def add(weights, names, amount):
    after = {name: value + amount for name, value in masters(weights, names).items()}
    weights.assign(after, after.get)


def simulated(initial, targets, rates, delay):
    """The state after all rounds."""
    published = initial
    local = [{name: initial[name] for name in trained(initial, k)} for k in (0, 1)]
    for round_ in range(ROUNDS):
        for k in (0, 1):
            before = local[k] if delay else {name: published[name] for name in local[k]}
            after = step(before, targets[k], rates[k])
            if round_ and delay:
                after = {name: published[name] + (after[name] - before[name]) for name in after}
            local[k] = after
        published = {
            name: torch.stack([own[name] for own in local if name in own]).double().mean(0).float() for name in initial
        }
    return published


def run_all(run, models, targets, rates):
    """Five rounds of two nodes; returns the state that they began with."""
    nodes = [run.node(k) for k in (0, 1)]
    for node, model in zip(nodes, models, strict=True):
        assert node.start(model) == 0
    initial = masters(models[0], trained(models[0].shapes, 0)) | masters(models[1], trained(models[1].shapes, 1))
    targets += [targets_of(initial, k) for k in (0, 1)]
    for round_ in range(ROUNDS - 1):
        for k, (node, model) in enumerate(zip(nodes, models, strict=True)):
            train(model, k, targets, rates)
            # the first node does not wait for the other
            assert node.exchange(model, round_, tokens=1) == round_ + 1
    for k, model in enumerate(models):
        train(model, k, targets, rates)
    with ThreadPoolExecutor() as both:  # the last exchange is a plain one: each waits for the other
        ends = [both.submit(node.exchange, model, ROUNDS - 1, 1) for node, model in zip(nodes, models, strict=True)]
    assert [end.result() for end in ends] == [ROUNDS, ROUNDS]
    for node in nodes:
        node.leave()
    return initial


# fp32: the rounding of a few sums of numbers under 1. Else one half step of what a round moves, up and down: a 256th
# and a 127th of at most 0.5 * 0.5.
@pytest.mark.parametrize(("wire", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-3), ("int8", 2e-3)])
def test_two_nodes_follow_the_delayed_rule(start, models, wire, tolerance):
    run, targets = start(wire=wire), []
    initial = run_all(run, models, targets, RATES)
    expected, plain = (simulated(initial, targets, RATES, delay) for delay in (True, False))
    found = run.state()
    off = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    apart = max(float((plain[name] - expected[name]).abs().max()) for name in expected)
    print(wire, off, apart)
    assert off < tolerance
    assert apart > 10 * tolerance  # or this test could not tell the rules apart
    for k, model in enumerate(models):
        held = masters(model)
        shared = [name for name in found if expert_of(name) is None]
        assert all(torch.equal(held[name], found[name]) for name in shared)
        if wire == "fp32":
            assert all(torch.equal(held[name], found[name]) for name in trained(found, k))


def test_without_progress_nothing_changes(start, models):
    run = start()
    initial = run_all(run, models, [], (0.0, 0.0))
    found = run.state()
    assert all(torch.equal(found[name], initial[name]) for name in initial)


def test_progress_is_exact_where_nothing_else_moved():
    now, before = torch.randn(100), torch.randn(100)
    published = before.clone()
    published[50:] += 1
    found = moved(published, before, now)
    assert torch.equal(found[:50], now[:50])
    assert torch.equal(found[50:], published[50:] + (now[50:] - before[50:]))


class Other:
    """Node 1 as a bare client: it pushes what it pulled, plus 1."""

    def __init__(self, run):
        self.client = run.client(1)
        self.client.join()

    def push(self, round_):
        with self.client.pull() as pulled:
            names = trained(pulled.shapes, 1)
            values = ((name, pulled.read(name) + 1) for name in names)
            self.client.push(round_, {name: pulled.shapes[name] for name in names}, values)

    def state(self):
        with self.client.pull() as pulled:
            return dict(pulled)


def test_a_push_that_comes_too_late_is_dropped_and_what_came_after_it_is_kept(start, models):
    run = start(min_nodes=1, round_deadline_s=6)
    other, node, model = Other(run), run.node(0), models[0]
    node.start(model)
    mine = trained(model.shapes, 0)
    other.push(0)
    assert other.client.wait_round(1) == 1  # at the deadline, without node 0
    add(model, mine, 5)
    assert node.exchange(model, 0, tokens=1) == 1
    add(model, mine, 0.25)
    assert node.exchange(model, 1, tokens=1) == 2
    assert "too late for round 0" in run.said[-1]
    state, found = other.state(), masters(model, mine)
    for name in mine:
        assert torch.allclose(found[name], state[name] + 0.25, rtol=0, atol=1e-5), name
    other.push(1)
    assert other.client.wait_round(2) == 2
    after = other.state()
    assert all(torch.equal(after[name], found[name]) for name in mine if expert_of(name))  # it alone trains them
    node.leave()


def test_a_node_that_adopts_experts_pushes_them_as_they_are_published(start, models):
    run = start(min_nodes=1, adopt_after=1)
    other, node, model = Other(run), run.node(0), models[0]
    node.start(model)
    mine = trained(model.shapes, 0)
    other.push(0)
    add(model, mine, 0.5)
    assert node.exchange(model, 0, tokens=1) == 1
    other.client.wait_round(1)
    first = other.state()
    other.client.leave()
    for round_ in (1, 2, 3):
        before = masters(model, mine)
        add(model, mine, 0.25)
        assert node.exchange(model, round_, tokens=1) == round_ + 1
        if "now owns experts 0-3" in run.said:
            break
    assert run.said[-1] == "now owns experts 0-3"
    adopted = set(model.shapes) - set(mine)
    held = masters(model)
    assert all(torch.equal(held[name], first[name]) for name in adopted)
    experts = [name for name in mine if expert_of(name)]
    assert all(torch.equal(held[name], before[name] + 0.25) for name in experts)
    add(model, model.shapes, 0.125)
    assert node.exchange(model, round_ + 1, tokens=1) in (round_ + 2, ROUNDS)
    held = masters(model)
    assert all(torch.equal(held[name], first[name] + 0.125) for name in adopted)
    node.leave()


def test_an_error_in_the_background_comes_at_the_next_boundary(start, models):
    run = start(round_deadline_s=6)
    other, node = Other(run), run.node(0)
    node.start(models[0])
    assert node.exchange(models[0], 0, tokens=1) == 1
    with pytest.raises(SpesError, match="node 1") as error:
        node.exchange(models[0], 1, tokens=1)
    assert error.value.exit_code == 7
    assert run.hub.wait(30) == 7
    node.leave()
    other.client.close()


def test_a_node_that_stops_while_it_synchronizes_is_not_waited_for(start, models):
    run = start(min_nodes=1)
    other, node = Other(run), run.node(0)
    node.start(models[0])
    assert node.exchange(models[0], 0, tokens=1) == 1
    node.leave()
    status = other.client.status()
    assert [n["state"] for n in status["nodes"]] == ["left", "joined"]
    other.push(0)
    assert other.client.wait_round(1) == 1
    other.client.leave()
