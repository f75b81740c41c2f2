"""The transfers' own connection: a rank that gives up alone leaves the training's group as it was."""

import time

import pytest
import torch
import torch.distributed as dist

from equipoise.core import TransferError
from equipoise.transfer.waits import Message, OwnGroup, Transfer
from tests.transfer.play import Rank, run_window
from tests.transfer.test_memory import open_files
from tests.transfer.windows import random_plan


def messages_both_ways(group):
    rank, connection = group.rank(), OwnGroup(group, timeout_s=60.0)
    others = [peer for peer in range(group.size()) if peer != rank]
    leaving = [Message(torch.tensor([10 * rank + peer, n]), peer, True) for peer in others for n in range(2)]
    coming = [Message(torch.zeros(2, dtype=torch.int64), peer, False) for peer in others for _ in range(2)]
    for work in connection.start([*leaving, *coming]):
        work.wait()
    largest = connection.largest([rank, -rank])
    connection.close()
    connection.close()
    return [message.tensor.tolist() for message in coming], largest


@pytest.mark.dist(4)
def test_messages_come_in_order_and_the_largest_is_that_of_all(pool):
    for rank, (came, largest) in enumerate(pool.run(messages_both_ways, 4)):
        assert came == [[10 * peer + rank, n] for peer in range(4) if peer != rank for n in range(2)]
        assert largest == [3, 0]


def sockets():
    return sum("socket:" in link for link in open_files())


def connect_again_and_again(group):
    """Sockets before and after ten connections were made and closed."""
    OwnGroup(group, timeout_s=60.0).close()
    dist.barrier(group)
    before = sockets()
    for _ in range(10):
        OwnGroup(group, timeout_s=60.0).close()
    # Gloo closes in a thread of its own, once the other side has too: on a busy machine that takes its time.
    dist.barrier(group)
    end = time.monotonic() + 20
    while sockets() > before and time.monotonic() < end:
        time.sleep(0.05)
    return before, sockets()


@pytest.mark.dist(2)
def test_closed_connections_leave_no_socket(pool):
    for before, after in pool.run(connect_again_and_again, 2):
        # The first one's sockets may have been there still.
        assert after <= before


def give_up_alone(group, plan, how):
    """Rank 0 enters an exchange, rank 1 gives up instead; then both start anew in the same processes and group."""
    rank, words = Rank(group, plan), ""
    node, begin = rank.engine._node, time.monotonic()
    try:
        if group.rank() == 1:
            # Long enough for rank 0 to be inside.
            time.sleep(0.3)
            raise node.watchdog.abort("a fault of its own")
        if how == "agree":
            node.agreement.largest([0], Transfer("collect", path="p2p"))
        else:
            rank.engine.open_window(plan)
    except TransferError as error:
        words = str(error)
    rank.engine.close()
    seconds, total = time.monotonic() - begin, torch.tensor([group.rank() + 1])
    dist.all_reduce(total, group=group)
    again = Rank(group, plan)
    with again.engine as engine:
        engine.open_window(plan)
        run_window(again, plan, lambda: None)
        engine.close_window()
    return words, seconds, int(total)


@pytest.mark.dist(2)
@pytest.mark.parametrize("how", ["agree", "open a window"])
def test_a_rank_that_gives_up_alone_leaves_the_group_usable(pool, how):
    first, second = pool.run(give_up_alone, 2, random_plan((0, 0), seed=1, slots=1, fewest=1), how)
    assert "ended because rank 1: a fault of its own" in first[0] and "a fault of its own" in second[0]
    assert max(first[1], second[1]) < 30.0, "closing must not wait for an exchange that is left alone"
    assert first[2] == second[2] == 3
