"""`Layout`: the shapes of one rank's experts, and the bytes that transfers need for them, before any is allocated.

Knows shapes, dtypes and the options. Does not know addresses: where each part lies is said by `node`.

Invariants (asserted by the tests):
1. All layers are alike in shapes, dtype and biases, because replica buffers are shared by all of them.
2. What is beyond the budget is refused with every part of the sum, before anything is allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, get_args

import torch

from equipoise.core.errors import TransferError
from equipoise.core.value import require_int
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.copies import CopyWay
from equipoise.runtime.pages import whole
from equipoise.runtime.watchdog import MESSAGE_BYTES, TAGS

_ALIGN = 64
"""Bytes of a cache line."""


ForcedPath = Literal["plan", "peer", "host"]
Buffers = Literal["auto", "separate", "arena"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """How much memory transfers may use, and how long they may take."""

    slots: int
    """Replica slots per rank, as in the plans to come."""
    depth: int = 1
    """Visits that pulls may run ahead; there are depth + 1 replica buffers."""
    budget_bytes: int | None = None
    """Most bytes per rank for replica buffers, mailboxes and outbox together; None: no bound but the memory itself."""
    store_bytes: int | None = None
    """Most bytes of host memory per node for the host store; None: no bound but the memory itself."""
    timeout_s: float = 60.0
    """Bound on every single wait."""
    grad_dtype: torch.dtype | None = None
    """Of accumulated gradients; None: as the weights."""
    is_locked: bool = False
    """Keep the shared pages in memory."""
    path: ForcedPath = "plan"
    """Which way pulls go: as the plan says, or all of them by one path."""
    buffers: Buffers = "auto"
    """`arena`: home and replica slots of a layer are one tensor, and one grouped product covers both; `auto`: an arena
    where experts are on a CUDA device."""
    is_checked: bool = False
    """Keep a checksum of every expert in the host store, and compare it before a pull."""
    copies: CopyWay = "auto"
    """How a visit's replicas are copied inside a node; `auto`: on a CUDA device by one kernel, or by copy engines side
    by side where the node's experts are on several devices."""

    def __post_init__(self) -> None:
        require_int("slots", self.slots, low=0, error=TransferError)
        require_int("depth", self.depth, low=1, error=TransferError)
        if not self.timeout_s > 0:
            raise TransferError(f"timeout_s is {self.timeout_s}; it must be above 0")
        for name, known in (("path", ForcedPath), ("buffers", Buffers), ("copies", CopyWay)):
            if getattr(self, name) not in get_args(known):
                words = ", ".join(get_args(known))
                raise TransferError(f"{name} is {getattr(self, name)!r}; it must be one of {words}")


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
            grad_dtype=options.grad_dtype or first.gate_up_SFD.dtype,
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
