"""What a node holds where weights travel with loss, in whatever order it pushes and pulls, is late, or loses a push."""

import random
import signal
import time

import pytest
import torch

from spes_mega.client.client import StaleRoundError
from tests.hub.fabricated import fabricate, make_recipe, pull, push, read_state
from tests.wire.test_wire import UNALIKE, lead_to, read_payload


class Node:
    def __init__(self, client, recipe):
        self.client, self.recipe, self.node = client, recipe, client.node
        self.client.join()
        self.take(None)

    def take(self, have_round):
        with self.client.pull(have_round) as pulled:
            self.round, self.absent = pulled.round, pulled.absent
            news = dict(pulled)
        self.state = news if have_round is None else self.state | news

    def push(self):
        """Train and push; whether it was in time."""
        steps = fabricate(self.recipe, self.node, self.round, absent=self.absent)
        mine = {name: self.state[name] + 0.01 * step for name, step in steps.items()}
        try:
            push(self.client, self.round, mine)
        except StaleRoundError:
            return False
        self.state |= mine
        return True

    def pull(self):
        self.client.wait_round(self.round + 1)
        self.take(self.round)

    def lost(self, name):
        replica = self.client._replica
        replica.settle()
        return replica._residual.rows(name, 0, replica.shapes[name][0]) if name in replica._residual.names else 0


class Setting:
    def __init__(self, start_hub, connect, **spes):
        self.start_hub, self.connect = start_hub, connect
        self.recipe = make_recipe(train={"steps": 400}, **spes)
        self.hub = start_hub(self.recipe)
        self.nodes = [self.node(k) for k in range(self.recipe.spes.num_nodes)]

    def node(self, k):
        return Node(self.connect(self.hub, k), self.recipe)

    def restart(self):
        self.hub.stop()
        self.hub = self.start_hub(self.recipe)
        for node in self.nodes:
            lead_to(node.client, self.connect(self.hub, node.node))

    def round(self, *numbers):
        nodes = [self.nodes[k] for k in numbers] or self.nodes
        for node in nodes:
            assert node.push()
        for node in nodes:
            node.pull()
            self.check(node)

    def check(self, node):
        """All hold what is published; of what it alone trains a node has what the hub has, and what its pushes lost."""
        directory = self.hub.state / f"rounds/{node.round:06d}"
        beside = directory / "residual.safetensors"
        published, residual = read_state(directory), read_payload(beside) if beside.exists() else {}
        for name, value in node.state.items():
            if name in node.client._replica._private:
                exact = published[name] + residual.get(name, 0) + node.lost(name)
                assert torch.allclose(exact, value, rtol=0, atol=2e-6), (node.node, name)  # steps are of 1e-2
            else:
                assert torch.equal(published[name], value), (node.node, name)


@pytest.fixture
def setting(start_hub, connect):
    def make(**spes):
        return Setting(start_hub, connect, **{"wire": "int8"} | spes)

    return make


LATE = {"num_nodes": 3, "min_nodes": 1, "round_deadline_s": 4, "rpc_deadline_s": 4}


@pytest.mark.parametrize("ownership", ["equal", [[0, 1], [1, 2], [3]]], ids=str)
def test_who_gave_an_expert_back_may_be_late(setting, ownership):
    """What it had pushed of the expert when it alone trained it is long past."""
    run = setting(adopt_after=2, ownership=ownership, **LATE)
    run.round(0, 2)
    run.round(0, 2)
    assert run.nodes[0].absent == (1,)
    run.nodes[1].take(None)
    run.round(0, 1, 2)
    run.round(1, 2)
    late = run.nodes[0]
    assert not late.push()
    late.take(None)
    run.check(late)
    run.round()


def test_two_states_may_be_open_at_once(setting):
    run = setting()
    for node in run.nodes:
        node.push()
    zero, one = run.nodes
    zero.client.wait_round(1)
    first = zero.client.pull(0)
    zero.state |= dict(first)
    zero.round = 1
    one.pull()
    for node in run.nodes:
        node.push()
    zero.client.wait_round(2)
    with zero.client.pull(1) as second:
        first.close()
        zero.state |= dict(second)
        zero.round = 2
    run.check(zero)


@pytest.mark.parametrize("used", [True, False])
def test_a_state_may_be_pulled_again_after_the_push_that_follows_on_it(setting, used):
    run = setting()
    run.round()
    run.round()
    zero, one = run.nodes
    zero.push()
    again = pull(zero.client)[1]
    if used:
        zero.state = again
    one.push()
    for node in (one, zero):
        node.pull()
        run.check(node)
    run.round()


@pytest.mark.parametrize("merging", [False, True])
def test_who_takes_the_place_of_a_node_that_has_pushed_gets_what_that_trained(setting, merging):
    run = setting(merge_interval=20 if merging else 1000, merge_steps=500)
    run.round()
    run.nodes[0].push()
    run.nodes[0] = run.node(0)
    assert run.nodes[0].round == 1
    run.nodes[1].push()
    for node in run.nodes:
        node.pull()
        run.check(node)
    run.round()


def test_a_state_may_be_closed_after_its_client(setting):
    zero = setting().nodes[0]
    pulled = zero.client.pull()
    zero.client.close()
    pulled.close()


def test_a_signal_while_the_last_state_is_kept_does_no_harm(setting):
    class Interruption(Exception):
        pass

    def interrupt(*_):
        raise Interruption

    run = setting()
    zero, one = run.nodes
    weights = zero.client._replica._weights
    write = weights.write
    weights.write = lambda *arguments: (time.sleep(0.02), write(*arguments))
    for node in run.nodes:
        node.push()
    for node in run.nodes:
        node.pull()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interruption):
            zero.push()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    zero.push()
    one.push()
    for node in run.nodes:
        node.pull()
        run.check(node)


@pytest.mark.parametrize("ownership", ["equal", [[0, 1], [1, 2], [3]]], ids=str)
def test_a_push_that_was_lost_and_not_waited_for_costs_its_round_alone(setting, ownership):
    run = setting(ownership=ownership, **LATE)
    run.round()
    zero, _, two = run.nodes
    zero.push()
    run.hub.stop()
    [staged] = (run.hub.state / "pushes/000001").glob("node-000-*.safetensors")
    content = staged.read_bytes()
    staged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    run.restart()
    two.push()  # nobody else calls
    two.pull()
    zero.pull()
    run.check(zero)


@pytest.mark.parametrize("seed", range(2))
def test_nobody_drifts_apart_whatever_happens(setting, seed):
    draw = random.Random(seed)
    wires = ["int8", "bf16", UNALIKE, {"up": "int8"}, {"down": "int8"}, {"up": "bf16", "down": "int8"}]
    run = setting(
        wire=draw.choice(wires),
        ownership=draw.choice([[[0, 1], [1, 2], [3]], [[0], [1, 2], [3]], [[0, 1, 2, 3], [1], [3]], "equal"]),
        adopt_after=draw.choice([1, 2]),
        merge_interval=20,
        merge_steps=500,
        merge_alpha=0.3,
        **LATE,
    )
    for _ in range(6):
        trying = [node for node in run.nodes if draw.random() < 0.65] or [draw.choice(run.nodes)]
        in_time = []
        for node in trying:
            if node.push():
                in_time.append(node)
            else:
                node.take(None)
                run.check(node)
        if in_time and draw.random() < 0.3:
            run.restart()
        for node in in_time:
            node.pull()
            if node.round == node.client.status()["round"]:
                run.check(node)
        if draw.random() < 0.2:
            number = draw.randrange(3)
            run.nodes[number] = run.node(number)
            run.check(run.nodes[number])
