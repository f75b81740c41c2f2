"""The job queue: one job after the other, a failure reaches all who wait, and closing never waits for long."""

import threading
import time

import pytest
import torch

from equipoise.core import TransferError
from equipoise.transfer.waits import JobQueue


class Dog:
    """A watchdog without peers."""

    def __init__(self):
        self.reasons = []

    def wait(self, is_ready, transfer):
        assert is_ready()

    def abort(self, reason):
        self.reasons.append(reason)
        return TransferError(reason)


@pytest.fixture
def queue():
    made = JobQueue(Dog(), torch.device("cpu"))
    yield made
    made.close()


def test_jobs_run_in_order_one_at_a_time(queue):
    seen, running = [], []

    def job(name):
        assert not running
        running.append(name)
        seen.append(name)
        running.pop()

    jobs = [queue.submit(lambda name=name: job(name)) for name in range(50)]
    jobs[20].result()
    assert seen[:21] == list(range(21)) and jobs[20].done()
    queue.drain()
    assert seen == list(range(50))


def test_gradients_are_off_in_jobs(queue):
    seen = []
    queue.submit(lambda: seen.append(torch.is_grad_enabled()))
    queue.drain()
    assert seen == [False]


@pytest.mark.parametrize("error", [TransferError("by name"), KeyError("anything")])
def test_what_fails_is_raised_to_all_who_wait_and_ends_the_work(queue, error):
    seen, is_given = [], threading.Event()

    def fail():
        is_given.wait()
        raise error

    first, second = queue.submit(fail), queue.submit(lambda: seen.append(1))
    is_given.set()
    for wait in (first.result, second.result, queue.drain, queue.submit(lambda: seen.append(2)).result):
        with pytest.raises(TransferError, match=r"by name|publish or collect failed: KeyError"):
            wait()
    assert not seen
    assert queue._watchdog.reasons == ([] if isinstance(error, TransferError) else ANYTHING)


ANYTHING = ["publish or collect failed: KeyError('anything')"]


def test_closing_drops_what_has_not_begun(queue):
    seen, has_begun = [], threading.Event()
    queue.submit(lambda: (has_begun.set(), is_dropped(later)))
    later = queue.submit(lambda: seen.append(1))
    has_begun.wait()
    queue.close()
    queue.close()
    assert not seen and later.cancelled()
    for thread in queue._executor._threads:
        thread.join(20)
        assert not thread.is_alive()


def is_dropped(job):
    """Wait until a job will not begin."""
    while not job.cancelled():
        time.sleep(1e-3)


def test_a_job_that_hangs_is_told_to_give_up(queue):
    has_begun, is_over = threading.Event(), threading.Event()
    queue.submit(lambda: (has_begun.set(), is_over.wait()))
    has_begun.wait()
    queue.close()
    assert queue._watchdog.reasons == ["closed while experts were on their way between owners and homes"]
    is_over.set()
