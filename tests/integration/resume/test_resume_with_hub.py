"""A node that is started again, against a real hub: what it takes from the hub, and what from its checkpoint."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from spes_mega.client.client import HubClient
from spes_mega.data.samples import NodeData
from spes_mega.errors import CheckpointError
from spes_mega.layout import expert_of
from spes_mega.node.checkpoint.resume import Resume
from spes_mega.node.stop import StopRequest
from spes_mega.node.sync.hub_node import HubNode
from spes_mega.node.sync.overlap import OverlappingHubNode
from spes_mega.node.sync.weight_source import Position
from spes_mega.node.trainer import Trainer
from spes_mega.node.zero.local_model import LocalModel
from spes_mega.node.zero.moments import Moments, collect_moments
from spes_mega.outer.ownership import ownership_of, private_names, pushed_names
from spes_mega.recipe import load_recipe
from tests.integration.processes import Hub

SPES = {"num_nodes": 2, "sync_every": 4, "rpc_deadline_s": 5}
EVERYONE = ownership_of(4, 2)


def at(round_, step, tokens=0):
    """Where a node is that took 4 samples in every step."""
    return Position(round_, step, tokens, 4 * step)


class Node:
    """Node 0 in one of its lives: a process would do the same, in main.py."""

    def __init__(self, folder, recipe, ranks, hub, resume="auto"):
        self.said = []
        self.recipe, self.ranks = recipe, ranks
        data = NodeData(recipe, 0)
        options = SimpleNamespace(node=0, change=(), out=folder / "out", resume=resume)
        client = HubClient.for_recipe(recipe, hub.address, 0)
        self.resume = Resume(recipe, options, data, ranks, self.said.append)
        arguments = (0, EVERYONE, ranks, StopRequest(), client, self.said.append)
        self.source = (
            OverlappingHubNode(*arguments, num_rounds=recipe.num_rounds, spool_dir=folder)
            if recipe.spes.overlap
            else HubNode(*arguments)
        )
        self.source.join()
        steps = self.resume.steps(self.source.owned)
        self.model = LocalModel(recipe, self.source.owned, ranks, StopRequest(), folder, steps)
        self.at = self.resume.take_up(self.model, self.source)
        self.trainer = Trainer(recipe, self.model, data, ranks, StopRequest())

    def train(self, count):
        for _ in range(count):
            self.trainer.step(self.at)
            self.at = self.trainer.after(self.at)

    def save(self):
        with self.resume.saver(self.model, self.at, self.source) as saver:
            saver.save(self.model, self.at, self.source)

    def masters(self):
        out = {}
        self.model.collect(
            self.model.shapes, lambda shapes, tensors: out.update((n, t.clone()) for n, t in tensors), rounded=True
        )
        return out

    def moments(self):
        out = {}

        def keep(steps, moments):
            out.update((name, Moments(*(value.clone() for value in values))) for name, values in moments)

        return collect_moments(self.model.engine, self.model.map.entries, self.ranks, keep), out


class Setting:
    def __init__(self, folder, write_recipe, ranks, **spes):
        recipe_file = write_recipe(folder, spes=SPES | spes)
        self.folder, self.ranks = folder, ranks
        self.recipe = load_recipe(recipe_file)
        self.hub = Hub(recipe_file, folder / "hub")
        self.other = HubClient.for_recipe(self.recipe, self.hub.address, 1)

    def node(self, resume="auto"):
        return Node(self.folder, self.recipe, self.ranks, self.hub, resume)

    def push_as_node_1(self, round_):
        with self.other.pull() as state:
            names = pushed_names(state.shapes, EVERYONE, 1, expert_of)
            values = ((n, state.read(n) + 1) for n in names)
            self.other.push(round_, {n: state.shapes[n] for n in names}, values, 1)


@pytest.fixture
def setting(tmp_path, write_recipe, ranks):
    settings = []

    def make(**spes):
        settings.append(Setting(tmp_path, write_recipe, ranks, **spes))
        settings[-1].other.join()
        return settings[-1]

    yield make
    for one in settings:
        one.other.close()
        one.hub.end()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_in_the_same_round_it_goes_on_from_its_own_weights(setting):
    run = setting()
    first = run.node()
    first.train(2)
    first.save()
    expected = first.masters(), first.moments()
    again = run.node()
    assert again.at == at(0, 2, 2 * again.trainer.tokens_per_step)
    assert equal(again.masters(), expected[0])
    assert again.moments()[0] == expected[1][0]
    assert same(again.moments()[1], expected[1][1])
    for node in (first, again):
        node.train(1)
    assert equal(again.masters(), first.masters())
    assert "goes on after step 2, in round 0" in again.said[-1]


def test_in_a_later_round_it_has_the_hubs_weights_and_its_own_moments(setting):
    run = setting(min_nodes=1, round_deadline_s=6)
    first = run.node()
    first.train(3)
    first.save()
    steps, moments = first.moments()
    run.push_as_node_1(0)
    assert run.other.wait_round(1) == 1  # at the deadline, without node 0
    again = run.node()
    assert again.at == at(1, 4, 0)
    with run.other.pull() as state:
        found = again.masters()
        for name, tensor in state:
            frozen = (key := expert_of(name)) and key.expert not in (0, 1)
            assert torch.equal(found[name], tensor.bfloat16().float() if frozen else tensor), name
    assert again.moments()[0] == steps == dict.fromkeys(again.model.trained, 3)
    assert same(again.moments()[1], moments)
    assert "goes on at round 1 with the hub's weights, and the optimizer's state after step 3" in again.said[-1]
    again.train(1)
    assert set(again.moments()[0].values()) == {4}


def test_one_that_never_resumes_begins_with_a_new_optimizer(setting):
    run = setting()
    first = run.node()
    first.train(2)
    first.save()
    again = run.node("never")
    assert (again.at, again.moments()) == (at(0, 0, 0), ({}, {}))
    again.train(1)
    again.save()
    assert [p.name for p in (run.folder / "out/checkpoints").iterdir()] == ["step-000001"]
    assert "are now in" in again.said[-1]


def test_a_checkpoint_from_the_future_is_another_runs(setting):
    run = setting()
    first = run.node()
    first.train(1)
    first.at = at(3, 13, 0)
    first.save()
    with pytest.raises(Exception, match="a checkpoint of round 3, but the hub is at round 0") as error:
        run.node()
    assert error.value.exit_code == CheckpointError.exit_code


def test_experts_that_are_new_begin_at_zero_and_the_others_go_on(setting):
    run = setting(min_nodes=1, round_deadline_s=6, adopt_after=1)
    first = run.node()
    first.train(2)
    first.save()
    steps, moments = first.moments()
    first.source._push(first.model, 0, 1)
    assert run.other.wait_round(1) == 1  # without node 1, whose experts are now node 0's
    again = run.node()
    assert again.model.owned == (0, 1, 2, 3)
    assert again.moments()[0] == steps
    assert same(again.moments()[1], moments)
    assert any("moments of 0-1 kept, of 2-3 begin at 0" in line for line in again.said)
    again.train(1)
    ages = again.moments()[0]
    assert {ages[n] for n in ages if (k := expert_of(n)) and k.expert in (2, 3)} == {1}
    assert {ages[n] for n in steps} == {3}


def lost_by(node):
    """What the pushes of a node have lost so far."""
    path = node.resume._folder.parent / "lost.safetensors"
    node.source.client.save_residual(path)
    return load(path.read_bytes())


def exchange(run, node):
    run.push_as_node_1(node.at.round)
    round_ = node.source.exchange(node.model, node.at.round, 1)
    node.at = at(round_, run.recipe.step_at(round_), 0)


def held_by_the_hub(run, node):
    """The exact values of what node 0 alone trains."""
    with HubClient.for_recipe(run.recipe, run.hub.address, 0) as client:
        client.join()
        with client.pull() as state:
            return {name: state.read(name) for name in private_names(state.shapes, EVERYONE, 0, expert_of)}


def assert_close(found, expected):
    # sums in another order; what a push loses is 1e-5 and more
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=1e-6) for name in found)


def test_what_pushes_lost_is_made_up_for_after_a_restart_in_the_same_round(setting):
    run = setting(wire="int8")
    node = run.node()
    node.save()  # nothing has been lost yet
    node.train(4)
    exchange(run, node)
    lost = lost_by(node)
    assert all(values.abs().max() > 1e-5 for name, values in lost.items() if values.dim() > 1)
    node.train(1)
    node.save()
    again = run.node()
    assert again.at == node.at
    assert equal(lost_by(again), lost)
    again.train(3)
    trained = again.masters()
    exchange(run, again)
    found, lost = held_by_the_hub(run, again), lost_by(again)
    assert_close({name: found[name] + lost[name] for name in found}, trained)


def test_what_pushes_lost_is_made_up_for_after_a_restart_in_the_next_round(setting):
    run = setting(wire="int8")
    node = run.node()
    node.train(4)
    assert node.source._push(node.model, 0, 1)
    node.save()
    run.push_as_node_1(0)
    run.other.wait_round(1)
    lost = lost_by(node)
    again = run.node()
    assert again.at == at(1, 4, 0)
    assert equal(lost_by(again), lost)
    again.train(4)
    trained = again.masters()
    exchange(run, again)
    found, lost = held_by_the_hub(run, again), lost_by(again)
    assert_close({name: found[name] + lost[name] for name in found}, trained)


def test_what_a_later_push_has_made_up_for_is_not_sent_twice(setting):
    run = setting(wire="int8")
    node = run.node()
    node.train(4)
    exchange(run, node)
    node.train(1)
    node.save()
    exchange(run, node)
    again = run.node()
    assert again.at == at(2, 6, 0)
    assert lost_by(again) == {}
    assert any("what earlier pushes lost by rounding is not known any more" in line for line in again.said)


def hub_state(run, node):
    """What node 0 holds of the hub's newest state if it has trained nothing."""
    with run.other.pull() as state:
        frozen = {n for n in state.shapes if (key := expert_of(n)) and key.expert not in node.model.owned}
        return {name: tensor.bfloat16().float() if name in frozen else tensor for name, tensor in state}


def test_with_overlap_it_begins_the_hubs_round_anew_with_its_moments(setting):
    run = setting(overlap=True, sync_every=2)
    node = run.node()
    node.train(2)
    node.at = at(node.source.exchange(node.model, 0, 1), 2, 0)  # the push is under way
    run.push_as_node_1(0)
    assert run.other.wait_round(1) == 1
    node.train(1)
    node.save()
    node.source.leave()
    steps, moments = node.moments()
    again = run.node()
    assert again.at == at(1, 2, 0)
    assert equal(again.masters(), hub_state(run, again))
    assert again.moments()[0] == steps == dict.fromkeys(node.model.trained, 3)
    assert same(again.moments()[1], moments)
    # step 3 comes again: its checkpoint must not be taken for the newest, and the moments must not be lost meanwhile
    with again.resume.saver(again.model, again.at, again.source):
        pass
    assert [p.name for p in (run.folder / "out/checkpoints").iterdir()] == ["step-000002"]
    third = run.node()
    assert third.at == at(1, 2, 0)
    assert same(third.moments()[1], moments)


def test_with_overlap_a_node_may_have_been_ahead_of_the_hub(setting):
    run = setting(overlap=True)
    node = run.node()
    node.train(1)
    node.at = at(1, 5, 0)  # its push for round 0 never came
    node.save()
    again = run.node()
    assert again.at == at(0, 0, 0)
    assert set(again.moments()[0].values()) == {1}
