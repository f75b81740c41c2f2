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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from equipoise.core.errors import TransferError

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
