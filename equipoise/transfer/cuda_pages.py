"""`CudaPager`: pages in the memory of a CUDA device, mapped where they are needed, exported by file descriptor.

`Pin`: pages of the host that a device copies from at the full rate of the link, and in which its streams write words.

The one file that calls CUDA's virtual memory management, through `cuda.bindings.driver` (package cuda-python). Such
memory has no CUDA IPC handle; it is created exportable, and a peer that was handed its descriptor maps the same pages:
its own device then reads them over NVLink, or directly where both processes share a device.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.transfer.pages import Span


class CudaPages:
    """Pages of a device, behind a driver's handle."""

    def __init__(self, driver: Any, handle: Any, num_bytes: int) -> None:
        """Take over a handle."""
        self.num_bytes = num_bytes
        self.handle: Any = handle
        self._driver = driver

    def export(self) -> int:
        """Return a descriptor for another process."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(call_driver(self._driver, "cuMemExportToShareableHandle", self.handle, kind, 0))

    def release(self) -> None:
        """Let go of the handle."""
        if self.handle is not None:
            call_driver(self._driver, "cuMemRelease", self.handle)
        self.handle = None


class CudaPager:
    """Makes pages on one device."""

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: a CUDA device with an index
        """
        self._device, self._driver = device, load_driver()
        # The driver works in the context that torch has made current.
        torch.cuda.synchronize(device)
        driver = self._driver
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = device.index
        posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._properties.requestedHandleTypes = posix
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(call_driver(driver, "cuMemGetAllocationGranularity", self._properties, least))

    def check(self, num_bytes: int, *, sharers: int) -> None:
        """Raise unless the device has room for this process; what sharers of the device need is theirs to check."""
        free, _ = torch.cuda.mem_get_info(self._device)
        # What torch keeps for itself is given back before anything is refused.
        if num_bytes > free:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._device)
        if num_bytes > free:
            raise TransferError(
                f"device memory: {num_bytes:,} bytes are needed on {self._device}, {free:,} are free; "
                "use fewer slots or depth, or free memory before experts move in"
            )

    def make(self, num_bytes: int) -> CudaPages:
        """Allocate pages."""
        handle = call_driver(self._driver, "cuMemCreate", num_bytes, self._properties, 0)
        return CudaPages(self._driver, handle, num_bytes)

    def open(self, descriptor: int, num_bytes: int) -> CudaPages:
        """Take pages that another process exported."""
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call_driver(self._driver, "cuMemImportFromShareableHandle", descriptor, kind)
        return CudaPages(self._driver, handle, num_bytes)

    def map(self, pages: Sequence[CudaPages]) -> Span:
        """Map pages behind one another, for this device to read and write."""
        driver, total = self._driver, sum(one.num_bytes for one in pages)
        base = int(call_driver(driver, "cuMemAddressReserve", total, 0, 0, 0))
        addresses, at = _CudaAddresses(driver, base, total, self._device), base
        for one in pages:
            call_driver(driver, "cuMemMap", at, one.num_bytes, 0, one.handle, 0)
            addresses.mapped.append((at, one.num_bytes))
            at += one.num_bytes
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call_driver(driver, "cuMemSetAccess", base, total, [access], 1)
        return Span(torch.as_tensor(addresses, device=self._device))


class _CudaAddresses:
    """Unmapped with the last tensor made of it; torch keeps a reference."""

    def __init__(self, driver: Any, base: int, num_bytes: int, device: torch.device) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (base, False),
            "strides": None,
            "version": 3,
        }
        self.mapped: list[tuple[int, int]] = []
        # The process's end unmaps everything by itself.
        weakref.finalize(self, _unmap, driver, (base, num_bytes), self.mapped, device).atexit = False


def _unmap(driver: Any, whole: tuple[int, int], mapped: list[tuple[int, int]], device: torch.device) -> None:
    # Work that still reads these addresses would fail, and with it the process.
    torch.cuda.synchronize(device)
    for base, num_bytes in mapped:
        call_driver(driver, "cuMemUnmap", base, num_bytes)
    call_driver(driver, "cuMemAddressFree", *whole)


class Pin:
    """Pages of the host, registered with the CUDA driver of this process."""

    def __init__(self, bytes_N: torch.Tensor, *, name: str, fix: str) -> None:
        """
        Args:
            name: of the pages, for errors
            fix: what helps where they cannot be registered, beside a higher limit
        """
        self._driver, self._bytes_N = load_driver(), bytes_N
        flags = self._driver.CU_MEMHOSTREGISTER_PORTABLE | self._driver.CU_MEMHOSTREGISTER_DEVICEMAP
        error = int(torch.cuda.cudart().cudaHostRegister(bytes_N.data_ptr(), bytes_N.nbytes, flags))
        self._is_open = not error
        if error:
            raise TransferError(
                f"{name}: {bytes_N.nbytes:,} bytes could not be pinned (CUDA error {error}); raise the locked-memory "
                f"limit with `ulimit -l unlimited`{fix}"
            )
        base = int(call_driver(self._driver, "cuMemHostGetDevicePointer", bytes_N.data_ptr(), 0))
        self._distance = base - bytes_N.data_ptr()

    def write(self, word_1: np.ndarray, value: int) -> None:
        """Let the current stream write one int64 of these pages; whoever sees it sees all that the stream did before.

        No thread takes part. One that waited for the device first could itself be kept waiting for good: pinning memory
        or loading a kernel, in any thread, waits for the process's streams and stops its other threads from asking for
        theirs, while those streams may wait for a rank that waits for this word.
        """
        operation = write_operation(self._driver, word_1.ctypes.data + self._distance)
        operation.writeValue.value64 = value
        call_driver(self._driver, "cuStreamBatchMemOp", torch.cuda.current_stream().cuda_stream, 1, [operation], 0)

    def close(self) -> None:
        """Give the pages back to the system. Closing twice is allowed."""
        if self._is_open:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._bytes_N.data_ptr())
        self._is_open, self._bytes_N = False, self._bytes_N.new_empty(0)


def write_operation(driver: Any, address: int) -> Any:
    """A stream's write of an int64, whose value is still to be set."""
    operation = driver.CUstreamBatchMemOpParams()
    kind = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_64
    operation.operation = operation.writeValue.operation = kind
    operation.writeValue.address, operation.writeValue.flags = address, 0
    return operation


def load_driver() -> Any:
    """Return `cuda.bindings.driver`, or raise with how to install it."""
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError as error:
        raise TransferError(
            "experts on a CUDA device are shared between processes through cuda.bindings, which is not installed; "
            "run: pip install cuda-python"
        ) from error
    return driver


def call_driver(driver: Any, name: str, *arguments: Any) -> Any:
    """Call the driver and return its one result, or raise by name."""
    error, *results = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise TransferError(f"device: {name} failed with {error.name}; see the CUDA driver API")
    return results[0] if results else None
