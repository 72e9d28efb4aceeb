"""launchers/node.sh, with a stand-in for the command that it starts again."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "launchers/node.sh"


@pytest.fixture
def start(tmp_path):
    """Starts the script; its command appends a line to `calls` and `attempts`, and ends with the exit code given."""

    def start(code, **env):
        command = tmp_path / "spes-mega"
        noting = f'echo "$@" >> {tmp_path}/calls\necho "$SPES_MEGA_ATTEMPT" >> {tmp_path}/attempts'
        command.write_text(f"#!/bin/sh\n{noting}\nexit {code}\n")
        command.chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
        return subprocess.Popen(
            ["bash", SCRIPT, "r.yaml", "1", "hub:7070", "--out", "o"], env=environment, stderr=subprocess.DEVNULL
        )

    return start


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_a_lost_hub_is_tried_again_as_often_as_asked(start, tmp_path):
    assert start(7, RETRIES="2", RETRY_SECONDS="0").wait(60) == 7
    assert calls(tmp_path) == ["launch r.yaml --node 1 --hub hub:7070 --out o"] * 3


def test_all_tries_are_one_attempt_and_the_next_start_is_another(start, tmp_path):
    for _ in range(2):
        start(7, RETRIES="1", RETRY_SECONDS="0").wait(60)
    first, again, second, second_again = (tmp_path / "attempts").read_text().split()
    assert first == again != second == second_again


@pytest.mark.parametrize("code", [0, 3, 8, 9, 143])
def test_what_trying_again_cannot_mend_ends_it(start, tmp_path, code):
    assert start(code, RETRIES="2", RETRY_SECONDS="0").wait(60) == code
    assert len(calls(tmp_path)) == 1


def test_sigterm_between_two_tries_ends_it(start, tmp_path):
    process = start(7, RETRIES="5", RETRY_SECONDS="30")
    deadline = time.monotonic() + 30
    while not calls(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # until it sleeps
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert len(calls(tmp_path)) == 1
