"""The porter: one job after the other, what fails is told to all who wait, and closing never waits for long."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from equipoise.core import TransferError
from equipoise.transfer.engine import Porter


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
def porter():
    made = Porter(SimpleNamespace(device=torch.device("cpu"), direct_path="shm", watchdog=Dog()))
    yield made
    made.close()


def test_jobs_run_in_order_one_at_a_time(porter):
    seen, running = [], []

    def job(name):
        assert not running
        running.append(name)
        seen.append(name)
        running.pop()

    numbers = [porter.give(lambda name=name: job(name)) for name in range(50)]
    porter.wait(numbers[20])
    assert seen[:21] == list(range(21)) and porter.is_done(numbers[20])
    porter.wait()
    assert seen == list(range(50))


def test_gradients_are_off_in_jobs(porter):
    seen = []
    porter.give(lambda: seen.append(torch.is_grad_enabled()))
    porter.wait()
    assert seen == [False]


@pytest.mark.parametrize("error", [TransferError("by name"), KeyError("anything")])
def test_what_fails_is_raised_to_all_who_wait_and_ends_the_work(porter, error):
    seen, is_given = [], threading.Event()

    def fail():
        is_given.wait()
        raise error

    first, second = porter.give(fail), porter.give(lambda: seen.append(1))
    is_given.set()
    for number in (first, second, None):
        with pytest.raises(TransferError, match=r"by name|publish or collect failed: KeyError"):
            porter.wait(number)
    assert not seen and not porter.is_done(first)
    assert porter._node.watchdog.reasons == ([] if isinstance(error, TransferError) else ANYTHING)


ANYTHING = ["publish or collect failed: KeyError('anything')"]


def test_closing_drops_what_has_not_begun(porter):
    seen, has_begun = [], threading.Event()
    porter.give(lambda: (has_begun.set(), is_dropped(porter)))
    porter.give(lambda: seen.append(1))
    has_begun.wait()
    porter.close()
    porter.close()
    assert not seen and not porter._thread.is_alive()


def is_dropped(porter):
    """Wait until nothing is left to do."""
    while porter._jobs:
        time.sleep(1e-3)


def test_a_job_that_hangs_is_told_to_give_up(porter):
    has_begun, is_over = threading.Event(), threading.Event()
    porter.give(lambda: (has_begun.set(), is_over.wait()))
    has_begun.wait()
    porter.close()
    assert porter._node.watchdog.reasons == ["closed while experts were on their way between owners and homes"]
    is_over.set()
