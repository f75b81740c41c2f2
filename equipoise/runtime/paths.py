"""Paths that bring experts' weights from their homes to replica slots of this rank.

A path is chosen by the plan for each pull (`core.itinerary.Path`), or forced (`TransferOptions.path`).

    MappedPath   home weights of the node's ranks, mapped: `peer` on CUDA devices, `shm` on the CPU
    HostPath     the node's host store (`host_store`), pinned where there is a device: `host`

To add one: implement `Path`, and give it to the engine under the plan's name for it. A path copies and nothing else:
it says when the weights of a version are there, and who waits for them is the puller's business.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from equipoise.core import itinerary
from equipoise.core.itinerary import PHASES, Phase
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.copies import Copier, make_copier
from equipoise.runtime.host_store import HostStore
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.relocate import copies_of, copy_all, copy_expert
from equipoise.runtime.watchdog import VERSION


class Need(NamedTuple):
    """A replica that this rank holds at a visit, and where its weights come from."""

    layer: int
    expert: int
    source: int
    """Home rank."""
    source_slot: int
    path: itinerary.Path


class Path(Protocol):
    """One way for weights to come to this rank."""

    @property
    def name(self) -> str:
        """What counters and errors call it."""
        ...

    def is_ready(self, need: Need, version: int) -> bool:
        """Whether the needed weights of this version, or of a later one, can be copied now."""
        ...

    def pull(self, needs: Mapping[int, Need], buffer: ExpertWeights) -> int:
        """Copy needed weights into slots of a buffer, on the current stream, and return the bytes.

        Args:
            needs: by slot; all of them ready
        """
        ...


class MappedPath:
    """Copies from the mapped home weights of a rank of the same node."""

    name = "shm"

    def __init__(self, node: NodeMemory, copier: Copier | None = None) -> None:
        """
        Args:
            copier: how copies are made, if not as the node's options say
        """
        self._node, self.name = node, node.direct_path
        homes = (node.home(rank, 0).gate_up_SFD for rank in node.peers)
        self._copier = copier or make_copier(node.device, node.options.copies, sources=homes)

    def is_ready(self, need: Need, version: int) -> bool:
        """Whether the home has announced the version."""
        return bool(self._node.words[need.source][VERSION] >= version)

    def pull(self, needs: Mapping[int, Need], buffer: ExpertWeights) -> int:
        """Copy all experts in one go."""
        pairs = ((slot, need, self._node.home(need.source, need.layer)) for slot, need in needs.items())
        copies = [copy for slot, need, home in pairs for copy in copies_of(buffer, slot, home, need.source_slot)]
        return copy_all(copies, self._copier)


class HostPath:
    """Copies from the node's host store."""

    name = "host"

    def __init__(self, store: HostStore) -> None:
        self._store = store

    def is_ready(self, need: Need, version: int) -> bool:
        """Whether the store holds the expert's weights of the version."""
        return self._store.version(need.layer, need.expert) >= version

    def pull(self, needs: Mapping[int, Need], buffer: ExpertWeights) -> int:
        """Copy expert by expert, which fills the link; in checked mode compare each one's checksum before."""
        copied = 0
        for slot, need in needs.items():
            self._store.check(need.layer, need.expert)
            copied += copy_expert(buffer, slot, self._store.experts(need.layer), need.expert)
        return copied


def needs_of(plan: Plan, micro_step: int, layer: int, *, rank: int, phase: Phase = "forward") -> tuple[Need, ...]:
    """Replicas of `rank` in one micro-step of one layer, in slot order, whether or not they are still resident."""
    table, at = plan.replica_table, micro_step * plan.home_LE.shape[0] + layer
    entries = range(int(table.start_ML[at]), int(table.start_ML[at + 1]))
    return tuple(
        Need(
            layer,
            int(table.expert_P[p]),
            int(plan.home_LE[layer, table.expert_P[p]]),
            int(plan.home_slot_LE[layer, table.expert_P[p]]),
            itinerary.PATHS[int(table.path_P2[p, PHASES.index(phase)])],
        )
        for p in entries
        if table.rank_P[p] == rank
    )
