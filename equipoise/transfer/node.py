"""`NodeMemory`: the memory that the ranks of one node share for their experts, and what lies where in it.

Two kinds of memory, each rank having its own part:
    control    on the CPU: int64 cells, see `waits`, one tag per mailbox at the end; two ballots, see `agree`; and why
               this rank gave up
    pages      where the parameters are, see `pages`:
        homes      per layer and matrix one piece, [home_slots, ...] at its end, so that replica slots can follow;
                   none where parameters stay in memory that a framework owns, which ranks map instead
        the rest   biases; outbox [boxes, ...], experts that change slots at a window's edge, a few at a time;
                   mailboxes [mailboxes, ...], replica gradients on their way to their homes
Where there are several nodes, each rank also has a landing [boxes, ...] of its own for what other nodes send: on its
device by NCCL, in memory of the CPU by gloo.

`ExpertLayout` gives the sizes, `SeparateBuffers` and `Arena` hold the replica slots, `NodeMemory` owns it all. When
anything may be read or written is decided by `edges`, `returns` and `engine`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.errors import TransferError
from equipoise.core.options import TransferOptions, aligned, edge_boxes
from equipoise.transfer.cuda_pages import CudaPager, Pin
from equipoise.transfer.nccl import NcclGroup, choose_transport
from equipoise.transfer.pages import HostPager, Pager, Pages, Span, share_memory, share_pages, share_storages, whole
from equipoise.transfer.waits import (
    MESSAGE_BYTES,
    TAGS,
    Counters,
    Mark,
    Message,
    OwnGroup,
    RankAgreement,
    Transfer,
    Watchdog,
    all_or_none,
    gather_objects,
)

T = TypeVar("T")


class SlotTensors(tuple[Tensor, ...]):
    """One tensor per slot, where a framework keeps each expert's by itself; used like a tensor [slots, ...].

    Example: the `main_grad` views of a layer's local experts (Megatron).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """As of one tensor."""
        return (len(self), *self[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of all of them."""
        return self[0].dtype

    @property
    def device(self) -> torch.device:
        """Of all of them."""
        return self[0].device

    @property
    def is_cuda(self) -> bool:
        """Whether they are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def is_meta(self) -> bool:
        """Whether they have no memory."""
        return self.device.type == "meta"

    def element_size(self) -> int:
        """Bytes of one number."""
        return self.dtype.itemsize

    def transpose(self, one: int, other: int) -> "SlotTensors":
        """Exchange two axes behind that of slots."""
        return SlotTensors(tensor.transpose(one - 1, other - 1) for tensor in self)

    @property
    def nbytes(self) -> int:
        """Of all of them together."""
        return sum(tensor.nbytes for tensor in self)

    def detach(self) -> "SlotTensors":
        """The same memory without a graph."""
        return SlotTensors(tensor.detach() for tensor in self)

    def any(self) -> bool:
        """Whether any number is not zero."""
        return any(bool(tensor.any()) for tensor in self)


GradientOf = Callable[[Tensor], Any]
"""Finds a parameter's accumulated gradient: a tensor of its shape, or one per slot, or None; the same object throughout
a window. Example: `lambda parameter: parameter.main_grad`."""


class ExpertWeights(NamedTuple):
    """Weights of the experts in some slots, or gradients of the same shapes. `s` counts the slots, 0 is allowed."""

    gate_up_SFD: Tensor
    """[s, 2F, D]"""
    down_SDF: Tensor
    """[s, D, F]"""
    gate_up_bias_SF: Tensor | None = None
    """[s, 2F], for models whose experts have biases"""
    down_bias_SD: Tensor | None = None
    """[s, D]"""

    @property
    def num_slots(self) -> int:
        """Experts held."""
        return int(self.gate_up_SFD.shape[0])

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that exist, in field order."""
        return (tensor for tensor in self if tensor is not None)

    def map(self, change: Callable[[Tensor], Any]) -> "ExpertWeights":
        """Apply a function to the tensors that exist."""
        return ExpertWeights(*(None if tensor is None else change(tensor) for tensor in self))

    def flat(self, form: "ExpertWeights | None" = None) -> list[Tensor]:
        """The tensors that exist, slot by slot where `form`, these weights by default, keeps slots one by one."""
        pairs = zip(self.tensors(), (form or self).tensors(), strict=True)
        return [part for t, like in pairs for part in (t if isinstance(like, SlotTensors) else [t])]

    def filled(self, tensors: Iterable[Tensor]) -> "ExpertWeights":
        """The same form with other tensors, which are in the order of `flat`."""
        left = iter(tensors)
        return self.map(lambda t: SlotTensors(islice(left, len(t))) if isinstance(t, SlotTensors) else next(left))


def copy_expert(target: ExpertWeights, target_slot: int, source: ExpertWeights, source_slot: int) -> int:
    """Copy one expert between slots, on the current stream, and return its bytes.

    Through `data`: torch does not count these writes, so those that it counts in a gradient are others'.
    """
    num_bytes = 0
    for into, out_of in zip(target.tensors(), source.tensors(), strict=True):
        into[target_slot].data.copy_(out_of[source_slot], non_blocking=True)
        num_bytes += int(into[target_slot].nbytes)
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Shapes of one rank's experts, alike in all layers, and the bytes that transfers need for them."""

    shapes: tuple[tuple[int, ...] | None, ...]
    """Of one expert's tensors, in the field order of ExpertWeights; None where the model has none."""
    dtype: torch.dtype
    grad_dtype: torch.dtype
    layers: int
    home_slots: int
    slots: int
    depth: int
    nodes: int = 1
    is_in_place: bool = False
    """Whether homes stay in memory that a framework owns, one tensor per slot."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, homes: Sequence[ExpertWeights], options: TransferOptions, *, nodes: int = 1) -> "ExpertLayout":
        """The layout of these home weights, or an error naming the layer that differs from the first."""
        if not homes:
            raise TransferError("no layer was given; transfers need the home weights of at least one MoE layer")
        first = homes[0]
        for layer, weights in enumerate(homes):
            for tensor, like in zip(weights, first, strict=True):
                check_tensor(layer, tensor, like)
        dtype = first.gate_up_SFD.dtype
        return cls(
            shapes=tuple(None if t is None else tuple(t.shape[1:]) for t in first),
            dtype=dtype,
            grad_dtype=dtype if options.grad_dtype is None else getattr(torch, options.grad_dtype),
            layers=len(homes),
            home_slots=first.num_slots,
            slots=options.slots,
            depth=options.depth,
            nodes=nodes,
            is_in_place=isinstance(first.gate_up_SFD, SlotTensors),
            device=first.gate_up_SFD.device,
        )

    def bytes_of(self, num_slots: int, dtype: torch.dtype) -> int:
        """Bytes of the tensors of some slots, each beginning on a cache line of its own."""
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
    def boxes(self) -> int:
        """Experts that the outbox holds, of weights or of gradients, and the landing likewise."""
        return edge_boxes(home_slots=self.home_slots, slots=self.slots, nodes=self.nodes)

    @property
    def outbox_bytes(self) -> int:
        """The outbox of one rank."""
        return max(self.bytes_of(self.boxes, dtype) for dtype in (self.dtype, self.grad_dtype))

    @property
    def landing_bytes(self) -> int:
        """The landing of one rank, for what other nodes send."""
        return self.outbox_bytes if self.nodes > 1 else 0

    @property
    def mailbox_bytes(self) -> int:
        """All mailboxes of one rank."""
        return self.bytes_of(self.num_mailboxes, self.return_dtype)

    @property
    def return_dtype(self) -> torch.dtype:
        """Of returned gradients: nothing is rounded on the way, whatever computed them."""
        return torch.promote_types(self.dtype, self.grad_dtype)

    @property
    def extra_bytes(self) -> int:
        """Bytes per rank beyond the home weights, which exist anyway: buffers, mailboxes, outbox, landing."""
        return self.replica_bytes + self.mailbox_bytes + self.outbox_bytes + self.landing_bytes

    @property
    def ballot(self) -> int:
        """Values that ranks of one node can agree on at once."""
        return max(self.layers, 8)

    @property
    def control_bytes(self) -> int:
        """Cells, two ballots and the message of one rank."""
        return aligned(8 * (TAGS + self.num_mailboxes)) + aligned(8 * 2 * self.ballot) + MESSAGE_BYTES

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
        return [*matrices * (0 if self.is_in_place else self.layers), whole(rest, granule)]


def view_experts(
    layout: ExpertLayout, view: Callable[..., Tensor], offset: int, num_slots: int, dtype: torch.dtype
) -> ExpertWeights:
    """[num_slots, ...] tensors one behind the other from `offset` on, each on a cache line of its own.

    Args:
        view: `Span.view` or `SharedMemory.view`
    """
    tensors: list[Tensor | None] = []
    for shape in layout.shapes:
        tensors.append(None if shape is None else view(offset, (num_slots, *shape), dtype))
        offset += 0 if shape is None else aligned(num_slots * prod(shape) * dtype.itemsize)
    return ExpertWeights(*tensors)


def allocate_experts(
    layout: ExpertLayout, num_slots: int, dtype: torch.dtype, *, device: torch.device | str = "cpu"
) -> ExpertWeights:
    """[num_slots, ...] private tensors, not filled."""
    made = (None if s is None else torch.empty(num_slots, *s, dtype=dtype, device=device) for s in layout.shapes)
    return ExpertWeights(*made)


def check_budget(layout: ExpertLayout, options: TransferOptions) -> None:
    """Raise if replica buffers, mailboxes, outbox and landing of one rank exceed the budget."""
    if options.budget_bytes is not None and layout.extra_bytes > options.budget_bytes:
        raise TransferError(
            f"{layout.slots} slots at depth {layout.depth} need {layout.extra_bytes:,} bytes per rank (replica buffers "
            f"{layout.replica_bytes:,}, mailboxes {layout.mailbox_bytes:,}, outbox {layout.outbox_bytes:,}, landing "
            f"{layout.landing_bytes:,}); the budget is {options.budget_bytes:,}: use fewer slots or a larger budget"
        )


def check_tensor(layer: int, tensor: Tensor | None, like: Tensor | None) -> None:
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


class SeparateBuffers:
    """Replica slots in tensors of their own; the products of home and replica slots are two calls."""

    def __init__(self, layout: ExpertLayout) -> None:
        count = layout.depth + 1
        self.slots = [allocate_experts(layout, layout.slots, layout.dtype, device=layout.device) for _ in range(count)]
        """By buffer: [slots, ...]."""

    def close(self) -> None:
        """Let go of the tensors."""
        self.slots = []


class Arena:
    """Replica slots behind the home slots of every layer, so that [home + replica, ...] is one tensor.

    The pages of a buffer's replica slots are mapped behind the home pages of every layer: their memory exists once per
    buffer, whatever the number of layers. A layer's matrices end where their pages end, so that the first replica slot
    begins on the next page. Each layer is mapped once per buffer; its parameters live in the first mapping.
    """

    def __init__(self, layout: ExpertLayout, *, pager: Pager, homes: Sequence[Pages]) -> None:
        """Make the pages of the replica slots and map them behind the home pages.

        Args:
            homes: per layer, the pages of its two matrices
        """
        self._layout = layout
        sizes = [whole(layout.matrix_bytes(field, layout.slots), pager.granule) for field in (0, 1)]
        starts = [homes[field].num_bytes - layout.matrix_bytes(field, layout.home_slots) for field in (0, 1)]
        all_slots = layout.home_slots + layout.slots

        def map_behind(layer: int, field: int, pages: Pages) -> Tensor:
            span = pager.map([homes[2 * layer + field], pages])
            return span.view(starts[field], (all_slots, *layout.matrices[field]), layout.dtype)

        with ExitStack() as made:
            replicas: list[list[Pages]] = []
            for _ in range(layout.depth + 1):
                replicas.append([])
                for size in sizes:
                    replicas[-1].append(pager.make(size))
                    # Spans keep the pages that they show.
                    made.callback(replicas[-1][-1].release)
            self.joined = [
                [tuple(map_behind(layer, field, pages[field]) for field in (0, 1)) for pages in replicas]
                for layer in range(layout.layers)
            ]
            """By layer and buffer: [home_slots + slots, ...] the two matrices."""
        self.slots: list[ExpertWeights] = []
        """By buffer: [slots, ...], as seen behind the first layer."""
        for matrices in self.joined[0]:
            biases: Sequence[Tensor | None] = ()
            if layout.bias_bytes:
                biases = allocate_experts(layout, layout.slots, layout.dtype, device=layout.device)[2:]
            self.slots.append(ExpertWeights(*(matrix[layout.home_slots :] for matrix in matrices), *biases))

    def home(self, layer: int) -> tuple[Tensor, ...]:
        """The two home matrices of a layer, in front of the first buffer."""
        return tuple(matrix[: self._layout.home_slots] for matrix in self.joined[layer][0])

    def close(self) -> None:
        """Let go of the addresses; tensors made of them keep theirs."""
        self.joined, self.slots = [], []


def make_buffers(
    layout: ExpertLayout, options: TransferOptions, *, pager: Pager, homes: Sequence[Pages]
) -> SeparateBuffers | Arena:
    """Make the buffers that the options ask for."""
    is_arena = options.buffers == "arena" or (options.buffers == "auto" and layout.device.type == "cuda")
    if not is_arena or layout.slots == 0 or layout.is_in_place:
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
        self, homes: Sequence[ExpertWeights], *, group: Any, node_R: Sequence[int], options: TransferOptions
    ) -> None:
        """Share memory with the node's ranks and move the parameters in. Every rank of `group` must call this.

        Args:
            homes: per layer, this rank's home parameters [home_slots, ...]
            group: the EP group, able to move CPU tensors
            node_R: node of each rank of the group
            options: sizes and bounds
        """
        self.layout, self.options, self.group = ExpertLayout.of(homes, options, nodes=len(set(node_R))), options, group
        self.rank, self.node_R = dist.get_rank(group), tuple(node_R)
        self.counters, self.homes = Counters(), tuple(homes)
        self.device = self.layout.device
        self.direct_path = "shm" if self.device.type == "cpu" else "peer"
        """What counters and errors call memory that this node's ranks have mapped."""
        check_budget(self.layout, options)
        if len(self.node_R) != dist.get_world_size(group):
            raise TransferError(f"node_R names {len(self.node_R)} ranks, the group has {dist.get_world_size(group)}")
        nodes = self.layout.nodes
        self.transport = choose_transport(options.transport, group=group, device=self.device, nodes=nodes)
        """What moves experts between nodes: `nccl` or `gloo`."""
        self.peers = tuple(r for r, node in enumerate(self.node_R) if node == self.node_R[self.rank])
        self.home: dict[int, tuple[ExpertWeights, ...]] = {}
        """By rank of this node and layer: [home_slots, ...] its home weights in shared memory."""
        self._outboxes: dict[tuple[int, torch.dtype], ExpertWeights] = {}
        self.mailboxes: dict[int, ExpertWeights] = {}
        """By rank of this node: [mailboxes, ...] replica gradients that it returns."""
        # Pages first, because they are the larger part: what does not fit is refused before anything is reserved.
        self._map_pages()
        control_bytes = self.layout.control_bytes
        self._control = share_memory(
            len(self.peers) * control_bytes,
            group=group,
            node_R=self.node_R,
            timeout_s=options.timeout_s,
            is_locked=options.is_locked,
        )
        start = {rank: at * control_bytes for at, rank in enumerate(self.peers)}
        count = TAGS + self.layout.num_mailboxes
        self.cells = {r: self._control.view(start[r], (count,), torch.int64).numpy() for r in self.peers}
        after, ballots = aligned(8 * count), (2, self.layout.ballot)
        ballot_of = {r: self._control.view(start[r] + after, ballots, torch.int64).numpy() for r in self.peers}
        after = control_bytes - MESSAGE_BYTES
        messages = {r: self._control.view(start[r] + after, (MESSAGE_BYTES,), torch.uint8).numpy() for r in self.peers}
        self._pin: Pin | None = None
        try:
            all_or_none(self._pin_control, partial(gather_objects, group=group))
        except TransferError:
            self._unpin()
            raise
        self.watchdog = Watchdog(self.cells, messages, rank=self.rank, timeout_s=options.timeout_s)
        # Twice the bound on waits: a rank that does not join is named by the watchdog, not by gloo.
        self._own_group = OwnGroup(group, timeout_s=2 * options.timeout_s)
        is_one_node = len(self.peers) == len(self.node_R)
        self.agreement = RankAgreement(
            self._own_group, self.watchdog, cells=self.cells[self.rank], ballots=ballot_of if is_one_node else {}
        )
        self.registrations: tuple[Registration, ...] = ()
        """Where this rank's parameters are, in layer and field order."""
        self.adopt(version=0)
        self.agreement.largest([0], Transfer("fence", path="p2p"))
        self.watchdog.watch_peers()
        self._nccl: NcclGroup | None = None
        if self.transport == "nccl" and nodes > 1:
            wait = partial(self.watchdog.wait, transfer=Transfer("fence", path="p2p"))
            given: dict[str, Any] = {"device": self.device, "node_R": self.node_R, "wait": wait}
            self._nccl = NcclGroup(group, timeout_s=2 * options.timeout_s, **given)
        where = "cpu" if self._nccl is None else self.device
        self._landing_N = torch.empty(self.layout.landing_bytes, dtype=torch.uint8, device=where)
        boxes, view = self.layout.boxes if nodes > 1 else 0, Span(self._landing_N).view
        dtypes = {self.layout.dtype, self.layout.grad_dtype}
        self.landings = {dtype: view_experts(self.layout, view, 0, boxes, dtype) for dtype in dtypes}
        """By dtype: [boxes, ...] experts that other nodes have sent; no boxes where there is one node."""

    @property
    def num_experts(self) -> int:
        """Experts of a layer, of all ranks."""
        return self.layout.home_slots * len(self.node_R)

    def outbox(self, rank: int, dtype: torch.dtype) -> ExpertWeights:
        """[boxes, ...] experts that a rank of this node moves, read as `dtype`."""
        if (rank, dtype) not in self._outboxes:
            raise TransferError(f"gradients are {dtype}; give grad_dtype={dtype} when the node's memory is opened")
        return self._outboxes[rank, dtype]

    def adopt(self, *, version: int) -> None:
        """Move the parameters and their values into shared memory; those already there stay as they are.

        Parameters that stay in place are shared where they are; every rank of the group must call this then.
        """
        registrations = []
        if self.layout.is_in_place:
            self._share_in_place()
            for layer, weights in enumerate(self.homes):
                for slot, tensor in enumerate(weights.flat()):
                    name = f"layer index {layer}, tensor {slot}"
                    registrations.append(Registration(name, tensor.data_ptr(), tensor.nbytes, version))
            self.registrations = tuple(registrations)
            return
        for layer, weights in enumerate(self.homes):
            views = self.home[self.rank][layer]
            for part, tensor, view in zip(weights._fields, weights, views, strict=True):
                if tensor is None or view is None:
                    continue
                check_tensor(layer, tensor, view)
                if tensor.data_ptr() != view.data_ptr():
                    view.copy_(tensor.detach())
                    tensor.data = view
                name = f"layer index {layer} {part}"
                registrations.append(Registration(name, view.data_ptr(), view.nbytes, version))
        self.registrations = tuple(registrations)
        if self.device.type == "cuda":
            # The memory that parameters left is of no more use to torch.
            torch.cuda.empty_cache()

    def check(self) -> None:
        """Raise if a parameter is no longer where it was registered."""
        tensors = [tensor for weights in self.homes for tensor in weights.flat()]
        for tensor, known in zip(tensors, self.registrations, strict=True):
            if tensor.data_ptr() != known.pointer or tensor.nbytes != known.num_bytes:
                raise TransferError(
                    f"{known.name}: registered at {known.pointer:#x} with {known.num_bytes} bytes in window "
                    f"{known.version}, now at {tensor.data_ptr():#x} with {tensor.nbytes}; "
                    "call suspend() before parameters are moved or freed, and resume() after"
                )

    def synchronize(self, transfer: Transfer) -> None:
        """Wait, bounded, until the device has finished the current stream's work; returns at once on a CPU."""
        if self.device.type != "cpu":
            self.watchdog.wait(Mark.now(self.device).is_reached, transfer)

    def messages(self, experts: ExpertWeights, slot: int, *, peer: int, is_leaving: bool) -> list[Message]:
        """The messages of one expert to or from another node's rank, as `exchange` takes them."""
        rows = [tensor.detach()[slot] for tensor in experts.tensors()]
        if self._nccl is not None:
            rows = [row.contiguous() for row in rows]
        elif is_leaving:
            # A copy: a send that the other rank never joins would keep shared memory mapped after `close`.
            rows = [row.to("cpu", copy=True) for row in rows]
        return [Message(row, peer, is_leaving) for row in rows]

    def exchange(self, messages: Sequence[Message], transfers: Sequence[Transfer]) -> None:
        """Send and receive messages, bounded; `transfers` name them in errors."""
        end, transfer = time.monotonic() + self.options.timeout_s, transfers[0]
        self.watchdog.check(transfer)
        works: list[Any] = []
        try:
            if self._nccl is not None:
                # One batch has one end, so an error names an expert only where there is one.
                transfer = transfer if len(set(transfers)) == 1 else transfer._replace(expert=None, peer=None)
                self._nccl.exchange(messages, partial(self.watchdog.wait, transfer=transfer))
                return
            works = self._own_group.start(messages)
            for work, transfer in zip(works, transfers, strict=True):  # noqa: B007  # named by the error below
                work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
        except TransferError:
            raise
        except RuntimeError as error:
            self._own_group.abandon(works)
            raise self.watchdog.lost(transfer, error) from error

    def close(self) -> None:
        """Move the parameters out into memory of their own and let go of the node's. Closing twice is allowed."""
        for weights in self.homes if self.registrations and not self.layout.is_in_place else ():
            for tensor in weights.tensors():
                tensor.data = tensor.detach().clone()
        self.registrations = ()
        Mark.now(self.device).block()
        self.cells = {}
        self.agreement.close()
        self.home, self._outboxes, self.mailboxes = {}, {}, {}
        self.buffers.close()
        self._own_group.close()
        if self._nccl is not None:
            self._nccl.close()
        self._landing_N, self.landings = self._landing_N[:0].clone(), {}
        self.watchdog.close()
        self._unpin()
        self._control.close()

    def write_behind(self, cells: np.ndarray, at: int, value: int) -> None:
        """Set one of this node's cells once the current stream's work is done; whoever sees it sees that work, too."""
        if self._pin is None:
            cells[at] = value
        else:
            self._pin.write(cells[at : at + 1], value)

    def _unpin(self) -> None:
        """Before pages are unmapped: the driver would be left with addresses that are gone."""
        if self._pin is not None:
            self._pin.close()
        self._pin = None

    def _pin_control(self) -> None:
        if self.device.type == "cuda":
            self._pin = Pin(
                self._control.view(0, (self._control.num_bytes,), torch.uint8), name="control pages", fix=""
            )

    def _map_pages(self) -> None:
        """Make this rank's pages and replica buffers, map the pages of the node, and find what lies where."""
        layout = self.layout
        is_host = self.device.type == "cpu"
        pager: Pager = HostPager(is_locked=self.options.is_locked) if is_host else CudaPager(self.device)
        sizes = layout.pieces(pager.granule)
        shared = share_pages(sizes, pager=pager, group=self.group, node_R=self.node_R, timeout_s=self.options.timeout_s)
        made: list[SeparateBuffers | Arena] = []

        def make() -> None:
            try:
                made.append(make_buffers(layout, self.options, pager=pager, homes=shared.own[:-1]))
            except RuntimeError as error:
                raise TransferError(f"replica buffers could not be made: {error}") from error
            finally:
                # Spans keep the pages that they show.
                for pages in shared.own:
                    pages.release()

        all_or_none(make, partial(gather_objects, group=self.group))
        self.buffers = made[0]
        rest = {rank: spans[-1].view for rank, spans in shared.spans.items()}
        if not layout.is_in_place:
            self.home = {
                rank: tuple(self._home(rank, layer, spans, sizes) for layer in range(layout.layers))
                for rank, spans in shared.spans.items()
            }
        offset = layout.layers * layout.bias_bytes
        self._outboxes = {
            (rank, dtype): view_experts(layout, view, offset, layout.boxes, dtype)
            for rank, view in rest.items()
            for dtype in {layout.dtype, layout.grad_dtype}
        }
        offset += layout.outbox_bytes
        self.mailboxes = {
            rank: view_experts(layout, view, offset, layout.num_mailboxes, layout.return_dtype)
            for rank, view in rest.items()
        }

    def _share_in_place(self) -> None:
        """Let the node's ranks map the memory in which this rank's parameters are, and map theirs."""
        tensors = [tensor for weights in self.homes for tensor in weights.flat()]
        shared = share_storages(tensors, group=self.group, node_R=self.node_R, timeout_s=self.options.timeout_s)
        self.home = {}
        for rank, views in shared.items():
            left = iter(views)
            self.home[rank] = tuple(weights.filled(left) for weights in self.homes)

    def _home(self, rank: int, layer: int, spans: Sequence[Span], sizes: Sequence[int]) -> ExpertWeights:
        """[home_slots, ...] one layer of a rank: matrices at the end of their pieces, biases among the rest."""
        layout = self.layout
        if rank == self.rank and isinstance(self.buffers, Arena):
            matrices = self.buffers.home(layer)
        else:
            shapes = [(layout.home_slots, *shape) for shape in layout.matrices]
            starts = [sizes[field] - layout.matrix_bytes(field, layout.home_slots) for field in (0, 1)]
            matrices = tuple(spans[2 * layer + f].view(starts[f], shapes[f], layout.dtype) for f in (0, 1))
        offset, biases = layer * layout.bias_bytes, list[Tensor | None]()
        for shape in layout.shapes[2:]:
            biases.append(None if shape is None else spans[-1].view(offset, (layout.home_slots, *shape), layout.dtype))
            offset += 0 if shape is None else aligned(layout.home_slots * prod(shape) * layout.dtype.itemsize)
        return ExpertWeights(*matrices, *biases)
