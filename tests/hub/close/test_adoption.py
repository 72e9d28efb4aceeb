"""Nodes that go away for good or for a while: others train their experts, until they are back."""

import json

import pytest

from spes_mega.errors import DeadlineError, HubRefusedError
from spes_mega.layout.names import expert_of
from spes_mega.tools.status import describe
from tests.hub.fabricated import assert_same, fabricate, make_recipe, next_state, push, read_state


class Play:
    """A hub, its nodes, and what the state must be, worked out beside it."""

    def __init__(self, start_hub, connect, recipe):
        self.start_hub, self.connect, self.recipe = start_hub, connect, recipe
        self.hub = start_hub(recipe)
        self.clients = {}
        self.round, self.state = 0, read_state(self.hub.state / "rounds/000000")

    def join(self, *nodes):
        for node in nodes:
            self.clients[node] = self.connect(self.hub, node)
            self.clients[node].join()

    def leave(self, node):
        self.clients.pop(node).leave()

    def close(self, *nodes, absent=()):
        """One round to which `nodes` contribute while `absent` are away."""
        pushes = {node: fabricate(self.recipe, node, self.round, absent=absent) for node in nodes}
        for node in nodes:
            push(self.clients[node], self.round, pushes[node])
        self.round = self.clients[nodes[0]].wait_round(self.round + 1)
        self.state = next_state(self.recipe, self.state, pushes, absent=absent)
        assert_same(read_state(self.hub.state / f"rounds/{self.round:06d}"), self.state)

    def restart(self):
        self.hub.stop()
        self.hub = self.start_hub(self.recipe)
        for node, old in self.clients.items():  # the same processes, at the hub's new port
            self.clients[node] = self.connect(self.hub, node)
            self.clients[node]._caller.session = old._caller.session

    def experts(self):
        """Who owns what, and who is absent, as status has it."""
        nodes = self.connect(self.hub, 0).status()["nodes"]
        return [node["experts"] for node in nodes], [node["node"] for node in nodes if node["absent"]]


@pytest.fixture
def play(start_hub, connect):
    def begin(**spes):
        fields = {"num_nodes": 3, "min_nodes": 1, "adopt_after": 2, "round_deadline_s": 4, "rpc_deadline_s": 4}
        model = {"num_experts": 6}
        return Play(start_hub, connect, make_recipe(model, {"steps": 200}, **(fields | spes)))

    return begin


def test_experts_of_a_missed_node_are_trained_by_others_until_it_is_back(play, capsys):
    run = play()
    run.join(0, 1, 2)
    run.close(0, 1, 2)
    run.close(0, 2)  # node 1 falls silent; this round waits for it until the deadline
    assert run.experts() == ([[0, 1], [2, 3], [4, 5]], [])
    run.close(0, 2)  # nobody trained experts 2 and 3
    assert run.experts() == ([[0, 1, 2], [], [3, 4, 5]], [1])
    run.close(0, 2, absent={1})
    run.restart()
    assert run.experts() == ([[0, 1, 2], [], [3, 4, 5]], [1])
    run.close(0, 2, absent={1})
    back = run.connect(run.hub, 1)
    assert back.join().absent == (1,)
    run.clients[1] = back
    run.close(0, 1, 2, absent={1})  # it has trained shared weights only
    assert run.experts() == ([[0, 1], [2, 3], [4, 5]], [])
    run.close(0, 1, 2)
    assert "absent nodes: 1; experts from now on: node 0 0-2; node 1 none; node 2 3-5" in capsys.readouterr().out


def test_who_leaves_is_replaced_at_once_and_nothing_changes_without_adoption(play):
    run = play(adopt_after=9)
    run.join(0, 1, 2)
    run.leave(2)
    run.close(0, 1)
    assert run.experts() == ([[0, 1, 4], [2, 3, 5], []], [2])
    run.restart()  # node 2 has to join anew, and owns nothing until it contributes
    run.join(2)
    run.close(0, 1, absent={2})
    assert run.experts() == ([[0, 1, 4], [2, 3, 5], []], [2])
    run.hub.stop()
    kept = json.loads((run.hub.state / f"rounds/{run.round:06d}/round.json").read_text())["ledger"]["rounds"]
    assert [record["absent"] for record in kept] == [[], [2], [2]]


def test_status_waits_for_nobody_who_left_and_says_who_is_not_back_after_a_restart(play):
    run = play(num_nodes=2)
    run.join(0, 1)
    run.close(0, 1)
    run.leave(1)
    assert run.clients[0].status()["waiting_for"] == [0]
    run.restart()
    status = run.clients[0].status()
    assert "node 1  not back yet  experts 3-5  last pushed round 0" in "\n".join(describe(status))
    assert status["waiting_for"] == [0, 1]  # it may come until the deadline for joining


def test_without_adopt_after_experts_of_the_absent_wait_for_them(play):
    run = play(adopt_after=None)
    run.join(0, 1, 2)
    run.leave(1)
    run.close(0, 2)
    run.close(0, 2)
    assert run.experts() == ([[0, 1], [2, 3], [4, 5]], [])


def test_the_heir_is_sent_exact_values_of_what_it_takes_over_and_others_only_what_changed(play):
    run = play(num_nodes=4, capacity=(3, 1, 1, 1), adopt_after=1)
    run.join(0, 1, 2, 3)
    assert run.experts()[0] == [[0, 1, 2], [3], [4], [5]]
    run.leave(3)
    run.close(0, 1, 2)
    assert run.experts() == ([[0, 1, 2, 5], [3], [4], []], [3])
    with run.clients[0].pull(have_round=0) as heir:
        assert heir.absent == (3,)
        assert heir.full
        assert_same(dict(heir), run.state)
    with run.clients[1].pull(have_round=0) as other:
        assert other.absent == (3,)
        assert not other.full
        # its own, and the expert that nobody has trained
        assert {key.expert for name in run.state if name not in other and (key := expert_of(name))} == {3, 5}
    assert "node 3  left, absent  experts none" in "\n".join(describe(run.clients[0].status()))


def test_a_replicated_expert_is_the_mean_over_its_owners_and_stays_with_those_that_are_there(play):
    run = play(ownership=((0, 1, 2, 3), (2, 3, 4), (4, 5)), adopt_after=1)
    run.join(0, 1, 2)
    run.close(0, 1, 2)
    with run.clients[0].pull(have_round=0) as pulled:  # it trained experts 0 and 1 alone
        assert {key.expert for name in run.state if name not in pulled and (key := expert_of(name))} == {0, 1}
    run.leave(1)
    run.close(0, 2)
    assert run.experts() == ([[0, 1, 2, 3], [], [4, 5]], [1])
    with run.clients[0].pull(have_round=1) as pulled:
        # it contributed to 2 and 3 alone, but was to share them: what it alone owned was 0 and 1
        assert {key.expert for name in run.state if name not in pulled and (key := expert_of(name))} == {0, 1}
    run.close(0, 2, absent={1})
    with run.clients[0].pull(have_round=2) as pulled:
        assert {key.expert for name in run.state if name not in pulled and (key := expert_of(name))} == {0, 1, 2, 3}


def test_a_push_by_the_ownership_of_an_earlier_round_is_refused(play):
    run = play()
    run.join(0, 1, 2)
    run.leave(2)
    run.close(0, 1)
    with pytest.raises(HubRefusedError, match="the tensors of this node take"):
        push(run.clients[0], run.round, fabricate(run.recipe, 0, run.round))
    run.close(0, 1, absent={2})


def test_all_nodes_gone_end_the_run_with_an_error_that_names_them(play):
    run = play(num_nodes=2)
    run.join(0, 1)
    pushes = {node: fabricate(run.recipe, node, 0) for node in (0, 1)}
    push(run.clients[0], 0, pushes[0])
    run.leave(0)
    push(run.clients[1], 0, pushes[1])
    run.leave(1)
    run.hub.join()
    assert isinstance(run.hub.error, DeadlineError)
    assert "round 1: nodes 0, 1 did not push" in str(run.hub.error)
