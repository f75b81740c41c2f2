"""`run_ranks`: call one function on local ranks, each a process of its own, connected by gloo.

Knows processes. Does not know what they compute.

Invariants (asserted by the tests):
1. Results come in rank order; a rank that raises, dies or is late is an error with its words. Of a rank that raises
   and one that dies because of it, the first is named.
2. No process outlives the call.
3. What rank 0 tells on the way comes in order, before the results.
4. Ctrl-C is the caller's: it ends all ranks, and none of them says a word.
"""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from equipoise.core.errors import TransferError
from equipoise.core.interrupt import deaf_children

_GRACE_S = 10.0
"""How long others may still tell what failed once a rank has died: it may have died of that."""


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 300.0,
    progress: Callable[..., None] | None = None,
) -> list[Any]:
    """Call `function(group, *args)` on every rank and return the results.

    Args:
        function: a module-level function; arguments and results travel pickled
        timeout_s: bound on the whole call
        progress: where given, the function has a keyword `tell`, and what rank 0 tells with it comes here
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="equipoise-ranks-") as folder:
        pipes: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                place = (rank, ranks, str(Path(folder) / "store"), timeout_s)
                given = (theirs, place, function, args, progress is not None)
                process = context.Process(target=_serve, args=given, daemon=True)
                with deaf_children():
                    process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _answers(pipes, timeout_s=timeout_s, progress=progress)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection], *, timeout_s: float, progress: Callable[..., None] | None) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting, end = set(pipes), time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            late = sorted(pipes.index(pipe) for pipe in waiting)
            raise TransferError(f"ranks {late} gave no answer within {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection), "only pipes are waited for"
            rank = pipes.index(pipe)
            kind, value = _receive(pipe)
            if kind == "died":
                raise _told_by_others(pipes, waiting - {pipe}) or TransferError(f"rank {rank} died")
            if kind == "failed":
                raise TransferError(f"rank {rank} failed:\n{value}")
            if kind == "told" and progress is not None:
                progress(*value)
            if kind == "done":
                waiting.discard(pipe)
                results[rank] = value
    return results


def _receive(pipe: Connection) -> tuple[str, Any]:
    """What a rank tells next; a rank that ended without an answer died."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return "died", None


def _told_by_others(pipes: list[Connection], others: set[Connection]) -> TransferError | None:
    """The failure that another rank tells in the moments after one has died, if any does."""
    end = time.monotonic() + _GRACE_S
    while others and (ready := wait(list(others), timeout=max(0.0, end - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection), "only pipes are waited for"
            kind, value = _receive(pipe)
            if kind == "failed":
                return TransferError(f"rank {pipes.index(pipe)} failed:\n{value}")
            others = others - {pipe} if kind in ("died", "done") else others
    return None


def _serve(
    pipe: Connection, place: tuple[int, int, str, float], function: Callable[..., Any], args: Any, is_told: bool
) -> None:
    import torch
    import torch.distributed as dist

    rank, ranks, store, timeout_s = place
    # One thread each: ranks share the machine's cores, and sums keep their order.
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    # A rank that failed before others have connected would break off their connecting.
    dist.barrier()

    def tell(*value: Any) -> None:
        if rank == 0:
            pipe.send_bytes(pickle.dumps(("told", value)))

    try:
        # Pickled here: a pipe's own way would leave tensors in memory that ends with this process.
        answer = pickle.dumps(("done", function(dist.group.WORLD, *args, **({"tell": tell} if is_told else {}))))
    except Exception:  # noqa: BLE001  # the caller shows it, whatever it is
        answer = pickle.dumps(("failed", traceback.format_exc()))
    pipe.send_bytes(answer)
    dist.destroy_process_group()
