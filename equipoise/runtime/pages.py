"""Pieces of memory that processes can map, and ranges of addresses over one piece or several in a row.

    Pages   physical memory without an address, handed to other processes as an open file
    Span    addresses under which pages are seen; what `view` gives keeps them mapped
    Pager   makes both: `HostPager` here (memfd, mmap), `CudaPager` in `cuda_pages` (CUDA's virtual memory)

The same pages may be seen in several spans: that is how replica slots lie behind the home slots of every layer
(`arena`). Knows sizes and descriptors. Does not know experts or ranks.

Invariants (asserted by the tests):
1. Two spans over the same pages show the same bytes; pages in a row are seen without a gap.
2. A span is unmapped when nothing refers to it any more, and pages are freed when they are released and no span shows
   them, in no process. No descriptor is left behind.
3. Pages that do not fit are refused before allocation.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.runtime.memory import available_bytes, check_room, reserve

_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


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
        """Pages come in multiples of this many bytes."""
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
        """Show pages of this pager in a row."""
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
