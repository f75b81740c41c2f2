"""The puller's thread alone: what stops waits for what has begun, and what is given up is not held."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from equipoise.transfer.engine import TransferEngine
from equipoise.transfer.node import ExpertWeights
from equipoise.transfer.pulls import Puller, PullSchedule
from equipoise.transfer.waits import Counters
from tests.transfer.test_watchdog import watchdogs
from tests.transfer.windows import random_plan

SOON_S = 0.2
"""Long enough for a call that does not wait to return."""


class Gated:
    """A path whose copies last until they are let through."""

    name = "shm"

    def __init__(self, *, is_open):
        self.is_open = is_open
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def is_ready(self, need, version):
        self.has_begun.set()
        return self.is_open

    def pull(self, needs, buffer):
        assert self.may_end.wait(60)
        return 0


@pytest.fixture
def pulling():
    """A puller that is filling for the first visit with replicas, its path, and its schedule."""
    started = []

    def start(*, is_open):
        plan = random_plan((0, 0), seed=5, slots=1, fewest=1)
        _, (watchdog, _) = watchdogs(timeout_s=60)
        depth = plan.itinerary.depth
        slots = [ExpertWeights(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)) for _ in range(depth + 1)]
        node = SimpleNamespace(
            buffers=SimpleNamespace(slots=slots),
            layout=SimpleNamespace(depth=depth),
            device=torch.device("cpu"),
            watchdog=watchdog,
            counters=Counters(),
            direct_path="shm",
        )
        path = Gated(is_open=is_open)
        puller, schedule = Puller(node, dict.fromkeys(("peer", "host"), path)), PullSchedule(plan, rank=0)
        started.append((puller, path))
        puller.resume(schedule, version=1)
        for layer in range(plan.loads.num_layers):
            puller.open_layer(layer)
        assert path.has_begun.wait(60)
        return puller, path, schedule

    yield start
    for puller, path in started:
        path.may_end.set()
        puller.close()


def returns_only_after(call, release):
    """Whether a call waits for `release` and returns then."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SOON_S)
    has_waited = thread.is_alive()
    release()
    thread.join(60)
    return has_waited and not thread.is_alive()


def test_a_pause_waits_for_the_copy_that_has_begun(pulling):
    puller, path, schedule = pulling(is_open=True)
    assert returns_only_after(puller.pause, path.may_end.set)
    assert schedule.filling is None


def test_a_layer_is_closed_once_the_copy_from_its_homes_is_over(pulling):
    puller, path, schedule = pulling(is_open=True)
    fill = schedule.filling
    assert returns_only_after(lambda: puller.close_layer(fill.entry[1]), path.may_end.set)
    assert not schedule.holds(fill), "what was copied of a closed layer is forgotten"


@pytest.mark.parametrize("call", ["pause", "close_layer"])
def test_copies_that_the_device_has_yet_to_make_are_waited_for(pulling, call):
    puller, path, schedule = pulling(is_open=True)
    layer = schedule.filling.entry[1]
    path.may_end.set()
    puller.pause()
    is_made = threading.Event()
    puller._filled[0] = SimpleNamespace(is_reached=is_made.is_set)
    stop = puller.pause if call == "pause" else lambda: puller.close_layer(layer)
    assert returns_only_after(stop, is_made.set)


def test_a_pull_that_a_pause_gives_up_is_not_held(pulling):
    puller, _, schedule = pulling(is_open=False)
    fill = schedule.filling
    puller.pause()
    assert fill is not None and schedule.filling is None
    assert not schedule.holds(fill)


def test_a_layer_is_collected_after_every_rank_has_stopped_pulling_from_it():
    called = []

    def note(name):
        return lambda *args: called.append((name, args[0]))

    engine = TransferEngine.__new__(TransferEngine)
    engine._puller = SimpleNamespace(close_layer=note("stop pulling"))
    engine._node = SimpleNamespace(agreement=SimpleNamespace(largest=note("all have")))
    engine._refresher = SimpleNamespace(close_layer=note("stop writing"))
    engine._edges = SimpleNamespace(collect_layer=note("collect"))
    engine.collect_layer(3)
    assert called == [("stop pulling", 3), ("all have", [0]), ("stop writing", 3), ("collect", 3)]


def test_a_wait_ends_at_its_bound_by_the_clock(monkeypatch):
    """On a clock that only the waiting itself moves: no busy machine can make it longer."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    _, (watchdog, _) = watchdogs(timeout_s=5.0)

    def pause(seconds):
        now[0] += seconds

    with pytest.raises(Exception, match="did not finish within 5 s"):
        watchdog.wait(lambda: False, transfer=SimpleNamespace(), pause=pause)
    assert 5.0 < now[0] < 5.1
