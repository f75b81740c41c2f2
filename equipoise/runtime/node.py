"""`NodeMemory`: the memory that the ranks of one node share for their experts, and where everything lies in it.

Knows shapes, offsets and the parameters that were moved in. Does not know plans, nor when anything may be read: that is
said by the words of the `watchdog` and kept by `edges`, `returns` and `engine`.

Two kinds of memory, each rank having its own part:
    control    on the CPU: int64 words, see `watchdog`, one tag per mailbox at the end; and why this rank gave up
    pages      where the parameters are, see `pages`:
        homes      per layer and matrix one piece, [home_slots, ...] at its end, so that replica slots can follow
        the rest   biases; outbox [home_slots, ...], experts on their way at a window's edge, one layer at a time;
                   mailboxes [mailboxes, ...], replica gradients on their way home

Invariants (asserted by the tests):
1. Parameters stay the same objects with the same values when they move in and when they move out again.
2. What a rank writes to its homes, the ranks of its node read, and no other rank.
3. A parameter that was moved behind the node's back is noticed by `check`, by name.
4. `agree` gives every rank of the group the same answer, or all of them an error within the bound; either way the
   group itself stays usable.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.runtime.arena import ReplicaBuffers, make_buffers
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.connection import Connection, Message
from equipoise.runtime.counters import Counters
from equipoise.runtime.cuda_pages import CudaPager
from equipoise.runtime.layout import Layout, TransferOptions, aligned, check_budget, check_tensor
from equipoise.runtime.memory import SharedMemory, exchange_outcomes, share_memory
from equipoise.runtime.node_pages import share_pages
from equipoise.runtime.pages import HostPager, Pager, Pages, Span
from equipoise.runtime.streams import Mark
from equipoise.runtime.watchdog import MESSAGE_BYTES, TAGS, Transfer, Watchdog


class Registration(NamedTuple):
    """A parameter moved into shared memory, and where it must still be when a stage starts."""

    name: str
    pointer: int
    num_bytes: int
    version: int
    """Window from which on it is registered here."""


class NodeMemory:
    """One rank's view of its node's shared memory, with its own parameters in it."""

    def __init__(
        self,
        homes: Sequence[ExpertWeights],
        *,
        group: Any,
        node_R: Sequence[int],
        options: TransferOptions,
    ) -> None:
        """Share memory with the node's ranks and move the parameters in. Every rank of `group` must call this.

        Args:
            homes: per layer, this rank's home parameters [home_slots, ...]
            group: the EP group, able to move CPU tensors
            node_R: node of each rank of the group
            options: sizes and bounds
        """
        self.layout, self.options, self.group = Layout.of(homes, options), options, group
        self.rank, self.node_R = dist.get_rank(group), tuple(node_R)
        self.counters, self.homes = Counters(), tuple(homes)
        check_budget(self.layout, options)
        if len(self.node_R) != dist.get_world_size(group):
            raise TransferError(f"node_R names {len(self.node_R)} ranks, the group has {dist.get_world_size(group)}")
        self.peers = tuple(r for r, node in enumerate(self.node_R) if node == self.node_R[self.rank])
        self._homes: dict[int, tuple[ExpertWeights, ...]] = {}
        self._mailboxes: dict[int, ExpertWeights] = {}
        self._rest: dict[int, Span] = {}
        # First, because it is the larger part: what does not fit is refused before anything is reserved.
        self._map_pages()
        self._control: SharedMemory = share_memory(
            len(self.peers) * self.layout.control_bytes,
            group=group,
            node_R=self.node_R,
            timeout_s=options.timeout_s,
            is_locked=options.is_locked,
        )
        self.words = {rank: self._words(rank) for rank in self.peers}
        self.watchdog = Watchdog(
            self.words, {rank: self._message(rank) for rank in self.peers}, rank=self.rank, timeout_s=options.timeout_s
        )
        # Twice the bound on waits: what a rank leaves alone is for the watchdog to name, not for gloo.
        self._connection = Connection(group, timeout_s=2 * options.timeout_s)
        self._registrations: tuple[Registration, ...] = ()
        self.adopt(version=0)
        self.agree([0], Transfer("fence", path="p2p"))
        self.watchdog.watch_peers()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.layout.device

    @property
    def direct_path(self) -> str:
        """What counters and errors call memory that this node's ranks have mapped."""
        return "shm" if self.device.type == "cpu" else "peer"

    def home(self, rank: int, layer: int) -> ExpertWeights:
        """[home_slots, ...] home weights of a rank of this node."""
        return self._homes[rank][layer]

    def outbox(self, rank: int, dtype: torch.dtype) -> ExpertWeights:
        """[home_slots, ...] staging of a rank of this node, read as `dtype`."""
        if dtype.itemsize > max(self.layout.dtype.itemsize, self.layout.grad_dtype.itemsize):
            raise TransferError(f"the outbox has no room for {dtype}; give it as grad_dtype")
        offset = self.layout.layers * self.layout.bias_bytes
        return self._experts(self._rest[rank], offset, self.layout.home_slots, dtype)

    def mailboxes(self, rank: int) -> ExpertWeights:
        """[mailboxes, ...] replica gradients that a rank of this node returns."""
        return self._mailboxes[rank]

    def adopt(self, *, version: int) -> None:
        """Move the parameters into shared memory, values and all; those already there stay as they are."""
        registrations = []
        for layer, weights in enumerate(self.homes):
            views = self.home(self.rank, layer)
            for field, tensor, view in zip(weights._fields, weights, views, strict=True):
                if tensor is None:
                    continue
                name = f"layer index {layer} {field}"
                check_tensor(layer, tensor, view)
                if tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor.detach())
                    tensor.data = view
                registrations.append(Registration(name, view.data_ptr(), view.nbytes, version))
        self._registrations = tuple(registrations)
        if self.device.type == "cuda":
            # The memory that parameters left is of no more use to torch.
            torch.cuda.empty_cache()

    def check(self) -> None:
        """Raise if a parameter is no longer where it was registered."""
        tensors = [tensor for weights in self.homes for tensor in weights.tensors()]
        for tensor, known in zip(tensors, self._registrations, strict=True):
            if tensor.data_ptr() != known.pointer or tensor.nbytes != known.num_bytes:
                raise TransferError(
                    f"{known.name}: registered at {known.pointer:#x} with {known.num_bytes} bytes in window "
                    f"{known.version}, now at {tensor.data_ptr():#x} with {tensor.nbytes}; "
                    "call suspend() before parameters are moved or freed, and resume() after"
                )

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """What is registered, in layer and field order."""
        return self._registrations

    def fence(self, word: int, value: int, transfer: Transfer) -> None:
        """Set one of this rank's words and wait until all ranks of the node have reached the same value."""
        self.words[self.rank][word] = value
        self.wait_peers(word, value, transfer)

    def wait_peers(self, word: int, value: int, transfer: Transfer) -> None:
        """Wait until a word of all ranks of the node has reached a value."""
        for peer in self.peers:
            is_there = partial(_has_reached, self.words[peer], word, value)
            self.watchdog.wait(is_there, transfer._replace(peer=peer))

    def agree(self, values: Sequence[int], transfer: Transfer) -> list[int]:
        """Return the largest of each value over all ranks. Every rank of the group must call this.

        Ends within the bound, or at once where a rank of this node gives up or a process is gone.
        """
        self.watchdog.check(transfer)
        largest = torch.tensor(values, dtype=torch.int64)
        work = self._connection.start_largest(largest)
        try:
            self.watchdog.wait(work.is_completed, transfer)
            work.wait()
        except TransferError:
            self._connection.abandon([work])
            raise
        except RuntimeError as error:
            raise self.watchdog.lost(transfer, error) from error
        return [int(value) for value in largest]

    def agree_equal(self, facts: Mapping[str, int], transfer: Transfer) -> None:
        """Raise on all ranks if one of them has a different fact. Every rank of the group must call this."""
        # The largest of a number and of its negative are its extremes over the ranks.
        largest = self.agree([*facts.values(), *(-value for value in facts.values())], transfer)
        for name, high, low in zip(facts, largest[: len(facts)], largest[len(facts) :], strict=True):
            if high != -low:
                reason = (
                    f"{transfer}: ranks differ in {name}, {-low} and {high}; all must use the same plan and run its "
                    "layers in the same order"
                )
                raise self.watchdog.abort(reason)

    def finish(self, messages: Sequence[Message], transfers: Sequence[Transfer]) -> None:
        """Send and receive messages to their end, bounded; `transfers` name them in errors."""
        end, transfer = time.monotonic() + self.options.timeout_s, transfers[0]
        self.watchdog.check(transfer)
        works: list[Any] = []
        try:
            works = self._connection.start(messages)
            for work, transfer in zip(works, transfers, strict=True):  # noqa: B007  # named by the error below
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
        except RuntimeError as error:
            self._connection.abandon(works)
            raise self.watchdog.lost(transfer, error) from error

    def close(self) -> None:
        """Move the parameters out into memory of their own and let go of the node's. Closing twice is allowed."""
        for weights in self.homes if self._registrations else ():
            for tensor in weights.tensors():
                tensor.data = tensor.detach().clone()
        self._registrations = ()
        self.settle()
        self.words = {}
        self._homes, self._mailboxes, self._rest = {}, {}, {}
        self.buffers.close()
        self._connection.close()
        self.watchdog.close()
        self._control.close()

    def settle(self, transfer: Transfer | None = None) -> None:
        """Wait until the device has done what the current stream was given, bounded; nothing to wait for on a CPU."""
        mark = Mark.now(self.device)
        if transfer is None:
            mark.block()
        else:
            self.watchdog.wait(mark.is_reached, transfer)

    def _map_pages(self) -> None:
        """Make this rank's pages, map those of the node, and say what lies where."""
        layout, pager = self.layout, _pager(self.device, self.options)
        sizes = layout.pieces(pager.granule)
        shared = share_pages(sizes, pager=pager, group=self.group, node_R=self.node_R, timeout_s=self.options.timeout_s)
        self.buffers = self._make_buffers(pager, shared.own)
        self._rest = {rank: spans[-1] for rank, spans in shared.spans.items()}
        self._homes = {
            rank: tuple(self._home(rank, layer, spans, sizes) for layer in range(layout.layers))
            for rank, spans in shared.spans.items()
        }
        offset = layout.layers * layout.bias_bytes + layout.outbox_bytes
        self._mailboxes = {
            rank: self._experts(rest, offset, layout.num_mailboxes, layout.dtype) for rank, rest in self._rest.items()
        }

    def _make_buffers(self, pager: Pager, own: Sequence[Pages]) -> ReplicaBuffers:
        """Make the replica buffers on all ranks or on none, and let go of this rank's pages, which spans keep."""
        buffers, failure = None, ""
        try:
            buffers = make_buffers(self.layout, self.options, pager=pager, homes=own[:-1])
        except RuntimeError as error:
            failure = f"replica buffers could not be made: {error}"
        finally:
            for pages in own:
                pages.release()
        exchange_outcomes(("", failure), self.group)
        assert buffers is not None, "no rank failed"
        return buffers

    def _home(self, rank: int, layer: int, spans: Sequence[Span], sizes: Sequence[int]) -> ExpertWeights:
        """[home_slots, ...] one layer of a rank: matrices at the end of their pieces, biases among the rest."""
        layout = self.layout
        matrices = self.buffers.home(layer) if rank == self.rank else None
        if matrices is None:
            pairs = zip(spans[2 * layer :][:2], sizes[:2], layout.matrices, strict=True)
            matrices = tuple(
                _at_end(span, size, (layout.home_slots, *shape), layout.dtype) for span, size, shape in pairs
            )
        offset, biases = layer * layout.bias_bytes, list[torch.Tensor | None]()
        for shape in layout.shapes[2:]:
            biases.append(None if shape is None else spans[-1].view(offset, (layout.home_slots, *shape), layout.dtype))
            offset += 0 if shape is None else aligned(layout.home_slots * prod(shape) * layout.dtype.itemsize)
        return ExpertWeights(*matrices, *biases)

    def _words(self, rank: int) -> np.ndarray:
        count = TAGS + self.layout.num_mailboxes
        return self._control.view(self._control_of(rank), (count,), torch.int64).numpy()

    def _message(self, rank: int) -> np.ndarray:
        offset = self._control_of(rank) + self.layout.control_bytes - MESSAGE_BYTES
        return self._control.view(offset, (MESSAGE_BYTES,), torch.uint8).numpy()

    def _control_of(self, rank: int) -> int:
        return self.peers.index(rank) * self.layout.control_bytes

    def _experts(self, span: Span, offset: int, num_slots: int, dtype: torch.dtype) -> ExpertWeights:
        """[num_slots, ...] tensors one behind the other from `offset` on."""
        tensors: list[torch.Tensor | None] = []
        for shape in self.layout.shapes:
            if shape is None:
                tensors.append(None)
                continue
            tensors.append(span.view(offset, (num_slots, *shape), dtype))
            offset += aligned(num_slots * prod(shape) * dtype.itemsize)
        return ExpertWeights(*tensors)


def _pager(device: torch.device, options: TransferOptions) -> Pager:
    return HostPager(is_locked=options.is_locked) if device.type == "cpu" else CudaPager(device)


def _at_end(span: Span, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the last bytes of a piece."""
    return span.view(size - prod(shape) * dtype.itemsize, shape, dtype)


def _has_reached(words: np.ndarray, word: int, value: int) -> bool:
    return bool(words[word] >= value)
