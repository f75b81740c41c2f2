"""Dispatches of a window in the background: errors come where they are asked for, and closing ends every wait."""

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from equipoise.core.errors import InfeasiblePlanError, RoutesError, TransferError
from equipoise.layer.dispatch import WindowDispatches
from tests.layer.cases import random_routing, static_plan
from tests.layer.stack import Run, build_layers


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def window(group):
    """Routes of one rank, their plan and its layers."""
    routing = random_routing(14, ranks=1)
    plan = static_plan(routing)
    return [[by_rank[0] for by_rank in by_layer] for by_layer in routing.ids], plan, build_layers(group, plan, Run())


def never(*_):
    raise AssertionError("direct dispatches need no exchange")


def test_every_entry_is_what_its_layer_would_prepare(group):
    routes, plan, layers = window(group)
    routes = [[ids.astype(np.uint8) for ids in by_layer] for by_layer in routes]
    dispatches = WindowDispatches(routes, timeout_s=60.0)
    threading.Thread(target=dispatches.make, args=(plan, layers), kwargs={"swap": never}).start()
    for m, layer in np.ndindex(2, 2):
        layers[layer].window = FakeWindow(plan)
        wanted = layers[layer].prepare(torch.from_numpy(routes[m][layer].astype(np.int64)), m)
        for _ in range(2):
            assert dispatches.take(m, layer).unpack("cpu").is_same(wanted)


class FakeWindow:
    """As much of a window as preparing needs."""

    rank = 0

    def __init__(self, plan):
        self.plan = plan


def test_an_error_is_raised_where_its_entry_is_asked_for_and_later_ones_say_why_they_are_missing(group):
    routes, plan, layers = window(group)
    routes[0][1] = routes[0][1][1:]
    dispatches = WindowDispatches(routes, timeout_s=60.0)
    dispatches.make(plan, layers, swap=never)
    assert dispatches.take(0, 0) is not None
    assert dispatches.is_made(0, 0) and not dispatches.is_made(1, 0)
    with pytest.raises(RoutesError, match="rows from these ids, but the plan says"):
        dispatches.take(0, 1)
    with pytest.raises(TransferError, match=r"micro-step 1, layer index 0 .* ended with an earlier entry's error"):
        dispatches.take(1, 0)


def test_closing_ends_a_wait(group):
    routes, _, _ = window(group)
    dispatches = WindowDispatches(routes, timeout_s=60.0)
    begin = time.monotonic()
    threading.Timer(0.1, dispatches.close).start()
    with pytest.raises(TransferError, match="or the window is over"):
        dispatches.take(0, 0)
    assert time.monotonic() - begin < 30


def test_an_entry_outside_the_window_is_refused(group):
    routes, _, _ = window(group)
    with pytest.raises(InfeasiblePlanError, match=r"micro-step 2, layer index 0; the window has 2 micro-steps"):
        WindowDispatches(routes, timeout_s=60.0).take(2, 0)


def test_a_wait_is_bounded(group):
    routes, _, _ = window(group)
    with pytest.raises(TransferError, match=r"within 0\.05 s"):
        WindowDispatches(routes, timeout_s=0.05).take(0, 0)
