"""`launch`: run one function on every training rank: those that torchrun started, or local ones started here.

Local ranks are spawned, meet over a file, and speak to the starter by pipes: events while they run, then a result or
an error. The starter alone decides on Ctrl-C; a rank whose starter is gone ends itself.

Knows processes. Does not know what they train.

Invariants (asserted by the tests):
1. A rank that raises, dies or is killed ends all ranks, and is named with its words; no process is left.
2. Ctrl-C ends all ranks and stays a KeyboardInterrupt.
3. A rank whose starter was killed ends itself.
4. Under torchrun nothing is started: this process is one of the ranks.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from equipoise.core.errors import EquipoiseError, TransferError
from equipoise.core.interrupt import deaf_children
from equipoise.rl.config import TrainConfig

# What torchrun says about this process; the one place where the room reads the environment.
#
#     RANK, WORLD_SIZE                 this rank, and how many there are
#     LOCAL_RANK, LOCAL_WORLD_SIZE     the same on this machine
#     MASTER_ADDR, MASTER_PORT         where ranks meet; read by torch itself


class Torchrun(NamedTuple):
    """This process's place among those that torchrun started."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def find_torchrun() -> Torchrun | None:
    """Return the place that torchrun gave this process; None where it was not started by torchrun."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return Torchrun(rank, ranks, int(local_rank), int(local_ranks))


# `Event`: what a run tells whoever watches: a terminal, a test, another process.
#
#     start      facts of the run: model, ranks, mode, where results go
#     progress   words, done, total: something that takes a while
#     stage      step, name of the stage that begins; sent by every rank
#     metrics    one step's figures
#     note       words
#     end        summary


Kind = Literal["start", "progress", "stage", "metrics", "note", "end"]


class Event(NamedTuple):
    """One thing that happened."""

    kind: Kind
    values: Mapping[str, Any]


Show = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Show nothing."""


RankFunction = Callable[..., Any]
"""function(config, layout, show, *args): runs on every rank; the first rank's result is the run's."""

_GRACE_S = 2.0
"""How long ranks may tell what they saw after one of them failed: the cause may not be the first to speak."""
_EXIT_S = 20.0
"""How long a rank that speaks no more may take to end; on a busy machine it is seen to have ended seconds later."""


def launch(function: RankFunction, config: TrainConfig, *args: Any, show: Show = ignore, context: Any = None) -> Any:
    """Call `function(config, layout, show, *args)` on every rank and return the first rank's result.

    Args:
        function: a module-level function; arguments and results travel pickled
        show: gets the events, here
        context: of multiprocessing; spawn by default
    """
    if (place := find_torchrun()) is not None:
        shown = show if place.rank == 0 else ignore
        return _run(function, config, args, shown, place=place, init="env://")
    context = context or multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="equipoise-train-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(config.ranks):
                ours, theirs = context.Pipe()
                meeting = (rank, str(Path(folder) / "store"))
                process = context.Process(target=_serve, args=(theirs, meeting, function, config, args))
                with deaf_children():
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _follow(pipes, processes, show)
        finally:
            _end(processes, is_patient=not sys.exc_info()[0])


def _end(processes: list[Any], *, is_patient: bool) -> None:
    """Let ranks that are done end by themselves; kill what is left."""
    for process in processes:
        if is_patient:
            process.join(_GRACE_S)
        process.kill()
        process.join()


def _follow(pipes: list[Connection], processes: list[Any], show: Show) -> Any:
    """Pass events on until every rank has ended, or one has failed."""
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    troubles: dict[int, BaseException] = {}
    end, is_over = float("inf"), False
    while waiting and not is_over:
        # Once more at the end: what ranks said while this process did not run is heard too.
        is_over = time.monotonic() >= end
        for pipe in wait(list(waiting), timeout=0.0 if is_over else 0.2):
            assert isinstance(pipe, Connection), "only pipes are waited for"
            rank = waiting[pipe]
            kind, value = _receive(pipe, processes[rank], rank)
            if kind == "event":
                show(value)
                continue
            del waiting[pipe]
            if kind == "done":
                results[rank] = value
            else:
                troubles[rank] = value
                patience_s = 0.0 if isinstance(value, _Died) else _GRACE_S
                end = min(end, time.monotonic() + patience_s)
    if troubles:
        raise _cause(troubles)
    return results[0]


def _receive(pipe: Connection, process: Any, rank: int) -> tuple[str, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(_EXIT_S)
        return "failed", _Died(f"rank {rank} died {_ending(process.exitcode)}; resume from the last checkpoint")


class _Died(TransferError):
    """A rank ended without a word: the cause of whatever others say."""


class _Broke(TransferError):
    """A rank raised what nobody foresaw."""


def _cause(troubles: dict[int, BaseException]) -> BaseException:
    """The error to raise: a dead rank before one that refused, before one that lost its partner."""
    ordered = sorted(troubles.items(), key=lambda item: (_importance(item[1]), item[0]))
    return ordered[0][1]


def _importance(trouble: BaseException) -> int:
    if isinstance(trouble, _Died):
        return 0
    return 2 if type(trouble) is TransferError else 1


def _ending(code: int | None) -> str:
    if code is None:
        return "and hangs"
    return f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _serve(pipe: Connection, meeting: tuple[int, str], function: RankFunction, config: TrainConfig, args: Any) -> None:
    """Run in a started rank."""
    # Also where a rank is forked and not started anew; and for the planning process that it will start.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, store = meeting
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(kind: str, value: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, value)))

    def show(event: Event) -> None:
        if rank == 0:
            send("event", event)

    try:
        own = Torchrun(rank, config.ranks, rank, config.ranks)
        result = _run(function, config, args, show, place=own, init=f"file://{store}")
        send("done", result if rank == 0 else None)
    except EquipoiseError as error:
        send("failed", error)
    except Exception as error:  # noqa: BLE001  # the starter shows it, whatever it is
        is_lost = isinstance(error, RuntimeError) and "gloo" in str(error)
        kind = TransferError if is_lost else _Broke
        send("failed", kind(f"rank {rank} failed:\n{traceback.format_exc()}"))


def _run(function: RankFunction, config: TrainConfig, args: Any, show: Show, *, place: Torchrun, init: str) -> Any:
    import torch
    import torch.distributed as dist
    import transformers

    from equipoise.rl.layout import build_layout

    # Bars of other libraries would run through our table.
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_ranks))
    if config.model.device == "cuda":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    limit = timedelta(seconds=config.timeout_s)
    backend = "gloo" if config.backend == "gloo" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=init, rank=place.rank, world_size=place.ranks, timeout=limit)
    try:
        return function(config, build_layout(config), show, *args)
    finally:
        dist.destroy_process_group()


def _end_with_parent() -> None:
    """Wait until the starter is gone, which is only before this rank's end if it was killed; then end at once.

    Not even the place where ranks meet may be removed first: torch waits for it for ever, and lets no thread run.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
