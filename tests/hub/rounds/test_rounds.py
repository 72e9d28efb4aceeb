import threading
import time

import pytest

from spes_mega.client.client import StaleRoundError
from spes_mega.errors import DeadlineError, HubRefusedError, StoreError
from spes_mega.hub.rounds.members import Member, Presence, expected_back
from spes_mega.hub.rounds.round_clock import STANDSTILL_S
from spes_mega.hub.rounds.rounds import POLL_S, Rounds
from spes_mega.hub.rounds.shutdown import Stopped
from spes_mega.recipe import SpesSection


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make(clock, pushed=(), round_=0, members=None, remember=lambda members: None, **spes):
    fields = {"num_nodes": 3, "join_deadline_s": 100, "round_deadline_s": 1000, "rpc_deadline_s": 10} | spes
    return Rounds(SpesSection(**fields), round_, pushed, clock, members=members, remember=remember)


def join(rounds, *nodes):
    for node in nodes:
        rounds.attendance.join(node, f"s{node}")


def push(rounds, *nodes, round_=0):
    for node in nodes:
        with rounds.committing(node, rounds.attendance._members[node].session, round_):
            pass


def push_as(rounds, session):
    with rounds.committing(0, session, 0):
        pytest.fail("renamed for a process that was replaced")


def closes(rounds):
    """The nodes whose pushes close the round if it closes at once, else None."""
    rounds.shutdown.stop()
    rounds.clock._looked = rounds._now()  # as if it had looked all the time
    try:
        return rounds.await_close()
    except Stopped:
        return None
    finally:
        rounds.shutdown.stopping = False


def test_closes_when_all_have_pushed(clock):
    rounds = make(clock)
    join(rounds, 0, 1, 2)
    push(rounds, 2, 0)
    assert closes(rounds) is None
    assert rounds.waiting_for() == [1]
    push(rounds, 1)
    assert closes(rounds) == (0, 1, 2)


def test_who_never_joins_is_named(clock):
    rounds = make(clock)
    join(rounds, 1)
    clock.now = 99
    assert closes(rounds) is None
    clock.now = 100
    with pytest.raises(DeadlineError, match=r"nodes 0, 2 did not join within 100 s"):
        rounds.await_close()


def test_who_never_pushes_is_named_and_the_clock_starts_when_all_are_there(clock):
    rounds = make(clock)
    join(rounds, 0, 1)
    clock.now = 90
    join(rounds, 2)
    push(rounds, 0, 2)
    assert closes(rounds) is None
    clock.now = 1089
    assert closes(rounds) is None
    clock.now = 1090
    with pytest.raises(DeadlineError, match="round 0: node 1 did not push within 1000 s"):
        rounds.await_close()


def test_min_nodes_suffice_at_the_deadline_and_the_missing_is_not_waited_for_until_heard_again(clock):
    rounds = make(clock, min_nodes=2)
    join(rounds, 0, 1, 2)
    assert closes(rounds) is None
    push(rounds, 0, 2)
    assert closes(rounds) is None
    clock.now = 1000
    assert closes(rounds) == (0, 2)
    rounds.committed(1)
    assert rounds.attendance.presence()[1] is Presence.MISSED
    push(rounds, 0, 2, round_=1)
    assert closes(rounds) == (0, 2)
    rounds.committed(2)
    rounds.attendance.heard(1, "s1")
    push(rounds, 0, 2, round_=2)
    assert closes(rounds) is None
    push(rounds, 1, round_=2)
    assert closes(rounds) == (0, 1, 2)


def test_without_min_nodes_the_absent_are_not_waited_for_after_the_join_deadline(clock):
    rounds = make(clock, min_nodes=2)
    join(rounds, 0, 1)
    push(rounds, 0, 1)
    assert closes(rounds) is None
    clock.now = 100
    assert closes(rounds) == (0, 1)


def test_who_left_is_not_waited_for_but_its_push_counts(clock):
    rounds = make(clock, min_nodes=2)
    join(rounds, 0, 1, 2)
    push(rounds, 0)
    rounds.attendance.leave(0, "s0")
    rounds.attendance.leave(1, "s1")
    assert closes(rounds) is None
    push(rounds, 2)
    assert closes(rounds) == (0, 2)


def test_who_left_is_no_more_shown_as_waited_for_unless_the_round_cannot_close_without_it(clock):
    rounds = make(clock, min_nodes=2)
    join(rounds, 0, 1, 2)
    rounds.attendance.leave(0, "s0")
    assert rounds.waiting_for() == [1, 2]
    push(rounds, 1)
    assert rounds.waiting_for() == [2]
    rounds.attendance.leave(2, "s2")
    assert rounds.waiting_for() == [0, 2]
    push(rounds, 2)
    assert rounds.waiting_for() == []
    assert closes(rounds) == (1, 2)


def test_pushes_found_on_disk_after_a_restart_count_before_anybody_joins(clock):
    rounds = make(clock, pushed={0, 1}, round_=5)
    assert closes(rounds) is None
    rounds.attendance.heard(2, "s2")
    push(rounds, 2, round_=5)
    assert closes(rounds) == (0, 1, 2)
    assert closes(make(clock, pushed={0, 1, 2}, round_=5)) == (0, 1, 2)


def test_closed_and_future_rounds_take_no_push(clock):
    rounds = make(clock, round_=4)
    join(rounds, 0, 1, 2)
    with pytest.raises(StaleRoundError, match="round 3 is closed"):
        rounds.check_open(3)
    with pytest.raises(HubRefusedError, match=r"round 5 is not open yet: the open round is 4\. If the hub was set"):
        rounds.check_open(5)
    push(rounds, 0, 1, 2, round_=4)
    assert closes(rounds)
    with (
        pytest.raises(StaleRoundError, match="round 4 is closed: wait for round 5"),
        rounds.committing(0, "s0", 4),
    ):
        pytest.fail("renamed although the round was being closed")


def test_a_newer_process_of_a_node_replaces_the_older(clock):
    rounds = make(clock)
    rounds.attendance.join(0, "old")
    rounds.attendance.heard(0, "old")
    rounds.attendance.join(0, "new")
    rounds.attendance.heard(0, "new")
    for call in (lambda: rounds.attendance.heard(0, "old"), lambda: push_as(rounds, "old")):
        with pytest.raises(HubRefusedError, match="another process has joined as node 0"):
            call()
    rounds.attendance.leave(0, "old")
    assert rounds.attendance.presence()[0] is Presence.JOINED


def test_waiting_ends_with_the_commit_the_failure_or_the_stop(clock):
    rounds = make(clock)
    assert rounds.wait_round(1, 0.01) == 0
    timer = threading.Timer(0.05, rounds.committed, [1])
    timer.start()
    assert rounds.wait_round(1, 10) == 1
    rounds.fail(DeadlineError("node 2 is gone"))
    with pytest.raises(DeadlineError, match="node 2 is gone"):
        rounds.wait_round(2, 10)
    assert rounds.wait_round(1, 10) == 1
    stopped = make(clock)
    stopped.shutdown.stop()
    with pytest.raises(Stopped):
        stopped.wait_round(1, 10)


def test_a_pull_waits_while_a_round_is_being_closed(clock):
    rounds = make(clock)
    join(rounds, 0, 1, 2)
    push(rounds, 0, 1, 2)
    assert closes(rounds)
    threading.Timer(0.05, rounds.committed, [1]).start()
    rounds.settle()
    assert rounds.round == 1


def known(**presences):
    """Members as an earlier hub noted them: known(n0=Presence.JOINED) is node 0 with session s0."""
    return {int(name[1:]): Member(presence, f"s{name[1:]}") for name, presence in presences.items()}


def test_nodes_known_before_a_restart_have_the_deadline_of_the_round_and_not_that_for_joining(clock):
    joined = dict.fromkeys(("n0", "n1", "n2"), Presence.JOINED)
    rounds = make(clock, pushed={0}, round_=5, members=known(**joined))
    assert closes(rounds) is None
    clock.now = 999  # far beyond the join deadline
    assert closes(rounds) is None
    push(rounds, 1, round_=5)
    clock.now = 1000
    with pytest.raises(DeadlineError, match="round 5: node 2 did not push within 1000 s"):
        rounds.await_close()


def test_nodes_unknown_before_a_restart_have_the_deadline_for_joining(clock):
    rounds = make(clock, round_=5, members=known(n0=Presence.JOINED, n1=Presence.JOINED))
    assert closes(rounds) is None
    clock.now = 100
    rounds.clock._looked = clock()
    with pytest.raises(DeadlineError, match="node 2 did not join within 100 s"):
        rounds.await_close()
    enough = make(clock, round_=5, members=known(n0=Presence.JOINED, n1=Presence.JOINED), min_nodes=2)
    push(enough, 0, 1, round_=5)
    clock.now = 199
    assert closes(enough) is None
    clock.now = 200
    assert closes(enough) == (0, 1)


def test_who_left_before_a_restart_may_come_back_and_who_missed_a_round_is_not_waited_for(clock):
    members = known(n0=Presence.JOINED, n1=Presence.LEFT, n2=Presence.MISSED)
    rounds = make(clock, members=expected_back(members), min_nodes=1)
    assert [rounds.attendance.presence()[node] for node in range(3)] == [
        Presence.JOINED,
        Presence.NEVER_JOINED,
        Presence.MISSED,
    ]
    push(rounds, 0)
    assert closes(rounds) is None
    rounds.attendance.join(1, "another process")
    push(rounds, 1)
    assert closes(rounds) == (0, 1)


def test_an_older_process_is_still_refused_after_a_restart(clock):
    rounds = make(clock, members=known(n0=Presence.JOINED))
    with pytest.raises(HubRefusedError, match="another process has joined as node 0"):
        rounds.attendance.heard(0, "old")
    rounds.attendance.heard(0, "s0")
    rounds.attendance.join(0, "new")
    rounds.attendance.heard(0, "new")


def test_each_change_of_the_members_is_noted_once(clock):
    noted = []
    rounds = make(clock, min_nodes=1, remember=lambda members: noted.append(dict(members)))
    join(rounds, 0, 1, 2)
    rounds.attendance.heard(1, "s1")
    push(rounds, 0)
    assert closes(rounds) is None
    clock.now = 1000
    rounds.attendance.leave(2, "s2")
    assert closes(rounds) == (0,)
    rounds.committed(1)
    rounds.attendance.heard(1, "s1")
    assert [[members[node].presence.value for node in range(3)] for members in noted] == [
        ["joined", "never joined", "never joined"],
        ["joined", "joined", "never joined"],
        ["joined", "joined", "joined"],
        ["joined", "joined", "left"],
        ["joined", "missed a round", "left"],
        ["joined", "joined", "left"],
    ]
    assert noted[-1][1] == Member(Presence.JOINED, "s1")


def test_a_change_that_cannot_be_noted_is_not_made(clock):
    def full(members):
        raise StoreError("no space")

    rounds = make(clock, remember=full)
    with pytest.raises(StoreError, match="no space"):
        rounds.attendance.join(0, "s0")
    assert rounds.attendance.presence()[0] is Presence.NEVER_JOINED


def test_a_hub_that_was_stopped_past_the_deadline_listens_before_it_judges(clock):
    rounds = make(clock, round_deadline_s=1000, min_nodes=2)
    join(rounds, 0, 1, 2)
    assert closes(rounds) is None  # the round's clock has started
    push(rounds, 0)
    closed = []
    closing = threading.Thread(target=lambda: closed.append(rounds.await_close()), daemon=True)
    closing.start()
    time.sleep(3 * POLL_S)
    clock.now = 5000.0  # as after SIGSTOP: nobody was heard meanwhile
    time.sleep(5 * POLL_S)
    assert closed == []
    push(rounds, 1)
    assert closed == []  # node 2 has what was left of the round, too
    push(rounds, 2)
    closing.join(30)
    assert closed == [(0, 1, 2)]


def test_a_hub_that_was_stopped_judges_when_the_rest_of_the_time_is_over(clock):
    rounds = make(clock, round_deadline_s=1000)
    join(rounds, 0, 1, 2)
    assert closes(rounds) is None
    failures = []

    def close():
        try:
            rounds.await_close()
        except DeadlineError as e:
            failures.append(str(e))

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    time.sleep(3 * POLL_S)
    clock.now = 5000.0
    time.sleep(5 * POLL_S)
    while clock.now < 5995:
        clock.now += STANDSTILL_S - 1
        time.sleep(0.001)
        rounds.clock._looked = clock()
    assert failures == []
    clock.now = 6000 + STANDSTILL_S
    rounds.clock._looked = clock()
    closing.join(30)
    assert "did not push within 1000 s" in failures[0]


def test_a_round_whose_push_was_lost_stays_open_for_its_node(clock):
    rounds = make(clock, round_deadline_s=1000, min_nodes=1)
    join(rounds, 0, 1, 2)
    push(rounds, 0, 1, 2)
    assert rounds.await_close() == (0, 1, 2)
    rounds.reopen(1)
    assert rounds.lacks_push(1, 0)
    assert not rounds.has_pushed(1, 0)
    clock.now += 999
    assert closes(rounds) is None
    push(rounds, 1)
    assert closes(rounds) == (0, 1, 2)
