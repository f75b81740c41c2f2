"""Ranks: `run_ranks` starts local processes that compute together, or joins those of torchrun; `Ranks` is one's place.

1. Local ranks are spawned, connect through a file, and send messages to the process that started them: what rank 0
   shows while it runs, then each rank's result or error.
2. A rank that raises, dies or is late ends all ranks, and the error names it. No process outlives the call.
   Under torchrun every rank that waited in vain names those that it heard nothing of.
3. The starting process alone answers Ctrl-C; a rank whose starting process is gone ends itself.
"""

import multiprocessing
import os
import pickle
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from equipoise.core.errors import EquipoiseError, TopologyError, TransferError

_GRACE_S = 5.0
"""How long the other ranks may still report after one has failed: the cause may not be the first to be heard of."""
_EXIT_S = 20.0
"""How long a rank that closed its pipe may take to exit, on a busy machine."""


class Torchrun(NamedTuple):
    """A process's place among those that torchrun started."""

    rank: int
    ranks: int
    local_rank: int
    """The rank within this machine."""
    local_ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How ranks are connected."""

    backend: Literal["gloo", "nccl"] = "gloo"
    """What moves CUDA tensors; CPU tensors go by gloo. Ranks that share a GPU get what `nccl_environment` says."""
    device: Literal["cpu", "cuda"] = "cpu"
    timeout_s: float = 300.0
    """Bound on every wait of one rank for another."""
    threads: int | None = 1
    """CPU threads of a rank; None: an equal share of the machine's cores. One thread keeps sums in one order."""


class RankDiedError(TransferError):
    """A rank ended without reporting a result or an error."""


class RankSilentError(TransferError):
    """A rank stood still while others waited for it, longer than the time-out."""


class _BrokeError(TransferError):
    """A rank raised an exception that is not one of ours."""


def find_torchrun() -> Torchrun | None:
    """Return the place that torchrun gave this process in the environment; None where torchrun did not start it."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_ranks = os.environ.get("LOCAL_RANK", rank), os.environ.get("LOCAL_WORLD_SIZE", ranks)
    return Torchrun(rank, ranks, int(local_rank), int(local_ranks))


def nccl_environment(place: Torchrun, *, devices: int) -> dict[str, str]:
    """Return what NCCL must find in the environment of a rank that shares its GPU; nothing where each has its own.

    NCCL joins such ranks only if each says that it is another host. Then it connects them by sockets, which shows that
    everything works, and not how fast it would be.
    """
    if place.local_ranks <= devices:
        return {}
    hosts = {"NCCL_HOSTID": f"{os.environ.get('NCCL_HOSTID', platform.node())}-{place.rank}"}
    if place.local_ranks == place.ranks:
        hosts["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
    return hosts


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    options: RankOptions | None = None,
    limit_s: float | None = None,
    show: Callable[..., None] | None = None,
    context: Any = None,
) -> list[Any]:
    """Call `function(group, *args)` on every rank and return the results in rank order.

    Under torchrun nothing is started: this process is one of the ranks, and its own result is the only one returned.

    Args:
        function: a module-level function; arguments and results are pickled
        limit_s: bound on the whole call
        show: where given, the function also gets a keyword `show`; calls of it on rank 0 are forwarded to this one
        context: of multiprocessing; spawn by default
    """
    options = options or RankOptions()
    if (place := find_torchrun()) is not None:
        if place.ranks != ranks:
            raise TopologyError(f"{ranks} ranks were asked for, but torchrun started {place.ranks}; make them equal")
        shown = None if show is None else show if place.rank == 0 else lambda *_: None
        return [_call(function, args, place=place, init="env://", options=options, show=shown)]
    context = context or multiprocessing.get_context("spawn")
    with temporary_folder() as folder:
        pipes: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                place = Torchrun(rank, ranks, rank, ranks)
                init = f"file://{folder / 'store'}"
                given = (theirs, place, init, options, function, args, show is not None)
                process = context.Process(target=_serve, args=given)
                with ignored_interrupts():
                    process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, processes, limit_s=limit_s, show=show)
        finally:
            # Ranks that are done exit by themselves; after an error they are killed.
            is_patient = not sys.exc_info()[0]
            for process in processes:
                process.join(_GRACE_S if is_patient else 0)
                process.kill()
                process.join()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for a `with` block; one that a killed process has left is removed by the next that makes one."""
    # Process ids mean something in their own namespace alone.
    prefix = f"equipoise-{Path('/proc/self/ns/pid').stat().st_ino}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        starter = left.name.removeprefix(prefix).partition("-")[0]
        if starter.isdecimal() and not Path(f"/proc/{starter}").exists():
            # Another start may be removing it too.
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-") as folder:
        yield Path(folder)


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Start processes in a `with` block that ignore Ctrl-C, which a terminal sends to all of its processes.

    Only the main thread may change what a signal does; processes that another thread starts do not ignore it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """Wait until the starting process is gone, then exit at once; run this in a thread of a rank.

    Without clean-up: torch would wait for other ranks at the file that connects them, and let no thread run meanwhile.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _collect(
    pipes: list[Connection], processes: list[Any], *, limit_s: float | None, show: Callable[..., None] | None
) -> list[Any]:
    """Forward messages until every rank has ended or one has failed; return the results or raise the cause."""
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures: dict[int, BaseException] = {}
    end, is_over = time.monotonic() + (limit_s or float("inf")), False
    while waiting and not is_over:
        # One more round after the end, for messages that arrived while this process did not run.
        is_over = time.monotonic() >= end
        for pipe in wait(list(waiting), timeout=0.0 if is_over else 0.2):
            assert isinstance(pipe, Connection), "only pipes are waited for"
            rank = waiting[pipe]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                processes[rank].join(_EXIT_S)
                kind, value = "failed", RankDiedError(f"rank {rank} died {_ending(processes[rank].exitcode)}")
            if kind == "shown":
                if show is not None:
                    show(*value)
                continue
            del waiting[pipe]
            if kind == "done":
                results[rank] = value
            else:
                failures[rank] = value
                end = min(end, time.monotonic() + _GRACE_S)
    if failures:
        cause = min(failures.items(), key=lambda item: (_importance(item[1]), item[0]))[1]
        silent = sorted(waiting.values())
        if silent and _importance(cause) == 2:
            # No rank raised or died: those that say nothing are what the others waited for.
            names = " and ".join(map(str, silent))
            raise RankSilentError(f"rank {names} stood still for longer than the time-out; {cause}")
        raise cause
    if waiting:
        raise TransferError(f"ranks {sorted(waiting.values())} gave no result within {limit_s:g} s")
    return results


def _importance(failure: BaseException) -> int:
    """Order failures by cause: a rank that raised, then one that died, then one that lost its connection to another."""
    if isinstance(failure, RankDiedError):
        # Torch aborts a process whose NCCL connection broke.
        return 2 if signal.SIGABRT.name in str(failure) else 1
    return 2 if type(failure) is TransferError else 0


def _ending(code: int | None) -> str:
    if code is None:
        return "and hangs"
    return f"of {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _serve(
    pipe: Connection,
    place: Torchrun,
    init: str,
    options: RankOptions,
    function: Callable[..., Any],
    args: Sequence[Any],
    is_shown: bool,
) -> None:
    """Run in a started rank: call the function, then send its result or its error."""
    # Again here, for a rank that is forked instead of spawned, and for processes that the rank starts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()

    def send(kind: str, value: Any) -> None:
        # Pickled here: a pipe's own pickling would put tensors into shared memory, which ends with this process.
        pipe.send_bytes(pickle.dumps((kind, value)))

    def show(*value: Any) -> None:
        if place.rank == 0:
            send("shown", value)

    try:
        result = _call(function, args, place=place, init=init, options=options, show=show if is_shown else None)
        send("done", result)
    except EquipoiseError as error:
        send("failed", error)
    except Exception as error:  # noqa: BLE001  # the starting process shows it, whatever it is
        if _is_lost(error):
            send("failed", TransferError(_waited(place.rank, error)))
        else:
            send("failed", _BrokeError(f"rank {place.rank} failed:\n{traceback.format_exc()}"))


def _is_lost(error: BaseException) -> bool:
    """Whether torch raised this because another rank did not answer."""
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))


def _waited(rank: int, error: BaseException) -> str:
    """Say in one line in which calls of this package, or else of the user, a rank waited in vain, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    place = " > ".join(f"{Path(frame.filename).stem}.{frame.name}" for frame in ours[-3:]) or "its start"
    return f"rank {rank} waited in vain in {place}: {str(error).strip().splitlines()[0]}"


def _silent_ranks(place: Torchrun) -> list[int]:
    """Return the ranks that do not say soon that they waited in vain, too; none where the store is gone.

    Nobody collects what ranks under torchrun say, so they tell each other.
    """
    import torch.distributed as dist

    others = [rank for rank in range(place.ranks) if rank != place.rank]
    try:
        store = dist.PrefixStore("equipoise/waited", dist.group.WORLD.get_group_store())
        store.set(str(place.rank), "in vain")
        end = time.monotonic() + _GRACE_S
        while (silent := [rank for rank in others if not store.check([str(rank)])]) and time.monotonic() < end:
            time.sleep(0.1)
    except RuntimeError:
        return []
    return silent


def _call(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    place: Torchrun,
    init: str,
    options: RankOptions,
    show: Callable[..., None] | None,
) -> Any:
    """Connect this rank to the others and call the function."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(options.threads or max(1, (os.cpu_count() or 1) // place.local_ranks))
    if options.device == "cuda":
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    backend = "gloo" if options.backend == "gloo" else "cpu:gloo,cuda:nccl"
    if options.backend == "nccl":
        os.environ.update(nccl_environment(place, devices=torch.cuda.device_count()))
    limit = timedelta(seconds=options.timeout_s)
    dist.init_process_group(backend, init_method=init, rank=place.rank, world_size=place.ranks, timeout=limit)
    try:
        # A rank that failed before the others have connected would break their connecting.
        dist.barrier()
        return function(dist.group.WORLD, *args, **({} if show is None else {"show": show}))
    except RuntimeError as error:
        if init != "env://" or isinstance(error, EquipoiseError) or not _is_lost(error):
            raise
        names = " and ".join(map(str, _silent_ranks(place)))
        cause = f"rank {names} stood still for longer than the time-out; " if names else ""
        raise RankSilentError(cause + _waited(place.rank, error)) from error
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One rank's place among the ranks of a run, and the groups it belongs to.

    EP groups follow one another: ranks 0..ep-1 are the first group. Ranks with the same place in their groups own the
    same experts and add up their gradients (expert data parallel).
    """

    rank: int
    size: int
    """Number of ranks."""
    world: Any
    """The group of all ranks."""
    ep_group: Any
    """The ranks that share one set of experts."""
    owner_group: Any
    """The ranks that own the same experts; None where this rank is the only one."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and shows messages."""
        return self.rank == 0

    @classmethod
    def build(cls, world: Any = None, *, ep: int = 0, timeout_s: float = 300.0) -> "Ranks":
        """Make the groups of all ranks. Every rank of the process group must call this.

        Args:
            world: the group of all ranks of the run; the default group if not given
            ep: ranks of one EP group, which must divide the ranks; 0: all of them
            timeout_s: bound on every wait of one rank for another
        """
        import torch.distributed as dist

        world = world or dist.group.WORLD
        rank, size = dist.get_rank(world), dist.get_world_size(world)
        if ep in (0, size):
            return cls(rank=rank, size=size, world=world, ep_group=world, owner_group=None)
        limit, of = timedelta(seconds=timeout_s), [dist.get_global_rank(world, r) for r in range(size)]
        groups = [dist.new_group(of[at : at + ep], timeout=limit) for at in range(0, size, ep)]
        owners = [dist.new_group(of[at::ep], timeout=limit) for at in range(ep)]
        return cls(rank=rank, size=size, world=world, ep_group=groups[rank // ep], owner_group=owners[rank % ep])

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Every rank must call this."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.world)
        return values


def sum_over(tensors: Sequence[Any], group: Any) -> None:
    """Add up tensors over all ranks of `group`, in place, in one message. Every rank of it must call this."""
    import torch
    import torch.distributed as dist

    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()
