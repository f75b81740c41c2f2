"""Worker processes for distributed tests: started once, forked from one import of torch, connected, never left behind.

    def work(group, factor):                      # module level, in a module that imports little
        return group.rank() * factor

    @pytest.mark.dist(4)
    def test_work(pool):
        assert pool.run(work, 4, 10) == [0, 10, 20, 30]

Invariants (asserted by the tests):
1. `run` returns the results of ranks 0..world_size-1 in rank order; arguments and results travel by pickle.
2. A rank that raises, dies or does not finish in time fails the test with that rank's words, and never hangs it.
3. After a failure the next run finds fresh workers. Workers end with the test process, however it ends.
"""

import gc
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from equipoise.launch import end_with_parent
from equipoise.planning.worker import PlanWorker

SIZES = (1, 2, 4, 8)
"""World sizes that tests may ask for."""
START_S = 300.0
"""An import of torch and eight forks on two cores that others keep busy too."""
PRELOAD = ("torch", "equipoise.balancer", "equipoise.rl.train", "transformers.models.qwen3_moe.modeling_qwen3_moe")
"""What the server has loaded from which workers are forked: nothing that needs a rank, or a thread (BLAS makes its own
anew after a fork)."""
GRACE_S = 3.0
"""How long the other ranks may still answer once one has failed."""


def preloaded_context() -> Any:
    """Return a multiprocessing context whose processes are forked with everything loaded: starting one costs little."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD])
    return context


class WorkerError(Exception):
    """A rank raised, died or did not finish; the text is what it said."""


class Pool:
    """Ranks in their own processes, started with the first run."""

    def __init__(self, size: int = max(SIZES), *, backend: str = "gloo") -> None:
        """
        Args:
            backend: of the groups, as torch names it
        """
        self._size, self._backend = size, backend
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, function: Callable, world_size: int, *args: Any, timeout_s: float = 300.0) -> list:
        """Call `function(group, *args)` on ranks 0..world_size-1 and return their results.

        Args:
            function: a module-level function; `group` is a process group of `world_size` ranks
            timeout_s: bound on the whole call
        """
        if not self._workers:
            self._start()
        message = pickle.dumps((function, world_size, args))
        for _, pipe in self._workers[:world_size]:
            pipe.send_bytes(message)
        return self._answers(world_size, timeout_s=timeout_s)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        context = preloaded_context()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            place = (rank, self._size, str(Path(self._folder.name) / "store"), self._backend)
            process = context.Process(target=_serve, args=(theirs, *place), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        self._answers(self._size, timeout_s=START_S)

    def _answers(self, world_size: int, *, timeout_s: float) -> list:
        """Wait for every rank; after a first failure only a moment longer, and then give the workers up."""
        waiting = {self._workers[rank][1]: rank for rank in range(world_size)}
        results, failures, end = [None] * world_size, {}, time.monotonic() + timeout_s
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting.pop(pipe)
                is_good, value = _receive(pipe)
                if is_good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    end = min(end, time.monotonic() + GRACE_S)
        if waiting and not failures:
            failures = dict.fromkeys(waiting.values(), f"no answer within {timeout_s:.0f} s\n")
        if failures:
            self.close()
            raise WorkerError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return results

    def close(self) -> None:
        """End the workers this pool started and remove their files."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _receive(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return False, "the process died\n"


def be_another_host(rank: int) -> None:
    """Let NCCL join this rank with others of the same GPU; before its first communicator."""
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def _serve(pipe: Connection, rank: int, size: int, store: str, backend: str) -> None:
    """Run in a worker: join the others, then answer calls until the pipe closes."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    import torch
    import torch.distributed as dist

    # What was loaded before the fork stays: a collection need not look at it, and does not copy its pages.
    gc.freeze()
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    be_another_host(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    groups = {n: dist.new_group(list(range(n)), timeout=limit) for n in SIZES if n <= size}
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            function, world_size, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        torch.manual_seed(rank)
        try:
            answer = pickle.dumps((True, function(groups[world_size], *args)))
        except Exception:  # noqa: BLE001  # the test shows it, whatever it is
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


@cache
def kept_worker() -> PlanWorker:
    """One planning process for all tests of this rank, and it ends with the rank: starting one takes seconds."""
    return PlanWorker()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The one pool of worker processes of a test run."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def nccl_pool() -> Iterator[Pool]:
    """Worker processes whose groups move CUDA tensors by NCCL, each another host to it, all on one GPU."""
    workers = Pool(backend="cpu:gloo,cuda:nccl")
    yield workers
    workers.close()
