"""`MappedRows`: memory in which the ranks of a node show rows to each other, and the order in which they may read it.

Every rank has one page of this layout, and maps the pages of all ranks of its node:
    words      one 64-bit step number per rank of the node, written by that rank's stream, waited for by the owner's
    tokens     [T, D] hidden states, or gradients of the layer's output
    order      [N] int32, which (token, column) each row is, in the order in which the rank sends its rows
    gates      [T, K] gates of the tokens
    rows       [P, D] outputs of experts, or gradients of their inputs, slot by slot
    dots       [P] gradients of gates

One step: `begin` it, which waits until nobody reads the part that this rank is about to fill; fill the part; `end` it,
which tells all peers its number and waits for theirs. Steps are the same on all ranks. A peer that has ended step n + 1
has read what it wanted of step n, so a part may be filled again after any other step.

On a CUDA device the stream writes and waits for numbers, and no thread waits for the device. A thread waits only until
the peers' threads have launched the same step: a stream then never waits for work that is not yet on its way.
Otherwise ranks could hang for good: loading a kernel, which any operation may do when it runs for the first time, waits
for the streams of the process, and keeps its other threads from telling peers what those wait for.

A thread of its own bounds the streams' waits: when a peer is gone, or a wait lasts too long, it writes all numbers
itself, so that the device goes on, and the next step raises. What was computed since then never reaches an optimizer.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.core.errors import TransferError
from equipoise.core.options import RowLimits, RowOffsets
from equipoise.transfer.cuda_pages import CudaPager, call_driver, load_driver, write_operation
from equipoise.transfer.node import NodeMemory
from equipoise.transfer.pages import HostPager, Pager, share_pages, whole
from equipoise.transfer.waits import LAUNCHED, Mark, Transfer

Part = Literal["tokens", "rows", "dots"]
_LAST = 1 << 62
"""A step number that ends every wait."""
_POLL_S = 1e-3


class RowViews(NamedTuple):
    """One rank's page as tensors."""

    words_R: Tensor
    tokens_TD: Tensor
    order_N: Tensor
    gates_X: Tensor
    """Bytes, because gates have a dtype of their own; see `typed`."""
    rows_PD: Tensor
    dots_X: Tensor
    """Bytes, likewise."""


_NO_PAGE = RowViews(*[torch.empty(0)] * len(RowViews._fields))


def typed(bytes_X: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[count] the beginning of a part that is kept as bytes."""
    return bytes_X[: count * dtype.itemsize].view(dtype)


class MappedRows:
    """The rows of one node's ranks, seen from one of them."""

    def __init__(self, node: NodeMemory, *, top_k: int) -> None:
        """Allocate nothing yet; `reserve` does.

        Args:
            top_k: experts of a token
        """
        self._node, self.top_k = node, top_k
        self.group = node.group
        """The EP group, of which the node is a part or all."""
        self._width, self._dtype = node.layout.matrices[1][0], node.layout.dtype
        self.limits = RowLimits(tokens=0, sent=0, computed=0)
        self.num_bytes = 0
        """Of this rank's page."""
        self.views: dict[int, RowViews] = {}
        """By rank of the node."""
        self.offsets = RowOffsets(*[0] * 7)
        self.bases_R = torch.zeros(0, dtype=torch.int64, device=node.device)
        """[R] address at which this process has mapped each rank's page, on the device; 0 of other nodes."""
        self.own = _NO_PAGE
        """This rank's page."""
        self.number = 0
        """Of the last step that this rank has ended, or launched the end of."""
        self._last_part = ""
        self._stream_words: StreamWords | None = None

    def reserve(self, limits: RowLimits) -> None:
        """Make room for the rows of a window. Every rank of the group must call this, with the same limits."""
        node = self._node
        sizes = {
            name: max(getattr(limits, name), getattr(self.limits, name)) for name in ("tokens", "sent", "computed")
        }
        if self.views and RowLimits(**sizes) == self.limits:
            return
        limits = RowLimits(**sizes).grown()
        # All ranks have launched every earlier step before any of them lets go of its page.
        node.agreement.largest([0], Transfer("rows", path=node.direct_path))
        self.close()
        is_host = node.device.type == "cpu"
        pager: Pager = HostPager(is_locked=node.options.is_locked) if is_host else CudaPager(node.device)
        row_bytes = self._width * self._dtype.itemsize
        offsets = RowOffsets.of(limits, ranks=len(node.node_R), row_bytes=row_bytes, top_k=self.top_k)
        size = whole(offsets.end, pager.granule)
        shared = share_pages(
            [size], pager=pager, group=node.group, node_R=node.node_R, timeout_s=node.options.timeout_s
        )
        for pages in shared.own:
            pages.release()
        self.limits, self.offsets, self.num_bytes = limits, offsets, size
        self.views = {rank: self._views(spans[0].view) for rank, spans in shared.spans.items()}
        self.own = self.views[node.rank]
        self.own.words_R.zero_()
        bases_R = torch.zeros(len(node.node_R), dtype=torch.int64)
        for rank, views in self.views.items():
            bases_R[rank] = views.words_R.data_ptr()
        self.bases_R = bases_R.to(node.device)
        self._last_part = ""
        Mark.now(node.device).block()
        node.agreement.largest([0], Transfer("rows", path=node.direct_path))
        if not is_host:
            self._stream_words = StreamWords(node, self.views)

    def begin(self, part: Part, *, layer: int) -> RowViews:
        """Begin a step and return this rank's page, whose `part` is to be filled. Every rank must call this.

        Args:
            part: what is filled; `order` and `gates` belong to `tokens`
            layer: for errors
        """
        if part == self._last_part:
            self.end(layer=layer)
        self._last_part = part
        return self.own

    def end(self, *, layer: int) -> None:
        """Wait until all ranks have filled the same part. On a CUDA device the current stream waits.

        What is computed, or launched in this stream, behind it may read the peers' pages.
        """
        node, self.number = self._node, self.number + 1
        transfer = Transfer("rows", layer, path=node.direct_path)
        if self._stream_words is not None:
            self._stream_words.step(self.number, transfer)
        else:
            node.cells[node.rank][LAUNCHED] = self.number
            node.watchdog.wait_peers(LAUNCHED, self.number, transfer)

    def close(self) -> None:
        """Let go of all pages. Closing twice is allowed."""
        if self._stream_words is not None:
            self._stream_words.close()
        Mark.now(self._node.device).block()
        # Views keep the pages mapped, and whoever failed may keep this object.
        self._stream_words, self.views, self.own = None, {}, _NO_PAGE

    def _views(self, view: Callable[..., Tensor]) -> RowViews:
        limits, offsets, width = self.limits, self.offsets, self._width
        return RowViews(
            view(offsets.words, (len(self._node.node_R),), torch.int64),
            view(offsets.tokens, (limits.tokens, width), self._dtype),
            view(offsets.order, (limits.sent,), torch.int32),
            view(offsets.gates, (8 * limits.tokens * self.top_k,), torch.uint8),
            view(offsets.rows, (limits.computed, width), self._dtype),
            view(offsets.dots, (8 * limits.computed,), torch.uint8),
        )


class StreamWords:
    """Writes and waits for step numbers in a CUDA stream, and bounds the waits from a thread of its own."""

    def __init__(self, node: NodeMemory, views: dict[int, RowViews]) -> None:
        """Prepare the operations and start the thread."""
        self._node, self._driver = node, load_driver()
        self._own_R = views[node.rank].words_R
        peers = [rank for rank in node.peers if rank != node.rank]
        driver, size = self._driver, self._own_R.element_size()
        self._writes = [write_operation(driver, views[r].words_R.data_ptr() + size * node.rank) for r in peers]
        self._waits = [_wait_operation(driver, self._own_R.data_ptr() + size * r) for r in peers]
        self._releases = [write_operation(driver, self._own_R.data_ptr() + size * r) for r in peers]
        self._release = torch.cuda.Stream(node.device)
        self._queue: queue.SimpleQueue[tuple[Mark, Mark, Transfer] | None] = queue.SimpleQueue()
        self._failure: TransferError | None = None
        self._thread = threading.Thread(target=self._watch, name="equipoise-rows", daemon=True)
        self._thread.start()

    def step(self, number: int, transfer: Transfer) -> None:
        """Let the current stream write `number` to all peers and wait for theirs."""
        if self._failure is not None:
            raise self._failure
        self._node.watchdog.check(transfer)
        if not self._waits:
            return
        stream = torch.cuda.current_stream(self._node.device).cuda_stream
        for operation in self._writes:
            operation.writeValue.value64 = number
        for operation in self._waits:
            operation.waitValue.value64 = number
        # A write is seen after everything that the stream did before it.
        call_driver(self._driver, "cuStreamBatchMemOp", stream, len(self._writes), self._writes, 0)
        self._node.cells[self._node.rank][LAUNCHED] = number
        self._node.watchdog.wait_peers(LAUNCHED, number, transfer)
        before = Mark.now(self._node.device)
        call_driver(self._driver, "cuStreamBatchMemOp", stream, len(self._waits), self._waits, 0)
        self._queue.put((before, Mark.now(self._node.device), transfer))

    def close(self) -> None:
        """End the thread. Closing twice is allowed."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _watch(self) -> None:
        """Follow the stream from wait to wait; a wait that fails is ended by writing what it waits for."""
        while (item := self._queue.get()) is not None:
            before, after, transfer = item
            try:
                # Only the wait itself is bounded: work in front of it may take its time.
                while not before.is_reached():
                    time.sleep(_POLL_S)
                self._node.watchdog.wait(after.is_reached, transfer, pause=_pause)
            except TransferError as error:
                self._failure = error
                # By the driver alone: a kernel may have to be loaded, which waits for the stream that hangs.
                for operation in self._releases:
                    operation.writeValue.value64 = _LAST
                stream = self._release.cuda_stream
                call_driver(self._driver, "cuStreamBatchMemOp", stream, len(self._releases), self._releases, 0)
                return


def _pause(_: float) -> None:
    time.sleep(_POLL_S)


def _wait_operation(driver: Any, address: int) -> Any:
    operation = driver.CUstreamBatchMemOpParams()
    kind = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_64
    operation.operation = operation.waitValue.operation = kind
    operation.waitValue.address = address
    operation.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    return operation
