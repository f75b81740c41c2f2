"""`HostStore`: all experts of a model in memory of one node's machine, in canonical order, each with its version.

The CPU-assisted path pulls from it, and once completed it is the one source for weight sync, export and checkpoints.
Where experts are on a CUDA device its pages are registered with the driver in every process, so that copies run at the
full rate of the link beside the layers.

Knows experts by (layer, expert) and versions. Does not know plans or who refreshes what: see `refresher`.

One piece of shared memory per node: per (layer, expert) a version and a checksum, then per layer [E, ...] tensors.

Invariants (asserted by the tests):
1. `version` is that of the weights which lie there completely: set after them, and 0 while they are written.
2. With checksums, an expert whose bytes changed since is named, by every process that asks for it.
3. Memory that is not there, or cannot be pinned, is refused with the fix, on all ranks alike.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.layout import Layout, TransferOptions, aligned
from equipoise.runtime.memory import exchange_outcomes, share_memory

_FIX = (
    "the host store holds all experts of the model: raise the container's memory limit, or pull inside nodes only "
    "(path='peer', no cross-node replicas)"
)


class HostStore:
    """One process's view of its node's store."""

    def __init__(
        self,
        layout: Layout,
        *,
        experts: int,
        group: Any,
        node_R: Sequence[int],
        timeout_s: float,
        is_checked: bool = False,
    ) -> None:
        """Share the memory with the node's ranks. Every rank of `group` must call this.

        Args:
            layout: shapes of the experts, and the device they are on
            experts: experts of a layer, of all ranks
            is_checked: keep checksums
        """
        self._layout, self._num_experts, self._is_checked = layout, experts, is_checked
        self._layer_bytes, self._first = layout.bytes_of(experts, layout.dtype), _words_bytes(layout, experts)
        num_bytes = store_bytes(layout, experts)
        self._memory = share_memory(num_bytes, group=group, node_R=node_R, timeout_s=timeout_s, fix=_FIX)
        words = self._memory.view(0, (2, layout.layers, experts), torch.int64).numpy()
        self._version_LE, self._checksum_LE = words[0], words[1]
        self._experts = [self._layer(layer) for layer in range(layout.layers)]
        self._pin: _Pin | None = None
        self._pin_pages(group)

    @property
    def num_bytes(self) -> int:
        """Memory of the node that the store takes."""
        return self._memory.num_bytes

    def experts(self, layer: int) -> ExpertWeights:
        """[E, ...] weights of a layer in canonical order; an expert's are there once `version` says so."""
        return self._experts[layer]

    def version(self, layer: int, expert: int) -> int:
        """The version of an expert's weights that lies here; 0: none."""
        return int(self._version_LE[layer, expert])

    def withdraw(self, layer: int, expert: int) -> None:
        """Say that an expert's weights are about to be written: until they are announced, none lie here."""
        self._version_LE[layer, expert] = 0

    def announce(self, layer: int, expert: int, version: int) -> None:
        """Say that an expert's weights of a version have been written completely."""
        if self._is_checked:
            self._checksum_LE[layer, expert] = self._checksum(layer, expert)
        self._version_LE[layer, expert] = version

    def check(self, layer: int, expert: int) -> None:
        """In checked mode, raise if an expert's bytes are not those that were announced."""
        if self._is_checked and (found := self._checksum(layer, expert)) != self._checksum_LE[layer, expert]:
            raise TransferError(
                f"host store: expert {expert} in layer index {layer} has checksum {found:#010x}, written with "
                f"{int(self._checksum_LE[layer, expert]):#010x}; its memory was overwritten or is faulty: end this "
                "step and load the last checkpoint"
            )

    def is_complete(self, version: int) -> bool:
        """Whether every expert's weights of this version are there."""
        return bool((self._version_LE >= version).all())

    def close(self) -> None:
        """Let go of the memory; tensors made of it keep theirs, unpinned. Closing twice is allowed."""
        if self._pin is not None:
            self._pin.close()
        self._pin, self._experts = None, []
        # Not a slice of the words: that would keep the memory mapped.
        self._version_LE = self._checksum_LE = np.zeros((0, 0), dtype=np.int64)
        self._memory.close()

    def _pin_pages(self, group: Any) -> None:
        """Register the memory where a device reads it; if one rank may not, none goes on."""
        failure = ""
        if self._layout.device.type == "cuda":
            try:
                self._pin = _Pin(self._memory.view(0, (self.num_bytes,), torch.uint8))
            except TransferError as error:
                failure = str(error)
        try:
            exchange_outcomes(("", failure), group)
        except TransferError:
            # Unmapping pages that are still registered would leave the driver with addresses that are gone.
            self.close()
            raise

    def _layer(self, layer: int) -> ExpertWeights:
        offset, tensors = self._first + layer * self._layer_bytes, list[torch.Tensor | None]()
        for shape in self._layout.shapes:
            if shape is None:
                tensors.append(None)
                continue
            tensor = self._memory.view(offset, (self._num_experts, *shape), self._layout.dtype)
            tensors.append(tensor)
            offset += aligned(tensor.nbytes)
        return ExpertWeights(*tensors)

    def _checksum(self, layer: int, expert: int) -> int:
        found = 0
        for tensor in self._experts[layer].tensors():
            found = zlib.crc32(tensor[expert].reshape(-1).view(torch.uint8).numpy(), found)
        return found


def store_bytes(layout: Layout, experts: int) -> int:
    """Host memory of a node's store: a version and a checksum per expert, and all weights."""
    return _words_bytes(layout, experts) + layout.layers * layout.bytes_of(experts, layout.dtype)


def check_store_budget(layout: Layout, experts: int, options: TransferOptions) -> None:
    """Raise if the store of a node exceeds the budget; the same on all ranks, before anything is allocated."""
    needed, budget = store_bytes(layout, experts), options.store_bytes
    if budget is not None and needed > budget:
        raise TransferError(
            f"host store: {experts} experts in {layout.layers} layers need {needed:,} bytes per node; store_bytes is "
            f"{budget:,}: raise it, or pull inside nodes only (path='peer', no cross-node replicas)"
        )


def _words_bytes(layout: Layout, experts: int) -> int:
    return aligned(2 * 8 * layout.layers * experts)


class _Pin:
    """Pages registered with the CUDA driver of this process."""

    def __init__(self, bytes_N: torch.Tensor) -> None:
        self._bytes_N: torch.Tensor | None = bytes_N
        error = int(torch.cuda.cudart().cudaHostRegister(bytes_N.data_ptr(), bytes_N.nbytes, 0))
        if error:
            self._bytes_N = None
            raise TransferError(
                f"host store: {bytes_N.nbytes:,} bytes could not be pinned (CUDA error {error}); raise the "
                "locked-memory limit with `ulimit -l unlimited`, or use path='peer'"
            )

    def close(self) -> None:
        if self._bytes_N is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._bytes_N.data_ptr())
        self._bytes_N = None
