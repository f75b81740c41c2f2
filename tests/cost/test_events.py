"""What the event-level clock draws: bars that cannot overlap, lanes that stand still during exchanges."""

from itertools import pairwise

import numpy as np
import pytest

from tests.cost.events import Transfer, World, play
from tests.cost.works import random_work


@pytest.fixture(scope="module")
def played():
    rng = np.random.default_rng(2)
    work = random_work(rng, micro_steps=3, layers=3, ranks=4, most_ns=60_000, replicas=6)
    return work, play([work])


def test_bars_of_one_ranks_compute_lane_do_not_overlap(played):
    _, done = played
    for rank in range(4):
        for lane in ("compute", "all-to-all"):
            bars = sorted((b.start_ns, b.end_ns) for _, b in done.bars if (b.rank, b.lane) == (rank, lane))
            assert len(bars) > 9
            assert all(one[1] <= other[0] for one, other in pairwise(bars))


def test_compute_and_exchange_do_not_overlap_on_a_rank(played):
    _, done = played
    exchanges = [b for _, b in done.bars if b.lane == "all-to-all" and b.end_ns > b.start_ns]
    for one in (b for _, b in done.bars if b.lane == "compute"):
        assert not any(
            other.rank == one.rank and other.start_ns < one.end_ns and one.start_ns < other.end_ns
            for other in exchanges
        )


def test_transfers_take_longer_by_the_exchanges_they_stand_still_for(played):
    work, done = played
    exchanges = [(b.start_ns, b.end_ns) for _, b in done.bars if b.lane == "all-to-all" and b.rank == 0]
    pulls = [b for _, b in done.bars if b.lane == "pull"]
    assert pulls
    for bar in pulls:
        stood = sum(max(0, min(bar.end_ns, end) - max(bar.start_ns, start)) for start, end in exchanges)
        moved_ns = bar.end_ns - bar.start_ns - stood
        alone = {
            work.tables.peer_ns,
            work.tables.peer_ns + work.tables.peer_fixed_ns,
            work.tables.host_ns,
            work.tables.host_ns + work.tables.host_fixed_ns,
        }
        assert moved_ns in alone


def test_a_lane_serves_in_order_and_a_pause_stops_it():
    world = World()
    world.given.add(("go",))
    for name in "ab":
        transfer = Transfer(name, "pull", (0,), (("in", 0, 0),), 100, ("go",), ("done", name))
        world.queue(0, transfer)
    world.at(30, lambda: world.pause(0))
    world.at(50, lambda: world.resume(0))
    world.run()
    assert [(bar.name, bar.start_ns, bar.end_ns) for _, bar in world.bars] == [
        ("a", 0, 120),
        ("b", 120, 220),
    ]


def test_a_transfer_waits_for_the_head_of_both_its_lanes():
    world = World()
    world.given.add(("go",))
    world.queue(0, Transfer("blocks", "pull", (0,), (("in", 0, 0), ("out", 0, 1)), 100, ("go",), ("done", 1)))
    world.queue(0, Transfer("waits", "pull", (2,), (("in", 0, 2), ("out", 0, 1)), 50, ("go",), ("done", 2)))
    world.queue(0, Transfer("free", "pull", (3,), (("in", 0, 3), ("out", 0, 4)), 70, ("go",), ("done", 3)))
    world.run()
    ends = {bar.name: bar.end_ns for _, bar in world.bars}
    assert ends == {"blocks": 100, "waits": 150, "free": 70}


def test_what_ends_when_an_exchange_begins_has_ended():
    world = World()
    world.given.add(("go",))
    world.queue(0, Transfer("a", "pull", (0,), (("in", 0, 0),), 30, ("go",), ("done", "a")))
    world.at(30, lambda: world.pause(0))
    world.at(90, lambda: world.resume(0))
    world.run()
    assert [bar.end_ns for _, bar in world.bars] == [30]
