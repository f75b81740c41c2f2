"""Memory that processes of one node share: made by one of them, handed to the others as an open file, named nowhere.

    FdServer       hands open files to other processes over a Unix socket; `fetch_fds` is the other side
    SharedMemory   one mapping per process of a piece made by the node's first rank (`share_memory`)
    Pages, Span    physical memory without an address, and a range of addresses that shows one or more pages in a row
    Pager          makes both: `HostPager` here (memfd, mmap), `CudaPager` in `cuda_pages` (CUDA's virtual memory)
    share_pages    every rank of a node makes pages, and maps those of all the others
    share_storages the same with memory that a framework owns already, under the tensors that are in it

The same pages may be mapped in several spans: that is how replica slots lie behind the home slots of every layer
(`node.Arena`).
A mapping lives exactly as long as something refers to it, so no tensor ever points to memory that is gone. Pages are
freed when they are released and no span of any process shows them; no descriptor, socket or name is left behind.
"""

import ctypes
import mmap
import os
import resource
import secrets
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.transfer.waits import all_or_none, gather_objects

MOST_FDS = 200
"""Descriptors in one message; Linux allows 253. Each message is received before the next is sent, or descriptors of two
messages would arrive as one."""
_FIX = "raise the container's memory limit, or use fewer ranks per node, slots or depth"
_CAP_IPC_LOCK = 14
"""Bit of the capability that lifts the locked-memory limit (linux/capability.h)."""
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

Export = Callable[[], int]
"""Makes a descriptor that the server closes once it is sent."""


class FdServer:
    """Hands descriptors to other processes of the node, over a socket in the abstract namespace."""

    def __init__(self) -> None:
        self.address = f"\0equipoise-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(128)

    def serve(self, exports: Sequence[Export], *, times: int, timeout_s: float) -> None:
        """Send all descriptors to each of the next `times` processes that connect."""
        self._socket.settimeout(timeout_s)
        for _ in range(times):
            try:
                connection, _ = self._socket.accept()
                with connection:
                    # An accepted socket has no bound of its own.
                    connection.settimeout(timeout_s)
                    for start in range(0, len(exports), MOST_FDS):
                        self._send(connection, exports[start : start + MOST_FDS])
            except OSError as error:
                raise TransferError(
                    f"shared memory: {times} ranks of this node should have fetched it within {timeout_s:g} s each, "
                    f"not all did ({error}); see the other ranks' logs"
                ) from error

    def close(self) -> None:
        """Close the socket. Closing twice is allowed."""
        self._socket.close()

    @staticmethod
    def _send(connection: socket.socket, exports: Sequence[Export]) -> None:
        with ExitStack() as exported:
            descriptors: list[int] = []
            for export in exports:
                descriptors.append(export())
                exported.callback(os.close, descriptors[-1])
            socket.send_fds(connection, [b"f"], descriptors)
            if not connection.recv(1):
                raise ConnectionError("a rank ended before it received them")


def fetch_fds(address: str, count: int, use: Callable[[int], None], *, source: int, timeout_s: float) -> None:
    """Fetch descriptors from a server and use them one by one; each is closed afterwards.

    Args:
        address: of the server
        count: descriptors to fetch
        source: rank of the server, for the error
        timeout_s: bound on each wait; the server may serve others first
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        what = f"shared memory: rank {source} of this node"
        try:
            connection.connect(address)
            for start in range(0, count, MOST_FDS):
                _receive(connection, min(MOST_FDS, count - start), use)
        except TimeoutError as error:
            raise TransferError(
                f"{what} did not hand it over within {timeout_s:g} s; look for what keeps that rank busy, or raise "
                "timeout_s"
            ) from error
        except (ConnectionResetError, BrokenPipeError) as error:
            raise TransferError(f"{what} ended or gave up before it handed it over; its own error says why") from error
        except OSError as error:
            raise TransferError(
                f"{what} has no open socket for it ({error}); it has ended, or the two ranks do not share a network "
                "namespace: start the ranks of one node in one container"
            ) from error


def _receive(connection: socket.socket, count: int, use: Callable[[int], None]) -> None:
    sent, descriptors, _, _ = socket.recv_fds(connection, 1, count)
    try:
        if not sent:
            raise ConnectionResetError("the server closed the connection")
        if len(descriptors) != count:
            raise TransferError(
                f"shared memory: {len(descriptors)} descriptors came instead of {count}; another rank of this node "
                "ended, or the limit on open files is reached: raise it with `ulimit -n`"
            )
        for descriptor in descriptors:
            use(descriptor)
        connection.send(b"k")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class SharedMemory:
    """One process's mapping of a node's memory."""

    def __init__(self, descriptor: int, num_bytes: int, *, is_locked: bool = False) -> None:
        """Map an open file; the caller keeps and closes the descriptor."""
        self._map: mmap.mmap | None = mmap.mmap(descriptor, num_bytes)
        self.num_bytes = num_bytes
        if is_locked and _libc().mlock(self.view(0, (num_bytes,), torch.uint8).data_ptr(), num_bytes) != 0:
            raise TransferError(
                f"shared memory: {num_bytes:,} bytes could not be locked ({os.strerror(ctypes.get_errno())}); "
                "raise the limit with `ulimit -l unlimited`"
            )

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
    first, made = peers[0], list[tuple[int, FdServer]]()
    with ExitStack() as opened:

        def make() -> str:
            if rank != first:
                return ""
            server = FdServer()
            opened.callback(server.close)
            descriptor = reserve(num_bytes, is_locked=is_locked, fix=fix)
            opened.callback(os.close, descriptor)
            made.append((descriptor, server))
            return server.address

        # Step 1: the first rank of each node reserves the memory; if one cannot, all ranks raise.
        addresses = all_or_none(make, partial(gather_objects, group=group))
        # Step 2: it hands the descriptor to the others, which map it; if one cannot, all ranks raise.
        found: list[SharedMemory] = []

        def use(descriptor: int) -> None:
            found.append(SharedMemory(descriptor, num_bytes, is_locked=is_locked))

        def hand_over() -> None:
            if made:
                descriptor, server = made[0]
                server.serve([partial(os.dup, descriptor)], times=len(peers) - 1, timeout_s=timeout_s)
                use(descriptor)
            else:
                fetch_fds(addresses[first], 1, use, source=first, timeout_s=timeout_s * len(peers))

        all_or_none(hand_over, partial(gather_objects, group=group))
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


class Pages(Protocol):
    """Physical memory without an address."""

    @property
    def num_bytes(self) -> int:
        """A whole number of the pager's granules."""
        ...

    def export(self) -> int:
        """Return a descriptor for another process; the caller closes it."""
        ...

    def release(self) -> None:
        """Let go of the memory; spans that show it keep it. Releasing twice is allowed."""
        ...


class Span:
    """A range of addresses over pages."""

    def __init__(self, bytes_N: torch.Tensor) -> None:
        """Take over the one tensor that keeps the range mapped."""
        self._bytes_N = bytes_N

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the bytes from `offset` on; it keeps the range mapped."""
        num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
        return self._bytes_N[offset : offset + num_bytes].view(dtype).view(*shape)


class Pager(Protocol):
    """Makes pages and spans of one kind of memory."""

    @property
    def granule(self) -> int:
        """The size of pages is a multiple of this many bytes."""
        ...

    def check(self, num_bytes: int, *, sharers: int) -> None:
        """Raise unless there is room for `sharers` processes to allocate `num_bytes` each."""
        ...

    def make(self, num_bytes: int) -> Pages:
        """Allocate pages."""
        ...

    def open(self, descriptor: int, num_bytes: int) -> Pages:
        """Take pages that another process exported; the caller keeps and closes the descriptor."""
        ...

    def map(self, pages: Sequence[Any]) -> Span:
        """Map pages of this pager one behind the other."""
        ...


def whole(num_bytes: int, granule: int) -> int:
    """Round up to whole granules, at least one."""
    return max(-(-num_bytes // granule), 1) * granule


class HostPages:
    """Pages in memory of the machine, behind a descriptor."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Take over a descriptor."""
        self.descriptor, self.num_bytes = descriptor, num_bytes

    def export(self) -> int:
        """Return a second descriptor of the same memory."""
        return os.dup(self.descriptor)

    def release(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class HostPager:
    """Makes pages in memory of the machine."""

    granule = mmap.PAGESIZE

    def __init__(self, *, is_locked: bool = False) -> None:
        """
        Args:
            is_locked: keep the pages in memory
        """
        self._is_locked = is_locked

    def check(self, num_bytes: int, *, sharers: int) -> None:
        """Raise unless the machine has room for all."""
        check_room(sharers * num_bytes, available=available_bytes(), is_locked=self._is_locked)

    def make(self, num_bytes: int) -> HostPages:
        """Reserve memory."""
        return HostPages(reserve(num_bytes, is_locked=self._is_locked), num_bytes)

    def open(self, descriptor: int, num_bytes: int) -> HostPages:
        """Take memory that another process reserved."""
        return HostPages(os.dup(descriptor), num_bytes)

    def map(self, pages: Sequence[HostPages]) -> Span:
        """Map descriptors behind one another."""
        total = sum(one.num_bytes for one in pages)
        libc = _libc()
        base = libc.mmap(None, total, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if base == _MAP_FAILED:
            raise _map_error(total)
        addresses, at = _HostAddresses(base, total), base
        for one in pages:
            flags = _MAP_SHARED | _MAP_FIXED
            if libc.mmap(at, one.num_bytes, _PROT_READ_WRITE, flags, one.descriptor, 0) == _MAP_FAILED:
                raise _map_error(one.num_bytes)
            at += one.num_bytes
        if self._is_locked and libc.mlock(base, total) != 0:
            raise _map_error(total, "raise the limit with `ulimit -l unlimited`")
        return Span(torch.from_numpy(np.asarray(addresses)))


class _HostAddresses:
    """Unmapped with the last array made of it; numpy and torch keep a reference."""

    def __init__(self, base: int, num_bytes: int) -> None:
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (base, False), "version": 3}
        # The process's end unmaps everything by itself.
        weakref.finalize(self, _libc().munmap, base, num_bytes).atexit = False


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    integer, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_void_p, size, integer, integer, integer, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = libc.mlock.argtypes = [ctypes.c_void_p, size]
    return libc


def _map_error(num_bytes: int, fix: str = "raise the limit on mappings (vm.max_map_count)") -> TransferError:
    reason = os.strerror(ctypes.get_errno())
    return TransferError(f"shared memory: {num_bytes:,} bytes could not be mapped ({reason}); {fix}")


class NodePages(NamedTuple):
    """What a rank has of its node's pages."""

    own: list[Pages]
    """To be mapped again or released by the caller."""
    spans: dict[int, list[Span]]
    """By rank of the node, this one included: its pages one by one."""


def share_pages(
    sizes: Sequence[int], *, pager: Pager, group: Any, node_R: Sequence[int], timeout_s: float
) -> NodePages:
    """Make pages of these sizes and map those of the node. Every rank of `group` must call this.

    Args:
        sizes: bytes of each piece, whole granules, the same on every rank
        group: the EP group; carries a few bytes about who made what
        node_R: node of each rank of the group
        timeout_s: longest wait for another rank
    """
    rank, gather = dist.get_rank(group), partial(gather_objects, group=group)
    peers = [r for r, node in enumerate(node_R) if node == node_R[rank]]
    own = list[Pages]()
    with ExitStack() as opened, ExitStack() as released:
        server = FdServer()
        opened.callback(server.close)

        def make() -> str:
            for size in sizes:
                own.append(pager.make(size))
                released.callback(own[-1].release)
            return server.address

        # Step 1: every rank checks that there is room for its whole node before any of them allocates.
        all_or_none(lambda: pager.check(sum(sizes), sharers=len(peers)), gather)
        # Step 2: every rank makes its pages.
        addresses = all_or_none(make, gather)
        # Step 3: each hands its pages over, and the others of its node map them.
        hands = _Hands(server, addresses, rank=rank, node_R=node_R, gather=gather, timeout_s=timeout_s)
        spans = hands.around(own, [sizes] * len(node_R), pager=pager)
        # From here on the caller releases them.
        released.pop_all()
    return NodePages(own, spans)


class _Hands:
    """The ranks of an EP group while they hand pages over inside their nodes."""

    def __init__(
        self,
        server: FdServer,
        addresses: Sequence[str],
        *,
        rank: int,
        node_R: Sequence[int],
        gather: Callable[[Any], list],
        timeout_s: float,
    ) -> None:
        """
        Args:
            addresses: of all ranks' servers
            gather: gives every rank's object to all
        """
        self._server, self._addresses, self._rank = server, addresses, rank
        self._node_R, self._gather, self._timeout_s = node_R, gather, timeout_s

    def around(self, own: Sequence[Any], sizes_R: Sequence[Sequence[int]], *, pager: Any) -> dict[int, list[Span]]:
        """Hand over own pages and map those of the node, by rank. Every rank of the group must call this.

        All begin a turn together, so that a rank waits for those of its own turn alone, at most once for each of them.

        Args:
            sizes_R: bytes of each rank's pages
        """
        peers = [r for r, node in enumerate(self._node_R) if node == self._node_R[self._rank]]
        spans = dict[int, list[Span]]()

        def hand_over(turn: int) -> None:
            source = peers[turn] if turn < len(peers) else None
            if source == self._rank:
                spans[source] = [pager.map([pages]) for pages in own]
                exports = [pages.export for pages in own]
                self._server.serve(exports, times=len(peers) - 1, timeout_s=self._timeout_s)
            elif source is not None:
                bound = {"pager": pager, "timeout_s": self._timeout_s * len(peers)}
                spans[source] = _map_pages_of(source, self._addresses[source], sizes_R[source], **bound)

        for turn in range(max(Counter(self._node_R).values())):
            all_or_none(partial(hand_over, turn), self._gather)
        return spans


def _map_pages_of(source: int, address: str, sizes: Sequence[int], *, pager: Pager, timeout_s: float) -> list[Span]:
    spans: list[Span] = []

    def map_next(descriptor: int) -> None:
        pages = pager.open(descriptor, sizes[len(spans)])
        try:
            spans.append(pager.map([pages]))
        finally:
            pages.release()

    fetch_fds(address, len(sizes), map_next, source=source, timeout_s=timeout_s)
    return spans


def share_storages(
    tensors: Sequence[torch.Tensor], *, group: Any, node_R: Sequence[int], timeout_s: float
) -> dict[int, list[torch.Tensor]]:
    """Let the node's ranks map the memory that these tensors are in, whoever owns it. Every rank of `group` must call.

    The memory of a storage is replaced by shared memory under all tensors that see it, with the same values; nothing is
    copied after that.

    Args:
        tensors: contiguous, on the CPU; as many on every rank, of the same shapes and dtype

    Returns: by rank of the node, this one included: its tensors, seen from here
    """
    rank, gather = dist.get_rank(group), partial(gather_objects, group=group)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    server = FdServer()

    def share() -> tuple[str, list[int], list[tuple[int, int]]]:
        wrong = next((t for t in tensors if t.device.type != "cpu" or not t.is_contiguous()), None)
        if wrong is not None:
            raise TransferError(
                f"a {list(wrong.shape)} tensor on {wrong.device} cannot be shared where it is; only contiguous ones on "
                "the CPU can: use a working copy of the weights"
            )
        places = [
            (list(storages).index(t.untyped_storage().data_ptr()), t.storage_offset() * t.element_size())
            for t in tensors
        ]
        return server.address, [storage.nbytes() for storage in storages.values()], places

    try:
        # Step 1: every rank says what it has; none changes anything if one cannot.
        facts = all_or_none(share, gather)
        # Step 2: each hands its memory over, and all of its node map it.
        own = [HostPages(os.dup(one._share_fd_cpu_()[0]), one.nbytes()) for one in storages.values()]
        addresses, sizes_R, places_R = zip(*facts, strict=True)
        hands = _Hands(server, addresses, rank=rank, node_R=node_R, gather=gather, timeout_s=timeout_s)
        spans = hands.around(own, sizes_R, pager=HostPager())
        for pages in own:
            pages.release()
    finally:
        server.close()
    return {
        source: [
            there[at].view(offset, tensor.shape, tensor.dtype)
            for tensor, (at, offset) in zip(tensors, places_R[source], strict=True)
        ]
        for source, there in spans.items()
    }
