"""`NcclGroup`: the ranks of an EP group connected once more over NCCL, for experts that change nodes on CUDA devices.

An exchange is one batch of sends and receives, on a communicator and in a stream of its own: it runs beside the layers
and the training's collectives, and giving it up leaves these alone.

How every wait stays bounded:
1. All ranks that may exchange experts are connected at the start. NCCL connects two ranks with their first message,
   and the calling thread waits for that without a bound.
2. Whoever waits asks whether a batch is finished (`is_completed`) and never synchronizes.
3. Torch's `abort` ends a batch that will not finish: NCCL's kernels return, and the device goes on.
4. Torch's own watchdog would end the whole process when a connection breaks. This group alone has none.

NCCL's own buffers are not counted in any budget: it makes them for each pair of ranks, as it does for the training.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.core.plan import Transport
from equipoise.transfer.waits import Message, all_or_none, fresh_store, gather_objects

Wait = Callable[[Callable[[], bool]], object]
"""Waits, bounded, until a call returns True, or raises TransferError."""
_NO_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""What torch reads when it makes a group: errors are for those who wait, and no thread looks for them."""


def choose_transport(asked: Transport, *, group: Any, device: torch.device, nodes: int) -> Transport:
    """Return `nccl` or `gloo`, or raise on all ranks where NCCL cannot be used. Every rank of `group` must call this.

    Args:
        asked: `auto` is NCCL where the group has several nodes and moves the tensors of `device` by NCCL itself
        device: where the experts are
    """
    is_own = device.type == "cuda" and "cuda:nccl" in dist.get_backend_config(group)
    if asked == "gloo" or (asked == "auto" and (nodes == 1 or not is_own)):
        return "gloo"

    def find_device() -> tuple[str, str]:
        if device.type != "cuda" or not dist.is_nccl_available():
            where = f"the experts are on {device}" if device.type != "cuda" else "this torch was built without NCCL"
            raise TransferError(f"transport is 'nccl', but {where}; use transport='auto' or 'gloo'")
        return os.environ.get("NCCL_HOSTID", ""), str(torch.cuda.get_device_properties(device).uuid)

    seen: dict[tuple[str, str], int] = {}
    for rank, found in enumerate(all_or_none(find_device, lambda mine: gather_objects(mine, group))):
        first = seen.setdefault(found, rank)
        if first != rank:
            raise TransferError(
                f"transport is 'nccl', but ranks {first} and {rank} share the GPU {found[1]}, which NCCL joins only as "
                "ranks of different hosts: start every rank with another NCCL_HOSTID, and with NCCL_SOCKET_IFNAME=lo "
                "where all are on one machine, or use transport='gloo'"
            )
    return "nccl"


class NcclGroup:
    """The ranks of a group connected once more over NCCL, for one thread of each rank at a time."""

    def __init__(
        self, group: Any, *, device: torch.device, node_R: Sequence[int], timeout_s: float, wait: Wait
    ) -> None:
        """Connect every rank with those of other nodes. Every rank of `group` must call this.

        Args:
            group: the ranks to connect; able to move CPU tensors
            timeout_s: torch's bound on a batch, above that of `wait`
        """
        self.rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._is_aborted = False
        store = fresh_store(group)
        try:
            with _environment(_NO_WATCHDOG):
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=timeout_s)
                options.global_ranks_in_group = dist.get_process_group_ranks(group)
                self._nccl: Any = dist.ProcessGroupNCCL(store, self.rank, size, options)
            # The communicator is made by the first call, in which all ranks must take part.
            self.finish(self._nccl.allreduce([torch.zeros(1, device=device)]), wait)
            away = [rank for rank in range(size) if node_R[rank] != node_R[self.rank]]
            self.exchange([Message(torch.zeros(1, device=device), r, way) for r in away for way in (True, False)], wait)
        except TransferError:
            raise
        except RuntimeError as error:
            raise TransferError(f"rank {self.rank}: NCCL could not connect the {size} ranks: {error}") from error

    def exchange(self, messages: Sequence[Message], wait: Wait) -> None:
        """Send and receive once the current stream's work is done; returns when the device is done with that, too.

        Raises what `wait` raises, or RuntimeError where a connection broke. Either way this rank takes part in no other
        exchange, and the others see their connections to it break.
        """
        self.finish(self.start(messages)[0], wait)

    def start(self, messages: Sequence[Message]) -> list[Any]:
        """Start one batch once the current stream's work is done, and return its work, alone in a list."""
        if self._is_aborted or self._nccl is None:
            raise TransferError(f"rank {self.rank}: closed, so it takes part in no exchange any more")
        nccl = self._nccl
        try:
            nccl._start_coalescing()
            for message in messages:
                (nccl.send if message.is_leaving else nccl.recv)([message.tensor], message.peer, 0)
            return [nccl._end_coalescing()]
        except RuntimeError:
            self._abort()
            raise

    def close(self) -> None:
        """Let go of the connection; all batches must be finished, or aborted. Closing twice is allowed."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None and not self._is_aborted:
            # Unlike `abort`, this lets what has been sent arrive.
            nccl.shutdown()

    def finish(self, work: Any, wait: Wait) -> None:
        """Wait for a batch; raises as `exchange` does."""
        try:
            wait(work.is_completed)
            # Returns at once, or raises where NCCL found an error.
            work.wait()
        except RuntimeError:
            self._abort()
            raise

    def _abort(self) -> None:
        """End what does not finish, on the device too."""
        self._is_aborted = True
        self._nccl.abort()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the length of a `with` block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
