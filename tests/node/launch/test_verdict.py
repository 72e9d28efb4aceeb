"""Which of the ends of a node's processes counts."""

import re
import signal
import tempfile
from pathlib import Path

import pytest

from spes_mega import __version__
from spes_mega.node.launch.verdict import NodeEnd, RankEnd

KILLED = -signal.SIGKILL


@pytest.fixture(autouse=True)
def _reports_of_faults(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def rank(number, at=1.0, **end):
    return RankEnd(number, at, **end)


def done(number):
    return rank(number, code=0, status=0)


def stopped(number, at=1.0, signum=signal.SIGTERM):
    return rank(number, at, code=128 + signum, message="stopped on request", status=128 + signum, shown=number == 0)


def broken(number, at=1.0):
    return rank(number, at, code=1, message="lost", trace="Traceback: lost\n", status=1)


def verdict(*ranks, launcher=0, stopped_by=None, stopped_at=0.0, expected=2):
    code, lines = NodeEnd(ranks, expected, launcher, stopped_by, stopped_at).verdict()
    return code, "\n".join(lines)


@pytest.mark.parametrize("launcher", [0, 1, KILLED])
def test_success_is_what_all_ranks_said_and_nothing_else(launcher):
    assert verdict(done(0), done(1), launcher=launcher) == (0, "")
    assert verdict(done(0), launcher=launcher)[0] != 0
    assert verdict(launcher=launcher, expected=None)[0] != 0


def test_a_death_outranks_the_errors_that_it_causes_whichever_is_noticed_first():
    for at in (0.5, 5.0):
        code, text = verdict(broken(0), rank(1, at, status=KILLED), launcher=1)
        assert code == 137
        assert text.startswith("error: rank 1 was killed by signal 9 (SIGKILL): ")
        assert "Traceback" not in text
    code, text = verdict(broken(0), rank(1, 40.0, status=KILLED), launcher=1)  # the launcher killed what hung
    assert code == 1
    match = re.fullmatch(
        rf"error: this is a fault of spes-mega {__version__}: lost; please report it with (\S+), which .*", text
    )
    assert "Traceback: lost" in Path(match[1]).read_text()


def test_an_error_of_one_rank_is_shown_unless_it_has_been():
    error = {"code": 5, "message": "bad data", "status": 5}
    assert verdict(broken(0, 1.0), rank(1, 1.5, **error), launcher=1) == (5, "error: bad data")
    shared = rank(0, **error, shown=True), rank(1, **error)
    assert verdict(*shared, launcher=5) == (5, "")


def test_ranks_that_were_stopped_because_of_another_are_not_the_cause():
    starting = rank(0, 1.0, status=-signal.SIGTERM)
    assert verdict(starting, rank(1, 1.0, code=3, message="bad recipe", status=3), launcher=3)[0] == 3
    assert verdict(stopped(0, 0.5), broken(1, 1.0), launcher=1)[0] == 1


@pytest.mark.parametrize(("status", "code"), [(0, 1), (77, 77), (-signal.SIGSEGV, 139)])
def test_an_end_without_a_word_is_a_failure(status, code):
    found, text = verdict(done(0), rank(1, status=status), launcher=0)
    assert found == code
    assert text.startswith("error: rank 1 ")


def test_a_stop_on_request():
    both = stopped(0), stopped(1)
    assert verdict(*both, launcher=KILLED, stopped_by=signal.SIGINT) == (130, "")
    assert verdict(stopped_by=signal.SIGTERM, expected=None) == (143, "")
    full = rank(1, 2.0, code=4, message="disk full", status=4)
    assert verdict(stopped(0), full, stopped_by=signal.SIGTERM) == (4, "error: disk full")
    late = rank(1, 29.0, status=KILLED)
    code, text = verdict(stopped(0), late, stopped_by=signal.SIGTERM)
    assert code == 143
    assert text.startswith("error: rank 1 did not end within 29 s and was killed")
    assert verdict(stopped(0), rank(1, 3.0, status=KILLED), stopped_by=signal.SIGTERM)[0] == 137


@pytest.mark.parametrize(
    ("launcher", "code", "who"),
    [
        (0, 137, "DeepSpeed's launcher was killed"),
        (KILLED, 137, "DeepSpeed's runner was killed by signal 9"),
        (143, 143, ""),
    ],
)
def test_who_was_killed_when_ranks_stopped_that_nobody_asked(launcher, code, who):
    found, text = verdict(stopped(0), stopped(1), launcher=launcher)
    assert found == code
    assert who in text
    assert ("error: " in text) == bool(who)
