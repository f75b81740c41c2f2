"""Replica buffers, behind one interface: apart from the home weights, or in one tensor with them.

    SeparateBuffers   private tensors; the products of home and replica slots are two calls
    Arena             the pages of a buffer's replica slots are mapped behind the home pages of every layer, so that
                      [home + replica, ...] is one tensor and one grouped call covers both

In an arena the memory of a replica slot exists once per buffer, whatever the number of layers: addresses are free. A
layer's matrices end where their pages end, so that the first replica slot begins on the next page. With depth + 1
buffers each layer is seen in as many spans; its parameters live in the first.

Knows layouts and pages. Does not know plans, nor what is in a buffer: see `puller`.

Invariants (asserted by the tests):
1. What is written to a replica slot of a buffer is seen behind every layer's homes, and nothing else changes.
2. Memory beyond the home weights is that of the replica slots alone, rounded up to whole pages.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.layout import Layout, TransferOptions, allocate_experts
from equipoise.runtime.pages import Pager, Pages, Span, whole


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
