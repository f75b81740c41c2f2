"""Everything that transfers wait with: the watchdog of a node, points in a device's work, agreement between ranks.

    Watchdog        bounds every wait for another rank; one that fails ends the step on all ranks of the node
    Mark, Lane      points and streams in a device's work, with `JobQueue` on top of them
    OwnGroup        the ranks of a group connected once more over gloo, and `all_or_none` for what all must agree on
    RankAgreement   the same bounded by the watchdog, inside a node without messages
    Counters        what the transfers of one rank moved

Each rank has a row of 64-bit cells in the node's memory that only it writes, and room for one message:
    PID, START   its identity: process id, and start time in clock ticks after boot, so that a reused id is noticed
    VERSION      the window whose home weights it holds ready to be pulled
    RETIRED      the last window from which it pulls nothing any more
    STAGED       the last round of a relocation that it has staged completely
    WRITTEN      the last round of a relocation that it has written completely
    ABORTED      1 once its message says why it gave up
    LAUNCHED     the last step of mapped rows that it has launched (see `mapped_rows`)
    AGREED       the last agreement of the node for which its ballot is written (see `RankAgreement`)
    TAGS...      one per mailbox of returned gradients (see `returns`)
A cell is stored after the data that it announces. That is safe because x86-64 keeps the order of stores; other
machines are refused, because a rank could see a cell before its data.
"""

import pickle
import platform
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core.errors import EquipoiseError, TransferError

T = TypeVar("T")

PID, START, VERSION, RETIRED, STAGED, WRITTEN, ABORTED, LAUNCHED, AGREED, TAGS = range(10)
MESSAGE_BYTES = 1024
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3
"""Pauses between two looks: short at first, so that a hand-over costs little, then long enough to leave the core."""
_EXIT_S = 0.3
"""A connection breaks a moment before its process is seen to have ended."""
_LIFE_EVERY_S = 0.05
"""Checking whether a process lives reads a file, so it is done less often."""
_POLL_S = 0.002
_JOIN_S = 1.0
"""How long closing waits for a running job before it aborts the job, and for the job's end after that."""
_ORDERED = ("x86_64", "amd64")
"""Machines that keep the order of stores, as Linux and others call them."""

Kind = Literal["pull", "return", "refresh", "publish", "collect", "fence", "rows"]


class Transfer(NamedTuple):
    """What a rank is waiting for, as an error names it."""

    kind: Kind
    layer: int | None = None
    expert: int | None = None
    path: str = "shm"
    peer: int | None = None

    def __str__(self) -> str:
        parts: list[str] = [self.kind]
        parts += [] if self.expert is None else [f"of expert {self.expert}"]
        parts += [] if self.layer is None else [f"in layer index {self.layer}"]
        parts += [] if self.peer is None else [f"with rank {self.peer}"]
        return " ".join([*parts, f"over {self.path}"])


class Watchdog:
    """Bounded waits of one rank on the cells of its node."""

    def __init__(
        self, cells: Mapping[int, np.ndarray], messages: Mapping[int, np.ndarray], *, rank: int, timeout_s: float
    ) -> None:
        """Write this process's identity to its cells.

        Args:
            cells: int64 cells of each rank of the node
            messages: bytes of each rank's message
            rank: this rank
            timeout_s: bound on every wait
        """
        check_store_order()
        self.rank, self.timeout_s = rank, timeout_s
        self._cells, self._messages = dict(cells), dict(messages)
        self._watched: dict[int, tuple[int, int]] = {}
        cells[rank][PID], cells[rank][START] = identity()

    def watch_peers(self) -> None:
        """Note the peers' processes, once all have written their identity. Invisible processes are not watched."""
        identities = {r: (int(c[PID]), int(c[START])) for r, c in self._cells.items() if r != self.rank}
        self._watched = {r: process for r, process in identities.items() if not is_gone(*process)}

    def wait(
        self, is_ready: Callable[[], bool], transfer: Transfer, *, pause: Callable[[float], object] = time.sleep
    ) -> float:
        """Wait until `is_ready`, and return the seconds it took.

        Raises within `timeout_s`, or at once where a rank of the node has given up or its process is gone.

        Args:
            is_ready: called again and again, so it must be cheap
            transfer: what this is, for the error
            pause: sleeps for the given seconds or less
        """
        begin = looked = time.monotonic()
        pause_s = _SHORTEST_S
        while not is_ready():
            self.check(transfer)
            now = time.monotonic()
            if now - looked > _LIFE_EVERY_S:
                looked = now
                self._check_peers(transfer)
            if now - begin > self.timeout_s:
                raise self.abort(f"{transfer} did not finish within {self.timeout_s:g} s")
            pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return time.monotonic() - begin

    def wait_peers(self, cell: int, value: int, transfer: Transfer) -> None:
        """Wait until a cell of all ranks of the node has reached a value."""
        for peer in self._cells:
            has_reached = lambda: bool(self._cells[peer][cell] >= value)  # noqa: B023, E731  # called here alone
            self.wait(has_reached, transfer._replace(peer=peer))

    def check(self, transfer: Transfer) -> None:
        """Raise if a rank of this node has given up."""
        for rank, cells in self._cells.items():
            if cells[ABORTED]:
                # A message that was cut may end inside a character.
                text = self._messages[rank].tobytes().rstrip(b"\0").decode(errors="replace")
                own = "" if rank == self.rank else f"rank {self.rank}: {transfer} ended because "
                raise TransferError(f"{own}{text}")

    def abort(self, reason: str) -> TransferError:
        """Make all ranks of the node give up, and return the error to raise. A rank keeps its first reason."""
        text = f"rank {self.rank}: {reason}"
        if self._cells and not self._cells[self.rank][ABORTED]:
            data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
            self._messages[self.rank][:] = np.frombuffer(data, dtype=np.uint8)
            self._cells[self.rank][ABORTED] = 1
        return TransferError(text)

    def lost(self, transfer: Transfer, error: RuntimeError) -> TransferError:
        """Return the error for a connection that broke or timed out, with the cause where this node knows it."""
        end = time.monotonic() + _EXIT_S
        try:
            while time.monotonic() < end:
                self.check(transfer)
                self._check_peers(transfer)
                time.sleep(_LONGEST_S)
        except TransferError as known:
            return known
        return self.abort(
            f"{transfer} did not finish within {self.timeout_s:g} s, or a rank of another node is gone: {error}"
        )

    def close(self) -> None:
        """Let go of the shared cells."""
        self._cells, self._messages = {}, {}

    def _check_peers(self, transfer: Transfer) -> None:
        for rank, process in self._watched.items():
            if is_gone(*process):
                # It may have given up, and said why, since the last check.
                self.check(transfer)
                raise self.abort(f"{transfer} cannot finish: rank {rank} (process {process[0]}) is gone")


def check_store_order() -> None:
    """Refuse a machine on which another process may see two stores in another order than they were made."""
    if platform.machine().lower() not in _ORDERED:
        raise TransferError(
            f"this machine is {platform.machine()!r}; the ranks of a node share memory by the order of stores, which "
            f"only {' and '.join(_ORDERED)} keep: train with a disabled balancer here"
        )


def identity() -> tuple[int, int]:
    """This process's id and start time."""
    pid = int(Path("/proc/self").readlink().name)
    return pid, _state_and_start(pid)[1]


def is_gone(pid: int, start: int) -> bool:
    """Whether the process that had this id and start time has ended, collected by its parent or not."""
    try:
        state, now = _state_and_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX" or now != start


def _state_and_start(pid: int) -> tuple[str, int]:
    # The name may hold spaces and brackets, so count from its last bracket: state is field 3, start time field 22.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Mark:
    """A point in a stream's work. On the CPU work is finished when a call returns, so every mark is reached."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """Without an event there is nothing to wait for."""
        self._event = event

    @classmethod
    def now(cls, device: torch.device) -> "Mark":
        """Mark the end of what the current stream of the calling thread holds."""
        if device.type == "cpu":
            return REACHED
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def is_reached(self) -> bool:
        """Whether the work before the mark is finished."""
        return self._event is None or self._event.query()

    def hold_up(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream (the current one by default) wait for the mark; the calling thread goes on."""
        if self._event is not None:
            (stream or torch.cuda.current_stream(device)).wait_event(self._event)

    def block(self) -> None:
        """Block the calling thread until the mark is reached."""
        if self._event is not None:
            self._event.synchronize()


REACHED = Mark()
"""The mark of work that is finished."""


class Lane:
    """Work beside the layers': a stream of its own on a CUDA device, the calling thread on the CPU.

    Its copies are short and other ranks wait for them, so they have priority: behind a product of many blocks they
    would wait until the last of those has begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def work(self, *, after: Mark = REACHED) -> Iterator[None]:
        """Run what is called inside in this lane, once `after` is reached; `Mark.now` inside marks the lane's work."""
        if self._stream is None:
            yield
            return
        after.hold_up(self._device, self._stream)
        with torch.cuda.stream(self._stream):
            yield


class JobQueue:
    """Runs jobs one at a time, in order, in a background thread, on a device in a lane beside the layers.

    Every wait inside a job is bounded by the watchdog, so a job ends or fails. After a job has failed no other begins,
    and everyone who waits for one gets its error.
    """

    def __init__(self, watchdog: Watchdog, device: torch.device) -> None:
        self._watchdog, self._lane = watchdog, Lane(device)
        self._fence = Transfer("fence", path="shm" if device.type == "cpu" else "peer")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="equipoise-jobs")
        self._jobs: list[Future[None]] = []
        self._failure: TransferError | None = None

    def submit(self, work: Callable[[], None], *, after: Mark = REACHED) -> Future[None]:
        """Run `work` once all jobs before it have ended and `after` is reached."""
        self._jobs = [job for job in self._jobs if not job.done()]
        self._jobs.append(self._executor.submit(self._run, work, after))
        return self._jobs[-1]

    def drain(self) -> None:
        """Wait until all jobs have ended, or raise the error of the one that failed."""
        wait_for_futures(self._jobs)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Drop the jobs that have not begun, and end the thread. Closing twice is allowed."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        # A cancelled job has not been taken by the thread, and `wait` would wait for that.
        running = [job for job in self._jobs if not job.cancelled()]
        if wait_for_futures(running, timeout=_JOIN_S).not_done:
            self._watchdog.abort("closed while experts were on their way between owners and homes")
            wait_for_futures(running, timeout=_JOIN_S)
        # An error refers to the calls it went through, and they to shared memory.
        self._failure, self._jobs = None, []

    def _run(self, work: Callable[[], None], after: Mark) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._watchdog.wait(after.is_reached, self._fence)
            with torch.no_grad(), self._lane.work():
                work()
        except TransferError as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = self._watchdog.abort(f"publish or collect failed: {error!r}")
            raise self._failure from error


class Message(NamedTuple):
    """A tensor sent between this rank and another; both sides list theirs in the same order."""

    tensor: torch.Tensor
    """Contiguous; on the CPU where it goes by gloo."""
    peer: int
    is_leaving: bool


Finish = Callable[[Any], None]
"""Waits for one gloo work, or raises."""


class OwnGroup:
    """The ranks of a group connected once more over gloo, for one thread of each rank.

    A rank that gives up leaves collectives that others have entered, and a group whose ranks made different numbers of
    calls never finishes another one. So agreements do not use the group of the training: after a failure that group is
    as usable as before, and a thread can communicate while training computes. Two threads need two of these.
    """

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """Connect. Every rank of `group` must call this.

        Args:
            group: the ranks to connect; able to move CPU tensors
            timeout_s: bound on connecting and on every exchange
        """
        self.rank, self.size, self.timeout_s = dist.get_rank(group), dist.get_world_size(group), timeout_s
        self._is_closing = threading.Event()
        try:
            store = fresh_store(group)
            self._gloo: Any = dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout_s))
            # A rank that closed before the others have connected would break off their connecting.
            self._gloo.barrier().wait()
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank}: the group's {self.size} ranks could not be connected: {error}"
            ) from error

    def gather(self, value: Any, finish: Finish | None = None) -> list[Any]:
        """Return every rank's value, in rank order. Every rank of the group must call this."""
        gloo, finish = self._open(), finish or self._finish
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        finish(gloo.allgather(lengths, torch.tensor([mine.numel()])))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        finish(gloo.allgather(parts, padded))
        return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, lengths, strict=True)]

    def largest(self, values: Sequence[int], finish: Finish | None = None) -> list[int]:
        """Return the largest of each value over all ranks. Every rank of the group must call this."""
        largest, options = torch.tensor(values, dtype=torch.int64), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        (finish or self._finish)(self._open().allreduce([largest], options))
        return [int(value) for value in largest]

    def swap(self, rows_NX: torch.Tensor, send_R: list[int], receive_R: list[int]) -> torch.Tensor:
        """Send rows to every rank and return theirs, source by source. Every rank of the group must call this."""
        received_NX = rows_NX.new_empty((sum(receive_R), *rows_NX.shape[1:]))
        self._finish(self._open().alltoall_base(received_NX, rows_NX.contiguous(), receive_R, send_R))
        return received_NX

    def start(self, messages: Sequence[Message]) -> list[Any]:
        """Start sending and receiving, and return the works, one per message."""
        gloo = self._open()
        return [(gloo.send if m.is_leaving else gloo.recv)([m.tensor], m.peer, 0) for m in messages]

    def abandon(self, works: Sequence[Any]) -> None:
        """Leave works that other ranks may never join."""
        _hold_until_done(self._gloo, works)

    def close(self) -> None:
        """End an exchange that waits for other ranks, and take part in none any more. Closing twice is allowed."""
        self._is_closing.set()
        self._gloo = None

    def _open(self) -> Any:
        if (gloo := self._gloo) is None:
            raise TransferError(f"rank {self.rank}: closed, so it takes part in no exchange any more")
        return gloo

    def _finish(self, work: Any) -> None:
        gloo = self._gloo
        try:
            while not work.is_completed():
                if self._is_closing.wait(_POLL_S):
                    _hold_until_done(gloo, [work])
                    raise TransferError(f"rank {self.rank}: closed while it waited for other ranks to join an exchange")
            work.wait()
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(
                f"rank {self.rank}: could not exchange with the other {self.size - 1} ranks within {self.timeout_s:g} "
                f"s; look for a rank that ended or did not announce this window: {error}"
            ) from error


def fresh_store(group: Any) -> Any:
    """Return a part of the group's store that nobody has used. Every rank of `group` must call this."""
    name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    dist.broadcast(name, group=group, group_src=0)
    return dist.PrefixStore(f"equipoise/{bytes(name.tolist()).hex()}", group.get_group_store())


def _hold_until_done(gloo: Any, works: Sequence[Any]) -> None:
    """Hold a connection in the background until works end: gloo cannot be interrupted, and its destructor waits."""

    def hold(gloo: Any, works: Sequence[Any]) -> None:
        for work in works:
            with suppress(RuntimeError):
                work.wait()
        del gloo

    threading.Thread(target=hold, args=(gloo, list(works)), name="equipoise-left", daemon=True).start()


def gather_objects(value: T, group: Any) -> list[T]:
    """Return every rank's value over the training's own group. Every rank of `group` must call this."""
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise TransferError(f"a rank of the group is gone or unreachable: {error}") from error
    return values


def all_or_none(work: Callable[[], T], gather: Callable[[Any], list[Any]]) -> list[T]:
    """Do something on every rank and return all results, or raise on every rank if it failed on one.

    All ranks raise the error of the lowest rank that failed, with its rank in front. Every rank must call this.

    Args:
        work: what this rank does alone; it must not communicate
        gather: returns every rank's value: `OwnGroup.gather`, or `partial(gather_objects, group=group)`
    """
    try:
        mine: tuple[Any, Any] = (None, work())
    except EquipoiseError as error:
        mine = (type(error), str(error))
    results = gather(mine)
    for rank, (failed, value) in enumerate(results):
        if failed is not None:
            raise failed(f"rank {rank}: {value}")
    return [value for _, value in results]


class RankAgreement:
    """What all ranks of a group agree on; every one of them must make the same calls.

    Each ends within the bound, or at once where a rank of this node gives up or a process is gone.
    """

    def __init__(
        self, group: OwnGroup, watchdog: Watchdog, *, cells: np.ndarray, ballots: Mapping[int, np.ndarray]
    ) -> None:
        """
        Args:
            group: agrees where the ranks are on several nodes
            cells: of this rank
            ballots: int64 [2, values] of each rank, where they are all on one node; else none
        """
        self._group, self._watchdog = group, watchdog
        self._cells, self._ballots = {watchdog.rank: cells}, dict(ballots)
        self._number = 0

    def largest(self, values: Sequence[int], transfer: Transfer) -> list[int]:
        """Return the largest of each value over all ranks."""
        self._watchdog.check(transfer)
        if not self._ballots:
            return self._group.largest(values, partial(self._finish, transfer=transfer))
        # One node agrees in its shared memory, without a message. Two ballots take turns: a rank that writes the same
        # one again knows that all others have written the one between, so they have read this one.
        self._number += 1
        turn, count, rank = self._number % 2, len(values), self._watchdog.rank
        # No view is kept in a variable: an error refers to this call, and would keep shared memory mapped.
        self._ballots[rank][turn, :count] = values
        self._cells[rank][AGREED] = self._number
        self._watchdog.wait_peers(AGREED, self._number, transfer)
        return [int(value) for value in np.max([ballots[turn, :count] for ballots in self._ballots.values()], axis=0)]

    def require_equal(self, facts: Mapping[str, int], transfer: Transfer) -> None:
        """Raise on all ranks if one of them has a different fact."""
        # The largest of a number and of its negative are its extremes over the ranks.
        largest = self.largest([*facts.values(), *(-value for value in facts.values())], transfer)
        for name, high, low in zip(facts, largest[: len(facts)], largest[len(facts) :], strict=True):
            if high != -low:
                raise self._watchdog.abort(
                    f"{transfer}: ranks differ in {name}, {-low} and {high}; all must use the same plan and run its "
                    "layers in the same order"
                )

    def all_or_none(self, work: Callable[[], None], transfer: Transfer) -> None:
        """Run `work` on every rank, or raise on all of them what failed on one."""

        def gather(mine: tuple[Any, Any]) -> list[Any]:
            # What failed is sent only where something did.
            if not self.largest([mine[0] is not None], transfer)[0]:
                return []
            return self._group.gather(mine, finish=partial(self._finish, transfer=transfer))

        all_or_none(work, gather)

    def close(self) -> None:
        """Let go of shared memory."""
        self._cells, self._ballots = {}, {}

    def _finish(self, work: Any, transfer: Transfer) -> None:
        """Wait for a collective of the own group."""
        try:
            self._watchdog.wait(work.is_completed, transfer)
            work.wait()
        except TransferError:
            self._group.abandon([work])
            raise
        except RuntimeError as error:
            raise self._watchdog.lost(transfer, error) from error


@dataclass(slots=True, kw_only=True)
class Counters:
    """What the transfers of one rank moved since the engine was opened, and how long training waited for them."""

    bytes: Counter[str] = field(default_factory=Counter)
    """By path: `peer`, `host`, `shm`, `p2p`. Example: {"shm": 4096, "p2p": 512}."""
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By path: what layers waited for, and the window's end."""
    pulls: int = 0
    """Replicas copied to this rank."""
    returns: int = 0
    """Replica gradients this rank added to its homes."""
    publishes: int = 0
    """Experts whose weights reached this rank as their home."""
    collects: int = 0
    """Experts whose gradients reached this rank as their owner."""
    refreshes: int = 0
    """Experts this rank wrote to the host store."""
    on_demand: int = 0
    """Visits that found no replica ready and had it pulled at once."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Pulls are counted by a thread of their own."""
    _timers: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(
        default_factory=list, repr=False, compare=False
    )

    def arrive(self, path: str, num_bytes: int) -> None:
        """Count bytes that reached this rank."""
        with self._lock:
            self.bytes[path] += num_bytes

    def wait(self, path: str, seconds: float) -> None:
        """Count seconds in which training waited."""
        with self._lock:
            self.exposed_s[path] += seconds

    def refresh(self, num_bytes: int) -> None:
        """Count an expert written to the host store; its bytes left this rank and are counted as `store`."""
        with self._lock:
            self.refreshes += 1
            self.bytes["store"] += num_bytes

    @contextmanager
    def timed(self, path: str, device: torch.device) -> Iterator[None]:
        """Count the seconds that training waits in a `with` block: in the current stream's work on a device."""
        if device.type == "cpu":
            begin_s = time.monotonic()
            yield
            self.wait(path, time.monotonic() - begin_s)
            return
        stream = torch.cuda.current_stream(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        yield
        end.record(stream)
        # The device has not passed these points yet: `flush` counts the seconds between them.
        with self._lock:
            self._timers.append((path, begin, end))

    def flush(self) -> None:
        """Wait for the blocks that were timed on a device, and count their seconds."""
        with self._lock:
            timers, self._timers = self._timers, []
        for path, begin, end in timers:
            end.synchronize()
            self.wait(path, begin.elapsed_time(end) / 1e3)
