"""Faults: whatever does not finish, and whoever is killed, ends every rank by name, in time, leaving nothing."""

import os
import re
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from equipoise.core import TransferError
from equipoise.core.plan import Visit
from equipoise.transfer.edges import Relocator
from equipoise.transfer.pulls import MappedPath
from equipoise.transfer.waits import ABORTED
from tests.transfer.own_ranks import KILLED, run_ranks
from tests.transfer.play import Rank
from tests.transfer.test_memory import is_back
from tests.transfer.windows import assert_same_bits, experts_at, random_plan, take

BOUND_S = 2.0
"""Bound on waits once the fault is near; before it, ranks on a busy machine may wait for each other much longer."""
SLACK_S = 20.0
"""How late a rank of a busy machine may hear what it is told at once; far below the bound on connections, 120 s."""


def shorten(rank):
    """From here on this rank waits for nothing longer than BOUND_S."""
    node = rank.engine._node
    node.watchdog.timeout_s, node.options = BOUND_S, replace(node.options, timeout_s=BOUND_S)


def wait_for(is_there, wait_s=60.0):
    """Wait for what a test brings about, however long a busy machine takes."""
    end = time.monotonic() + wait_s
    while not is_there():
        assert time.monotonic() < end, "what the test waits for did not come"
        time.sleep(0.01)


class StuckPath(MappedPath):
    """A path that never finishes."""

    name = "shm"

    def __init__(self):
        self.is_over = False

    def is_ready(self, need, version):
        return True

    def pull(self, needs, buffer):
        while not self.is_over:
            time.sleep(0.01)
        return 0


def stuck(group, plan, what):
    """One rank does not do its part; every rank tells what it saw and when."""
    path, begin = StuckPath(), time.monotonic()
    is_bad = group.rank() == 1
    engine = {"paths": {"peer": path, "host": path}} if is_bad and what == "pull" else {}
    rank = Rank(group, plan, **engine)
    node, is_due = rank.engine._node, True

    def fault():
        """All come here together. The bad rank goes on when another has given up; a pull ends by its own bound."""
        nonlocal begin, is_due
        dist.barrier(group)
        # Who waits for the stuck pull must not give up before it does.
        if what != "pull" or is_bad or 1 not in node.peers:
            shorten(rank)
        if is_bad and what != "pull":
            wait_for(lambda: any(cells[ABORTED] for cells in node.cells.values()))
        begin, is_due = time.monotonic(), False

    try:
        if what == "publish":
            fault()
        rank.engine.open_window(plan)
        if what == "pull":
            fault()
        for at in range(len(plan.itinerary)):
            visit = plan.itinerary.visits()[at]
            rank.check_weights(plan, visit)
            if visit.phase == "backward":
                if what == "return" and is_due:
                    fault()
                rank.return_gradients(plan, visit)
        if what == "collect":
            fault()
        rank.engine.close_window()
    except TransferError as error:
        return str(error), time.monotonic() - begin
    finally:
        path.is_over = True
        rank.engine.close()
    return "nothing was noticed", 0.0


@pytest.mark.parametrize(
    ("what", "node_R"),
    [(what, (0, 0, 0, 0)) for what in ("pull", "return", "collect", "publish")] + [("pull", (0, 0, 1, 1))],
    ids=["pull", "return", "collect", "publish", "pull, two nodes"],
)
def test_what_never_finishes_ends_every_rank_within_the_bound(what, node_R):
    plan = random_plan(node_R, seed=3, slots=1, fewest=1, layers=2, micro_steps=1)
    results = run_ranks(stuck, 4, plan, what)
    for words, seconds in results:
        assert "did not finish within 2 s" in words, words
        assert seconds < BOUND_S + SLACK_S, f"{seconds:.1f} s until: {words}"
    near = [words for (words, _), node in zip(results, node_R, strict=True) if node == 0]
    if what == "pull":
        visit = next(v for v in range(len(plan.itinerary)) if plan.pulls(v, 1))
        pull, layer = plan.pulls(visit, 1)[0], int(plan.itinerary.layer_V[visit])
        name = f"rank 1: pull of expert {pull.expert} in layer index {layer} with rank {pull.source} over shm"
        assert all(name in words for words in near), results
    if what == "return":
        assert any("return of expert" in words and "with rank 1 over shm" in words for words in near), results


class LateRelocator(Relocator):
    """Has something to do before it comes to the second layer."""

    def relocate(self, kind, layer, moves, tensors):
        if layer == 1:
            self.come()
        super().relocate(kind, layer, moves, tensors)


def late_for_an_exchange(group, plan):
    """Both ranks come to the second layer together; rank 1 goes on when rank 0 has given up."""
    rank, store = Rank(group, plan), group.get_group_store()

    def come():
        dist.barrier(group)
        shorten(rank)
        if group.rank() == 1:
            store.wait(["rank 0 has given up"], timedelta(seconds=60))

    relocator = rank.engine._edges._relocator
    relocator.__class__, relocator.come = LateRelocator, come
    try:
        rank.engine.open_window(plan)
        rank.engine.wait_for(Visit(0, "forward", 1))
    except TransferError as error:
        store.set(f"rank {group.rank()} has given up", "1")
        return str(error)
    finally:
        check_whole_layers(rank, plan)
        rank.engine.close()
    return "nothing was noticed"


def test_an_exchange_across_nodes_that_never_finishes_names_the_expert():
    plan = random_plan((0, 1), seed=1)
    first, second = run_ranks(late_for_an_exchange, 2, plan)
    experts = "|".join(str(e) for e in np.flatnonzero(plan.displaced_LE[1]))
    name = rf"publish of expert ({experts}) in layer index 1 with rank {{}} over p2p did not finish within 2 s"
    assert re.search("rank 0: " + name.format(1), first), first
    assert re.search("rank 1: " + name.format(0), second), second


class KillingRelocator(Relocator):
    """Ends its process once the second layer is staged, before anyone has agreed to write it."""

    kind = ""

    def relocate(self, kind, layer, moves, tensors):
        self.is_last = kind == self.kind and layer == 1
        super().relocate(kind, layer, moves, tensors)

    def _agree(self, transfer, moves, tensors):
        if self.is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._agree(transfer, moves, tensors)


def killed(group, plan, where):
    """Rank 1 is killed; the others tell what they saw, when, and what is left of their memory."""
    rank = Rank(group, plan)
    is_victim, begin, words = group.rank() == 1, time.monotonic(), ""
    if is_victim and where in ("publish", "collect"):
        rank.engine._edges._relocator.__class__ = KillingRelocator
        KillingRelocator.kind = where
    try:
        rank.engine.open_window(plan)
        for at in range(len(plan.itinerary)):
            visit = plan.itinerary.visits()[at]
            if is_victim and visit.phase == where:
                os.kill(os.getpid(), signal.SIGKILL)
            rank.check_weights(plan, visit)
            if visit.phase == "backward":
                rank.return_gradients(plan, visit)
        rank.engine.close_window()
    except TransferError as error:
        words = str(error)
    seconds = time.monotonic() - begin
    if where == "publish":
        check_whole_layers(rank, plan)
    rank.engine.close()
    return words, seconds, is_back((0, sys.maxsize))


def check_whole_layers(rank, plan):
    """The layer before the fault is published, the others are untouched."""
    owned = range(rank.rank * plan.home_slots, (rank.rank + 1) * plan.home_slots)
    for layer in range(rank.layers):
        experts = experts_at(plan, layer, rank.rank) if layer == 0 else owned
        assert_same_bits(rank.homes[layer], take(rank.everything[layer], experts), f"layer {layer} after the fault")


@pytest.mark.parametrize("where", ["forward", "backward", "publish", "collect"])
@pytest.mark.parametrize("node_R", [(0, 0, 0), (0, 0, 1, 1)], ids=["one node", "two nodes"])
def test_a_killed_rank_ends_the_others_by_name(where, node_R):
    plan = random_plan(node_R, seed=6, slots=1, fewest=1, micro_steps=1)
    results = run_ranks(killed, len(node_R), plan, where)
    assert results.pop(1) == KILLED
    for words, seconds, is_clean in results:
        assert "gone" in words, f"{words!r} after {seconds:.1f} s"
        assert seconds < 30, f"{seconds:.1f} s until: {words}; the bound on waits is 60 s"
        assert is_clean, "mappings are left"
    assert "rank 1" in results[0][0] and "is gone" in results[0][0]


class LeavingRelocator(Relocator):
    """Ends its process in the third round of the second layer, when others have written two."""

    def relocate(self, kind, layer, moves, tensors):
        self.rounds_left = 3 if layer == 1 else -1
        super().relocate(kind, layer, moves, tensors)

    def _stage(self, whole, staged, tensors):
        self.rounds_left -= 1
        if self.rounds_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._stage(whole, staged, tensors)


def killed_between_rounds(group, plan):
    rank, words = Rank(group, plan), ""
    if group.rank() == 1:
        rank.engine._edges._relocator.__class__ = LeavingRelocator
    try:
        rank.engine.open_window(plan)
        rank.engine.wait_for(Visit(0, "forward", 1))
    except TransferError as error:
        words = str(error)
    rank.engine.close()
    return words, is_back((0, sys.maxsize))


@pytest.mark.parametrize("node_R", [(0, 0, 0), (0, 0, 1, 1)], ids=["one node", "two nodes"])
def test_a_rank_killed_between_rounds_leaves_a_layer_that_is_called_in_pieces(node_R):
    results = run_ranks(killed_between_rounds, len(node_R), random_plan(node_R, seed=6, home_slots=16))
    assert results.pop(1) == KILLED
    for words, is_clean in results:
        assert "gone" in words and "layer index 1 is in pieces, " in words and "load the last checkpoint" in words, (
            words
        )
        assert is_clean, "mappings are left"
