"""Memory that the ranks of one node share: made by one of them, handed to the others as an open file, named nowhere.

Knows sizes, limits and file descriptors. Does not know experts, plans or who waits for whom.

Steps of `share_memory`, called by every rank of the group at the same time:
1. The first rank of each node checks that the memory is there and reserves it (`memfd_create`, `posix_fallocate`).
2. Every rank hears of every node's outcome; if one failed, all of them raise the same error.
3. The others fetch the descriptor (`handover`), map it, and close it.

Invariants (asserted by the tests):
1. After step 3 no file, socket or name is left: only the mapping and the descriptor that Python keeps with it, and both
   end with the process.
2. A size that does not fit memory, or the locked-memory limit where it is to be locked, is refused before allocation.
3. A mapping lives exactly as long as something refers to it: `close` drops this object's reference, a tensor made by
   `view` keeps its own, so that no tensor ever points to memory that is gone.
"""

import ctypes
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.runtime.handover import Counter, take

_FIX = "raise the container's memory limit, or use fewer ranks per node, slots or depth"
_CAP_IPC_LOCK = 14
"""Bit of the capability that lifts the locked-memory limit (linux/capability.h)."""


class SharedMemory:
    """One process's mapping of a node's memory."""

    def __init__(self, descriptor: int, num_bytes: int, *, is_locked: bool = False) -> None:
        """Map an open file; the caller keeps and closes the descriptor."""
        self._map: mmap.mmap | None = mmap.mmap(descriptor, num_bytes)
        self.num_bytes = num_bytes
        if is_locked:
            _lock(self.view(0, (num_bytes,), torch.uint8).data_ptr(), num_bytes)

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the bytes from `offset` on; it keeps the mapping alive."""
        if self._map is None:
            raise TransferError("the node's shared memory is closed; open it again before use")
        count = int(torch.Size(shape).numel())
        if count == 0:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(*shape)

    def close(self) -> None:
        """Let go of the mapping. It ends as soon as no tensor refers to it; closing twice is allowed."""
        self._map = None


def share_memory(
    num_bytes: int,
    *,
    group: Any,
    node_R: Sequence[int],
    timeout_s: float,
    is_locked: bool = False,
    fix: str = _FIX,
) -> SharedMemory:
    """Map one piece of memory in all ranks of each node. Every rank of `group` must call this.

    Args:
        num_bytes: size of one node's piece
        group: the EP group; carries a few bytes about who made what
        node_R: node of each rank of the group
        timeout_s: longest wait for another rank
        is_locked: keep the pages in memory (needed where a device reads them)
        fix: what to do where it does not fit, for the error
    """
    rank = dist.get_rank(group)
    peers = [r for r, node in enumerate(node_R) if node == node_R[rank]]
    maker = _Maker(num_bytes, is_locked=is_locked, fix=fix) if rank == peers[0] else None
    with closing(maker) if maker is not None else nullcontext():
        mine = ("", "") if maker is None else (maker.counter.address, maker.failure)
        outcomes = exchange_outcomes(mine, group)
        if maker is not None:
            maker.hand_out(len(peers) - 1, timeout_s=timeout_s)
            return SharedMemory(maker.descriptor, num_bytes, is_locked=is_locked)
        first = peers[0]
        return _fetch(outcomes[first][0], num_bytes, source=first, timeout_s=timeout_s, is_locked=is_locked)


def exchange_outcomes(mine: tuple[str, str], group: Any) -> list[tuple[str, str]]:
    """Tell all ranks an address and a failure, and return theirs; if one failed, all raise its words."""
    outcomes: list[tuple[str, str]] = [("", "")] * dist.get_world_size(group)
    try:
        dist.all_gather_object(outcomes, mine, group=group)
    except RuntimeError as error:
        raise TransferError(f"shared memory: a rank of the group is gone or unreachable: {error}") from error
    failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(outcomes) if failure]
    if failures:
        raise TransferError(failures[0])
    return outcomes


class _Maker:
    """The rank that reserves a node's memory and hands the descriptor out."""

    def __init__(self, num_bytes: int, *, is_locked: bool, fix: str) -> None:
        self.failure, self.descriptor, self.counter = "", -1, Counter()
        try:
            self.descriptor = reserve(num_bytes, is_locked=is_locked, fix=fix)
        except TransferError as error:
            self.failure = str(error)

    def hand_out(self, times: int, *, timeout_s: float) -> None:
        self.counter.hand_out([lambda: os.dup(self.descriptor)], times=times, timeout_s=timeout_s)

    def close(self) -> None:
        self.counter.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _fetch(address: str, num_bytes: int, *, source: int, timeout_s: float, is_locked: bool) -> SharedMemory:
    found: list[SharedMemory] = []
    take(
        address,
        1,
        lambda descriptor: found.append(SharedMemory(descriptor, num_bytes, is_locked=is_locked)),
        source=source,
        timeout_s=timeout_s,
    )
    return found[0]


def reserve(num_bytes: int, *, is_locked: bool = False, fix: str = _FIX) -> int:
    """Reserve anonymous memory and return its descriptor, or raise if it does not fit."""
    check_room(num_bytes, available=available_bytes(), is_locked=is_locked, fix=fix)
    descriptor = os.memfd_create("equipoise", os.MFD_CLOEXEC)
    try:
        # Reserved now: a page that cannot be had later would end the process with SIGBUS.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise TransferError(
            f"shared memory: {num_bytes:,} bytes could not be reserved ({error.strerror}); {fix}"
        ) from error
    return descriptor


def check_room(num_bytes: int, *, available: int, is_locked: bool = False, fix: str = _FIX) -> None:
    """Raise if a node's memory cannot hold `num_bytes`, or its process may not lock them."""
    if num_bytes > available:
        raise TransferError(
            f"shared memory: {num_bytes:,} bytes are needed on this node, {available:,} are available; {fix}"
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if is_locked and limit != resource.RLIM_INFINITY and num_bytes > limit and not _may_lock_anything():
        raise TransferError(
            f"shared memory: {num_bytes:,} bytes must be locked, the locked-memory limit is {limit:,}; "
            "raise it with `ulimit -l unlimited` or `docker run --ulimit memlock=-1`"
        )


def available_bytes() -> int:
    """Bytes that this process may still allocate: the machine's, or its control group's if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or limit.read_text().strip() == "max":
        return machine
    return min(machine, int(limit.read_text()) - int(used.read_text()))


def _may_lock_anything() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def _lock(address: int, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) != 0:
        raise TransferError(
            f"shared memory: {num_bytes:,} bytes could not be locked ({os.strerror(ctypes.get_errno())}); "
            "raise the limit with `ulimit -l unlimited`"
        )
