"""The pool itself: results in rank order, a rank's words in the failure, fresh workers afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, WorkerError


def summed_ranks(group, factor):
    total = torch.tensor([float(group.rank() * factor)])
    dist.all_reduce(total, group=group)
    return group.rank(), total.item()


def fail_on_rank_one(group):
    if group.rank() == 1:
        raise ValueError("rank one has nothing to say")
    dist.barrier(group)


def die_on_rank_one(group):
    if group.rank() == 1:
        os._exit(7)
    dist.barrier(group)


def sleep_forever(group):
    time.sleep(1000)


@pytest.mark.dist(4)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_results_come_in_rank_order(pool, world_size):
    total = 10.0 * sum(range(world_size))
    assert pool.run(summed_ranks, world_size, 10) == [(rank, total) for rank in range(world_size)]


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.parametrize(
    ("function", "words"),
    [(fail_on_rank_one, "rank one has nothing to say"), (die_on_rank_one, "rank 1: the process died")],
    ids=["raises", "dies"],
)
def test_a_failing_rank_fails_the_run_and_the_next_run_finds_fresh_workers(function, words):
    own = Pool(2)
    try:
        with pytest.raises(WorkerError, match=words):
            own.run(function, 2)
        assert own.run(summed_ranks, 2, 1) == [(0, 1.0), (1, 1.0)]
    finally:
        own.close()


@pytest.mark.slow
@pytest.mark.dist(2)
def test_a_rank_that_never_answers_is_named_in_time():
    own = Pool(2)
    with pytest.raises(WorkerError, match="rank 0: no answer within 1 s"):
        own.run(sleep_forever, 1, timeout_s=1.0)


LONG_RUN = """
from tests.pool import Pool
from tests.transfer.test_pool import process_ids, sleep_forever
if __name__ == "__main__":
    workers = Pool(2)
    print(*workers.run(process_ids, 2), flush=True)
    workers.run(sleep_forever, 2)
"""


def process_ids(group):
    return os.getpid()


def is_alive(process_id):
    """Whether a process of that id runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.dist(2)
def test_workers_end_with_a_killed_test_process(tmp_path):
    script = tmp_path / "long_run.py"
    script.write_text(LONG_RUN)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
    )
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2 and all(map(is_alive, children))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    end = time.monotonic() + 60
    while any(map(is_alive, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, children))
