import threading
import time

import pytest
import torch

from spes_mega.errors import CheckpointError
from upcycle.workers import Workers


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_all_jobs_run_and_their_results_arrive_in_order():
    done, seen = [], []
    with Workers(done.append) as workers:
        for i in range(20):
            workers.submit(lambda i=i: seen.append((i, torch.get_num_threads(), threading.current_thread())) or i)
    assert done == list(range(20))
    assert {i for i, _, _ in seen} == set(range(20))
    assert {threads for _, threads, _ in seen} == {1}
    assert 1 <= len({thread for _, _, thread in seen}) <= 2
    assert torch.get_num_threads() == 2


def test_jobs_run_side_by_side_but_no_more_than_a_few_are_handed_over():
    meeting, gate, handed = threading.Barrier(2), threading.Event(), []

    def main():
        with Workers(lambda count: None) as workers:
            for i in range(10):
                workers.submit(lambda: meeting.wait(10) * 0 if len(handed) < 2 else int(gate.wait(10)))
                handed.append(i)

    thread = threading.Thread(target=main)
    thread.start()
    time.sleep(0.3)
    waiting = len(handed)
    gate.set()
    thread.join(20)
    assert not thread.is_alive()
    assert len(handed) == 10
    assert waiting < 10


def submit_all(jobs, then=None):
    with Workers(lambda count: None) as workers:
        for job in jobs:
            workers.submit(job)
        if then:
            raise then


def test_an_error_of_a_job_ends_the_work():
    ran = []

    def fail():
        raise CheckpointError("no space left")

    with pytest.raises(CheckpointError, match="no space left"):
        submit_all([fail] + [lambda: ran.append(1) or 0] * 100)
    assert len(ran) < 10
    assert torch.get_num_threads() == 2


def test_an_error_outside_leaves_jobs_undone_but_none_running():
    started, ended = [], []

    def job():
        started.append(1)
        time.sleep(0.1)
        ended.append(1)
        return 0

    with pytest.raises(KeyboardInterrupt):
        submit_all([job] * 4, then=KeyboardInterrupt())
    assert len(started) == len(ended) <= 2
