"""Copies of several tensors handed to a device in one go.

    PlainCopies      one after the other, on the current stream: on the CPU, and where asked for
    KernelCopies     one kernel for all (`copy_kernel`): where all memory is on one CUDA device
    ParallelCopies   up to `TRACKS` at once, by copy engines: the current stream and streams beside it that begin and
                     end with it; where a node has several devices

An expert is two matrices or more. A copy inside a device comes up to speed about as slowly as it moves a small matrix,
so copies in a row take longer than one copy of as many bytes (`benchmarks.transfer` measures all three).

Knows tensors and streams. Does not know experts or who waits. The way is chosen once, when memory is opened
(`TransferOptions.copies`), and logged.

Invariants (asserted by the tests):
1. Every target has its source's bits once the current stream has passed; other memory is untouched.
2. No copy begins before what the current stream held, and what it is given next waits for all of them.
"""

import logging
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch

from equipoise.core.errors import TransferError
from equipoise.core.options import CopyMethod
from equipoise.transfer.cuda_pages import call_driver, load_driver

TRACKS = 4
"""Two experts of two matrices: what a rank with two slots pulls for a visit."""

_LOG = logging.getLogger(__name__)


class Copy(NamedTuple):
    """One tensor to another of the same shape and dtype, both contiguous."""

    into: torch.Tensor
    out_of: torch.Tensor


class Copier(Protocol):
    """A way to copy several tensors."""

    @property
    def name(self) -> str:
        """What logs and reports call it."""
        ...

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy on the current stream."""
        ...


class PlainCopies:
    """One copy after the other."""

    name = "plain"

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy on the current stream, in order."""
        for into, out_of in copies:
            into.copy_(out_of, non_blocking=True)


class KernelCopies:
    """One kernel for all copies inside a CUDA device."""

    name = "kernel"

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel: the first pull should not have to."""
        from equipoise.transfer import triton_copies

        self._kernel = triton_copies
        with torch.cuda.device(device):
            self.copy([Copy(*torch.zeros(2, triton_copies.SIZE, dtype=torch.int64, device=device))])

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy on the current stream."""
        self._kernel.copy_pieces(copies)


class ParallelCopies:
    """Copies side by side between CUDA devices."""

    name = "parallel"

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, load_driver()
        self._streams = [torch.cuda.Stream(device) for _ in range(TRACKS - 1)]
        self._begin, self._ends = torch.cuda.Event(), [torch.cuda.Event() for _ in self._streams]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy on the current stream and those beside it, which it then waits for."""
        main, beside = torch.cuda.current_stream(self._device), self._streams[: max(len(copies) - 1, 0)]
        self._begin.record(main)
        for stream in beside:
            stream.wait_event(self._begin)
        tracks = [main.cuda_stream, *(stream.cuda_stream for stream in beside)]
        for number, (into, out_of) in enumerate(copies):
            assert into.is_contiguous() and out_of.is_contiguous(), "a copy of bytes needs them in one piece"
            # The driver's call: torch's takes several times as long in the calling thread, and keeps the interpreter.
            given = (into.data_ptr(), out_of.data_ptr(), into.nbytes, tracks[number % len(tracks)])
            call_driver(self._driver, "cuMemcpyAsync", *given)
        for stream, end in zip(beside, self._ends, strict=False):
            end.record(stream)
            main.wait_event(end)


def make_copier(device: torch.device, way: CopyMethod = "auto", *, sources: Iterable[torch.Tensor] = ()) -> Copier:
    """Choose how copies inside a node are made.

    Args:
        way: `auto` is plain on the CPU; on a CUDA device a kernel, or parallel where sources are on others
        sources: a tensor of every process whose memory is copied from
    """
    if device.type != "cuda" and way in ("kernel", "parallel"):
        raise TransferError(f"copies is {way!r}, but experts are on {device}; give 'plain' or 'auto' there")
    if way == "auto" and device.type == "cuda":
        has_kernel = find_spec("triton") is not None and all(_owner(source) == device.index for source in sources)
        way = "kernel" if has_kernel else "parallel"
    copier: Copier = PlainCopies()
    if way in ("kernel", "parallel"):
        copier = KernelCopies(device) if way == "kernel" else ParallelCopies(device)
    _LOG.info("pulls inside a node are %s copies on %s", copier.name, device)
    return copier


def _owner(tensor: torch.Tensor) -> int:
    """The device that holds a tensor's memory, also where this process sees it as its own device's."""
    driver = load_driver()
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call_driver(driver, "cuPointerGetAttribute", kind, tensor.data_ptr()))
