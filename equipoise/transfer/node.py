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
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from equipoise.core.errors import TransferError
from equipoise.core.options import TransferOptions
from equipoise.transfer.bank import ExpertWeights
from equipoise.transfer.cuda_pages import CudaPager
from equipoise.transfer.pages import (
    HostPager,
    Pager,
    Pages,
    SharedMemory,
    Span,
    exchange_outcomes,
    share_memory,
    share_pages,
    whole,
)
from equipoise.transfer.waits import MESSAGE_BYTES, TAGS, Connection, Counters, Mark, Message, Transfer, Watchdog

# `Layout`: the shapes of one rank's experts, and the bytes that transfers need for them, before any is allocated.
#
# Invariants (asserted by the tests):
# 1. All layers are alike in shapes, dtype and biases, because replica buffers are shared by all of them.
# 2. What is beyond the budget is refused with every part of the sum, before anything is allocated.


_ALIGN = 64
"""Bytes of a cache line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shapes of one rank's experts and the bytes they need."""

    shapes: tuple[tuple[int, ...] | None, ...]
    """Of one expert's tensors, in the field order of ExpertWeights; None where the model has none."""
    dtype: torch.dtype
    grad_dtype: torch.dtype
    layers: int
    home_slots: int
    slots: int
    depth: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, homes: Sequence[ExpertWeights], options: TransferOptions) -> "Layout":
        """The layout of these home weights, all layers alike, or an error naming the one that differs."""
        if not homes:
            raise TransferError("no layer was given; transfers need the home weights of at least one MoE layer")
        first = homes[0]
        for layer, weights in enumerate(homes):
            for tensor, like in zip(weights, first, strict=True):
                check_tensor(layer, tensor, like)
        return cls(
            shapes=tuple(None if t is None else tuple(t.shape[1:]) for t in first),
            dtype=first.gate_up_SFD.dtype,
            grad_dtype=first.gate_up_SFD.dtype if options.grad_dtype is None else getattr(torch, options.grad_dtype),
            layers=len(homes),
            home_slots=first.num_slots,
            slots=options.slots,
            depth=options.depth,
            device=first.gate_up_SFD.device,
        )

    def bytes_of(self, num_slots: int, dtype: torch.dtype) -> int:
        """Bytes of the tensors of some slots, each beginning on a line of its own."""
        return sum(aligned(num_slots * prod(shape) * dtype.itemsize) for shape in self.shapes if shape is not None)

    @property
    def num_mailboxes(self) -> int:
        """Replica gradients of one rank that can be on their way at once."""
        return self.slots * (self.depth + 1)

    @property
    def replica_bytes(self) -> int:
        """Private replica buffers of one rank."""
        return (self.depth + 1) * self.bytes_of(self.slots, self.dtype)

    @property
    def home_bytes(self) -> int:
        """Home weights of one layer."""
        return self.bytes_of(self.home_slots, self.dtype)

    @property
    def outbox_bytes(self) -> int:
        """Staging of one layer, of weights or of gradients."""
        return max(self.bytes_of(self.home_slots, dtype) for dtype in (self.dtype, self.grad_dtype))

    @property
    def mailbox_bytes(self) -> int:
        """All mailboxes of one rank. Autograd makes replica gradients in the weights' dtype, and they travel in it."""
        return self.bytes_of(self.num_mailboxes, self.dtype)

    @property
    def extra_bytes(self) -> int:
        """Bytes per rank beyond the home weights, which exist anyway: buffers, mailboxes, outbox."""
        return self.replica_bytes + self.mailbox_bytes + self.outbox_bytes

    @property
    def control_bytes(self) -> int:
        """Words and message of one rank."""
        return aligned(8 * (TAGS + self.num_mailboxes)) + MESSAGE_BYTES

    @property
    def matrices(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of one expert's two matrices."""
        return tuple(shape for shape in self.shapes[:2] if shape is not None)

    @property
    def bias_bytes(self) -> int:
        """Biases of one layer's home slots."""
        lines = (prod(shape) for shape in self.shapes[2:] if shape is not None)
        return sum(aligned(self.home_slots * line * self.dtype.itemsize) for line in lines)

    def matrix_bytes(self, field: int, num_slots: int) -> int:
        """One of the two matrices of some slots."""
        return num_slots * prod(self.matrices[field]) * self.dtype.itemsize

    def pieces(self, granule: int) -> list[int]:
        """Bytes of each piece of a rank's pages: per layer its two matrices, then biases, outbox and mailboxes."""
        matrices = [whole(self.matrix_bytes(field, self.home_slots), granule) for field in (0, 1)]
        rest = self.layers * self.bias_bytes + self.outbox_bytes + self.mailbox_bytes
        return [*matrices * self.layers, whole(rest, granule)]


def allocate_experts(
    layout: Layout, num_slots: int, dtype: torch.dtype, *, device: torch.device | str = "cpu"
) -> ExpertWeights:
    """[num_slots, ...] private tensors, not filled."""
    made = (None if s is None else torch.empty(num_slots, *s, dtype=dtype, device=device) for s in layout.shapes)
    return ExpertWeights(*made)


def aligned(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // _ALIGN) * _ALIGN


def check_budget(layout: Layout, options: TransferOptions) -> None:
    """Raise if replica buffers, mailboxes and outbox of one rank exceed the budget."""
    if options.budget_bytes is not None and layout.extra_bytes > options.budget_bytes:
        raise TransferError(
            f"{layout.slots} slots at depth {layout.depth} need {layout.extra_bytes:,} bytes per rank (replica buffers "
            f"{layout.replica_bytes:,}, mailboxes {layout.mailbox_bytes:,}, outbox {layout.outbox_bytes:,}); "
            f"the budget is {options.budget_bytes:,}: use fewer slots or a larger budget"
        )


def check_tensor(layer: int, tensor: torch.Tensor | None, like: torch.Tensor | None) -> None:
    """Raise unless the tensor has the shape, dtype and device of `like`."""
    if tensor is None or like is None:
        if tensor is not like:
            raise TransferError(f"layer index {layer}: some layers have expert biases and some have none")
        return
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise TransferError(
            f"layer index {layer}: an expert tensor is {tensor.dtype} {tuple(tensor.shape)}, expected {like.dtype} "
            f"{tuple(like.shape)}; replica buffers are shared by all layers, so all must be alike"
        )
    if tensor.device != like.device or tensor.device.type not in ("cpu", "cuda"):
        raise TransferError(
            f"layer index {layer}: an expert tensor is on {tensor.device}; all must be on the CPU, or all on one CUDA "
            f"device, and the first is on {like.device}"
        )


# Replica buffers, behind one interface: apart from the home weights, or in one tensor with them.
#
#     SeparateBuffers   private tensors; the products of home and replica slots are two calls
#     Arena             the pages of a buffer's replica slots are mapped behind the home pages of every layer, so that
#                       [home + replica, ...] is one tensor and one grouped call covers both
#
# In an arena the memory of a replica slot exists once per buffer, whatever the number of layers: addresses are free. A
# layer's matrices end where their pages end, so that the first replica slot begins on the next page. With depth + 1
# buffers each layer is seen in as many spans; its parameters live in the first.
#
# Invariants (asserted by the tests):
# 1. What is written to a replica slot of a buffer is seen behind every layer's homes, and nothing else changes.
# 2. Memory beyond the home weights is that of the replica slots alone, rounded up to whole pages.


class ReplicaBuffers(Protocol):
    """The replica slots of one rank, buffer by buffer."""

    @property
    def is_joined(self) -> bool:
        """Whether home and replica slots are one tensor."""
        ...

    def home(self, layer: int) -> tuple[torch.Tensor, ...] | None:
        """The two home matrices of a layer where this says where they lie, else None."""
        ...

    def slots(self, buffer: int) -> ExpertWeights:
        """[slots, ...] of a buffer."""
        ...

    def joined(self, layer: int, buffer: int) -> tuple[torch.Tensor, ...]:
        """[home_slots + slots, ...] the two matrices of a layer and a buffer in one; nothing where apart."""
        ...

    def close(self) -> None:
        """Let go of the memory; tensors made of it keep theirs. Closing twice is allowed."""
        ...


class SeparateBuffers:
    """Replica slots in tensors of their own."""

    is_joined = False

    def __init__(self, layout: Layout) -> None:
        count = layout.depth + 1
        self._slots = [allocate_experts(layout, layout.slots, layout.dtype, device=layout.device) for _ in range(count)]

    def home(self, layer: int) -> None:
        """Home weights lie wherever the node puts them."""

    def slots(self, buffer: int) -> ExpertWeights:
        """[slots, ...] of a buffer."""
        return self._slots[buffer]

    def joined(self, layer: int, buffer: int) -> tuple[torch.Tensor, ...]:
        """Homes and replicas are apart."""
        return ()

    def close(self) -> None:
        """Let go of the tensors."""
        self._slots = []


class Arena:
    """Replica slots behind the home slots of every layer."""

    is_joined = True

    def __init__(self, layout: Layout, *, pager: Pager, homes: Sequence[Pages]) -> None:
        """Make the pages of the replica slots and map them behind the home pages.

        Args:
            homes: per layer, the pages of its two matrices
        """
        self._layout = layout
        sizes = [whole(layout.matrix_bytes(field, layout.slots), pager.granule) for field in (0, 1)]
        self._starts = [homes[field].num_bytes - layout.matrix_bytes(field, layout.home_slots) for field in (0, 1)]
        with ExitStack() as made:
            replicas = [[_made(pager, size, made) for size in sizes] for _ in range(layout.depth + 1)]
            spans = [
                [[pager.map([homes[2 * layer + field], pages[field]]) for field in (0, 1)] for pages in replicas]
                for layer in range(layout.layers)
            ]
        self._joined = [[self._matrices(pair) for pair in pairs] for pairs in spans]
        self._biases = [
            allocate_experts(layout, layout.slots, layout.dtype, device=layout.device)[2:] if layout.bias_bytes else ()
            for _ in range(layout.depth + 1)
        ]

    def home(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The two home matrices of a layer, in front of the first buffer."""
        home_slots = self._layout.home_slots
        return tuple(matrix[:home_slots] for matrix in self._joined[layer][0])

    def slots(self, buffer: int) -> ExpertWeights:
        """[slots, ...] of a buffer, as seen behind the first layer."""
        home_slots = self._layout.home_slots
        return ExpertWeights(*(matrix[home_slots:] for matrix in self._joined[0][buffer]), *self._biases[buffer])

    def joined(self, layer: int, buffer: int) -> tuple[torch.Tensor, ...]:
        """[home_slots + slots, ...] the two matrices of a layer and a buffer."""
        return self._joined[layer][buffer]

    def close(self) -> None:
        """Let go of the addresses."""
        self._joined, self._biases = [], []

    def _matrices(self, spans: Sequence[Span]) -> tuple[torch.Tensor, ...]:
        layout, slots = self._layout, self._layout.home_slots + self._layout.slots
        return tuple(
            span.view(start, (slots, *shape), layout.dtype)
            for span, start, shape in zip(spans, self._starts, layout.matrices, strict=True)
        )


def _made(pager: Pager, size: int, made: ExitStack) -> Pages:
    """Pages that are released with `made`: spans keep what they show."""
    pages = pager.make(size)
    made.callback(pages.release)
    return pages


def make_buffers(layout: Layout, options: TransferOptions, *, pager: Pager, homes: Sequence[Pages]) -> ReplicaBuffers:
    """Make the buffers that the options ask for."""
    is_arena = options.buffers == "arena" or (options.buffers == "auto" and layout.device.type == "cuda")
    if not is_arena or layout.slots == 0:
        return SeparateBuffers(layout)
    return Arena(layout, pager=pager, homes=homes)


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
            for part, tensor, view in zip(weights._fields, weights, views, strict=True):
                if tensor is None:
                    continue
                name = f"layer index {layer} {part}"
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
