"""`Watchdog`: every wait of a rank for another is bounded, and one that fails ends the step on all ranks of the node.

Knows a few words of shared memory per rank, processes and clocks. Does not know what is transferred: the caller gives a
`Transfer` to name it.

Each rank has a row of 64-bit words in the node's memory that only it writes, and room for one message:
    PID, START   who it is: process id, and start time in clock ticks after boot, so that a reused id is not mistaken
    VERSION      the window whose home weights it holds ready to be pulled
    RETIRED      the last window of which it pulls nothing any more
    WRITTEN      the last exchange it has finished writing
    ABORTED      1 once its message says why it gave up
    TAGS...      one per mailbox of returned gradients (see `returns`)

A word is stored after the data it announces, and x86-64 keeps the order of stores. Other machines may not: they are
refused, because a rank could see a word before its data.

Invariants (asserted by the tests):
1. A wait that does not end within `timeout_s` raises an error that names the rank, what it waited for, and the bound.
2. Once one rank has given up, every wait of the node's other ranks ends at once with that rank's words.
3. A peer whose process is gone ends the wait at once, by name.
4. A machine that may reorder stores is refused before anything is shared.
"""

import platform
import queue
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError

# Points and lanes in the work of a device: what must be finished before something else may begin or be announced.
#
# On a CUDA device these are events and streams. On the CPU work is finished when a call returns, so every point is
# reached at once and there is only one lane: callers are written once for both.
#
# Invariants (asserted by the tests):
# 1. A mark is reached only when all work that its stream held when it was made is finished.
# 2. Work of a lane begins only after the mark that was given, and never holds up the calling thread.
# 3. What an `Announcer` is given is said in order, each after its mark.


class Mark:
    """A point in a stream's work."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        """Without an event there is nothing to wait for."""
        self._event = event

    @classmethod
    def now(cls, device: torch.device) -> "Mark":
        """Where the current stream of the calling thread stands."""
        if device.type == "cpu":
            return REACHED
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return cls(event)

    def is_reached(self) -> bool:
        """Whether the work before it is finished."""
        return self._event is None or self._event.query()

    def hold_up(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream, the current one if none is given, wait here; the calling thread goes on."""
        if self._event is not None:
            (stream or torch.cuda.current_stream(device)).wait_event(self._event)

    def block(self) -> None:
        """Hold up the calling thread until it is reached."""
        if self._event is not None:
            self._event.synchronize()


REACHED = Mark()
"""The mark of work that is finished."""


class Lane:
    """Work beside the layers': a stream of its own on a CUDA device, the calling thread on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def work(self, *, after: Mark = REACHED) -> Iterator[None]:
        """Let what is called inside run in this lane, once `after` is reached."""
        if self._stream is None:
            yield
            return
        after.hold_up(self._device, self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Where this lane stands."""
        if self._stream is None:
            return REACHED
        event = torch.cuda.Event()
        event.record(self._stream)
        return Mark(event)


class Standstill:
    """How long the current stream takes from one point to another; on the CPU the caller's clock says that."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._begin = device, self._point(device)
        self._end: torch.cuda.Event | None = None

    def end(self) -> None:
        """Say that this is the second point."""
        self._end = self._point(self._device)

    def is_over(self) -> bool:
        """Whether the second point is reached; at once on the CPU."""
        return self._begin is None or (self._end is not None and self._end.query())

    def seconds(self) -> float:
        """Seconds between the two points; waits for the second."""
        if self._begin is None or self._end is None:
            return 0.0
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3

    @staticmethod
    def _point(device: torch.device) -> torch.cuda.Event | None:
        if device.type == "cpu":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event


class Announcer:
    """Says things to other processes once the device has done what they announce; at once on the CPU."""

    def __init__(self, device: torch.device) -> None:
        """Start the thread that waits for marks, where there is a device."""
        self._queue: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] | None = None
        self._asked = self._said = 0
        self.failure: Exception | None = None
        if device.type == "cuda":
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._queue,), name="equipoise-announcer", daemon=True).start()

    def after(self, mark: Mark, say: Callable[[], None]) -> None:
        """Call `say` once `mark` is reached, in the order of these calls."""
        if self._queue is None:
            say()
        else:
            self._asked += 1
            self._queue.put((mark, say))

    def is_done(self) -> bool:
        """Whether everything has been said, or something failed."""
        return self._said == self._asked or self.failure is not None

    def close(self) -> None:
        """End the thread once it has said what it was given. Closing twice is allowed."""
        if self._queue is not None:
            self._queue.put(None)

    def _run(self, waiting: "queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None]") -> None:
        while (item := waiting.get()) is not None:
            mark, say = item
            try:
                mark.block()
                say()
            except Exception as error:  # noqa: BLE001  # kept for whoever waits; a thread has nobody to raise to
                self.failure = error
                return
            self._said += 1


# `Counters`: what the transfers of one rank moved, how often, and how long training stood still for them.


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of one rank since the engine was opened."""

    bytes: Counter[str] = field(default_factory=Counter)
    """By path: `peer`, `host`, `shm`, `p2p`. Example: {"shm": 4096, "p2p": 512}."""
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By path: what layers waited for, and the window's end."""
    pulls: int = 0
    """Replicas brought to this rank."""
    returns: int = 0
    """Replica gradients this rank added to its homes."""
    publishes: int = 0
    """Experts whose weights reached this rank as their home."""
    collects: int = 0
    """Experts whose gradients reached this rank as their owner."""
    refreshes: int = 0
    """Experts this rank wrote to the host store."""
    shifted: int = 0
    """Replicas brought by another path than planned, because that one fell behind."""
    on_demand: int = 0
    """Visits that found no replica waiting for them and had it brought at once."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Pulls are counted by a thread of their own."""

    _stops: list[tuple[str, Standstill]] = field(default_factory=list, repr=False, compare=False)

    def arrive(self, path: str, num_bytes: int) -> None:
        """Count bytes that reached this rank."""
        with self._lock:
            self.bytes[path] += num_bytes

    def wait(self, path: str, seconds: float) -> None:
        """Count seconds in which training stood still."""
        with self._lock:
            self.exposed_s[path] += seconds

    def refresh(self, num_bytes: int) -> None:
        """Count an expert written to the host store; its bytes left this rank and are counted as `store`."""
        with self._lock:
            self.refreshes += 1
            self.bytes["store"] += num_bytes

    def stop(self, path: str, standstill: Standstill) -> None:
        """Note that a device's stream may stand still; counted by `settle`."""
        with self._lock:
            self._stops.append((path, standstill))

    def settle(self) -> None:
        """Count what streams stood still, once they have passed the points noted."""
        with self._lock:
            stops, self._stops = self._stops, []
        for path, standstill in stops:
            self.wait(path, standstill.seconds())


# `Connection`: the ranks of a group, connected once more over gloo, for transfers alone.
#
# A rank that gives up leaves collectives that others have entered, and a group whose ranks have made different
# numbers of
# calls never finishes another one. So what transfers agree on, and what crosses nodes, does not use the group of the
# training: after a failure that group is as usable as before, and an engine that starts anew has a connection of its
# own.
#
# Invariants (asserted by the tests):
# 1. A rank that leaves an exchange alone holds up neither its own end nor the training's group.
# 2. A connection may be closed as soon as it is made, whatever the other ranks still do.


class Message(NamedTuple):
    """A tensor on its way between this rank and another; both sides list theirs in the same order."""

    tensor: torch.Tensor
    """Contiguous, on the CPU."""
    peer: int
    is_leaving: bool


class Connection:
    """One rank's end."""

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """Connect. Every rank of `group` must call this.

        Args:
            group: the ranks to connect; able to move CPU tensors
            timeout_s: after which what was left alone is given up for good
        """
        self._gloo = connect(group, timeout_s=timeout_s)

    def start_largest(self, values: torch.Tensor) -> Any:
        """Replace values by the largest of all ranks; returns the work. Every rank must call this."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return self._gloo.allreduce([values], options)

    def start(self, messages: Sequence[Message]) -> list[Any]:
        """Send and receive; returns the works, one per message."""
        return [
            (self._gloo.send if message.is_leaving else self._gloo.recv)([message.tensor], message.peer, 0)
            for message in messages
        ]

    def abandon(self, works: Sequence[Any]) -> None:
        """Leave works that may never end; they are held until they have, so that nothing waits for them."""
        leave(self._gloo, works)

    def close(self) -> None:
        """Take part in nothing any more. Closing twice is allowed."""
        self._gloo = None


def connect(group: Any, *, timeout_s: float) -> Any:
    """Return a gloo group of the same ranks that nothing else uses. Every rank of `group` must call this."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = torch.frombuffer(bytearray(uuid.uuid4().bytes), dtype=torch.uint8)
    try:
        dist.broadcast(name, group=group, group_src=0)
        store = dist.PrefixStore(f"equipoise/{bytes(name.tolist()).hex()}", group.get_group_store())
        gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
        # A rank that closed before the others have connected would break off their connecting.
        gloo.barrier().wait()
    except RuntimeError as error:
        raise TransferError(f"rank {rank}: the group's {size} ranks could not be connected: {error}") from error
    return gloo


def leave(gloo: Any, works: Sequence[Any]) -> None:
    """Hold a connection in the background until works have ended or timed out.

    Gloo cannot be interrupted, and its destructor waits.
    """
    threading.Thread(target=_hold, args=(gloo, list(works)), name="equipoise-left", daemon=True).start()


def _hold(gloo: Any, works: Sequence[Any]) -> None:
    for work in works:
        with suppress(RuntimeError):
            work.wait()
    del gloo


PID, START, VERSION, RETIRED, WRITTEN, ABORTED, TAGS = range(7)
MESSAGE_BYTES = 1024
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3
"""Pauses between two looks: short at first, so that a hand-over costs little, then long enough to leave the core."""
_EXIT_S = 0.3
"""A connection breaks a moment before its process is seen to have ended."""
_LIFE_EVERY_S = 0.05
"""Looking whether a process lives reads a file, so it is done less often."""

_ORDERED = ("x86_64", "amd64")
"""Machines that keep the order of stores, as Linux and others call them."""

Kind = Literal["pull", "return", "refresh", "publish", "collect", "fence"]


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
    """Bounded waits of one rank on the words of its node."""

    def __init__(
        self,
        words: Mapping[int, np.ndarray],
        messages: Mapping[int, np.ndarray],
        *,
        rank: int,
        timeout_s: float,
    ) -> None:
        """Sign in with this process's identity.

        Args:
            words: int64 words of each rank of the node
            messages: bytes of each rank's message
            rank: this rank
            timeout_s: bound on every wait
        """
        check_store_order()
        self.rank, self.timeout_s = rank, timeout_s
        self._words, self._messages = dict(words), dict(messages)
        self._watched: dict[int, tuple[int, int]] = {}
        words[rank][PID], words[rank][START] = identity()

    def watch_peers(self) -> None:
        """Note which processes the peers are; called once all have signed in. Invisible ones are not watched."""
        identities = {r: (int(w[PID]), int(w[START])) for r, w in self._words.items() if r != self.rank}
        self._watched = {r: who for r, who in identities.items() if not is_gone(*who)}

    def wait(
        self, is_ready: Callable[[], bool], transfer: Transfer, *, pause: Callable[[float], object] = time.sleep
    ) -> float:
        """Wait until `is_ready`, and return the seconds it took.

        Args:
            is_ready: looked at again and again, so it must be cheap
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

    def check(self, transfer: Transfer) -> None:
        """Raise if a rank of this node has given up."""
        for rank, words in self._words.items():
            if words[ABORTED]:
                # A message that was cut may end inside a character.
                text = self._messages[rank].tobytes().rstrip(b"\0").decode(errors="replace")
                own = "" if rank == self.rank else f"rank {self.rank}: {transfer} ended because "
                raise TransferError(f"{own}{text}")

    def abort(self, reason: str) -> TransferError:
        """Tell all ranks of the node to give up, and return the error to raise. The first reason of a rank stands."""
        text = f"rank {self.rank}: {reason}"
        if self._words and not self._words[self.rank][ABORTED]:
            data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
            self._messages[self.rank][:] = np.frombuffer(data, dtype=np.uint8)
            self._words[self.rank][ABORTED] = 1
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

    def _check_peers(self, transfer: Transfer) -> None:
        for rank, who in self._watched.items():
            if is_gone(*who):
                # It may have given up, and said why, since that was last looked at.
                self.check(transfer)
                raise self.abort(f"{transfer} cannot finish: rank {rank} (process {who[0]}) is gone")

    def close(self) -> None:
        """Let go of the shared words."""
        self._words, self._messages = {}, {}


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
