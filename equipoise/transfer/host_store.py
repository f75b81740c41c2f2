"""`HostStore`: all experts of a model in memory of one node's machine, in canonical order, each with its version.

    HostStore   the memory: the host path pulls from it, and once completed it is the one source for weight sync, export
                and checkpoints
    Refresher   a thread that writes home weights to the store, the first to be pulled first
    Crossing    experts of other nodes that a window pulls, sent to the store of the node that needs them

One piece of shared memory per node: per (layer, expert) a version and a checksum, then per layer [E, ...] tensors.
Where experts are on a CUDA device the pages are registered with the driver in every process, so that copies run at the
full rate of the link beside the layers.
A version is set after the weights it belongs to, and is 0 while they are written.
"""

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.core.options import TransferOptions, aligned
from equipoise.core.plan import PATHS, PHASES, Plan, Visit
from equipoise.transfer.cuda_pages import Pin
from equipoise.transfer.node import ExpertLayout, ExpertWeights, NodeMemory, copy_expert, view_experts
from equipoise.transfer.pages import share_memory
from equipoise.transfer.waits import (
    REACHED,
    Lane,
    Mark,
    Message,
    Transfer,
    all_or_none,
    gather_objects,
)

_FIX = (
    "the host store holds all experts of the model: raise the container's memory limit, or pull inside nodes only "
    "(path='peer', no cross-node replicas)"
)


class HostStore:
    """One process's view of its node's store."""

    def __init__(
        self,
        layout: ExpertLayout,
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
        self._is_checked, self._device = is_checked, layout.device
        num_bytes = store_bytes(layout, experts)
        memory = share_memory(num_bytes, group=group, node_R=node_R, timeout_s=timeout_s, fix=_FIX)
        self._memory, layers = memory, range(layout.layers)
        cells = memory.view(0, (2, layout.layers, experts), torch.int64).numpy()
        self._version_LE, self._checksum_LE = cells[0], cells[1]
        first, layer_bytes = _cell_bytes(layout, experts), layout.bytes_of(experts, layout.dtype)
        starts = [first + layer * layer_bytes for layer in layers]
        self._experts = [view_experts(layout, memory.view, start, experts, layout.dtype) for start in starts]
        self._pin: Pin | None = None

        def pin() -> None:
            if layout.device.type == "cuda":
                self._pin = Pin(
                    memory.view(0, (num_bytes,), torch.uint8), name="host store", fix=", or use path='peer'"
                )

        try:
            all_or_none(pin, partial(gather_objects, group=group))
        except TransferError:
            # Unmapping pages that are still registered would leave the driver with addresses that are gone.
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Memory of the node that the store takes."""
        return self._memory.num_bytes

    def experts(self, layer: int) -> ExpertWeights:
        """[E, ...] weights of a layer in canonical order; `version` says which of them are complete."""
        return self._experts[layer]

    def version(self, layer: int, expert: int) -> int:
        """The version of an expert's weights that lies here; 0: none."""
        return int(self._version_LE[layer, expert])

    def withdraw(self, layer: int, expert: int) -> None:
        """Mark an expert's weights as being written: until they are announced, none lie here."""
        self._version_LE[layer, expert] = 0

    def announce(self, layer: int, expert: int, version: int) -> None:
        """Mark an expert's weights of a version as written completely."""
        if self._is_checked:
            self._checksum_LE[layer, expert] = self._checksum(layer, expert)
        self._version_LE[layer, expert] = version

    def announce_behind(self, layer: int, expert: int, version: int) -> None:
        """Announce an expert once the current stream has written it; in checked mode, wait for that."""
        if self._pin is not None and not self._is_checked:
            self._pin.write(self._version_LE[layer, expert : expert + 1], version)
            return
        Mark.now(self._device).block()
        self.announce(layer, expert, version)

    def check(self, layer: int, expert: int) -> None:
        """In checked mode, raise if an expert's bytes are not those that were announced."""
        if self._is_checked and (found := self._checksum(layer, expert)) != self._checksum_LE[layer, expert]:
            raise TransferError(
                f"host store: expert {expert} in layer index {layer} has checksum {found:#010x}, written with "
                f"{int(self._checksum_LE[layer, expert]):#010x}; its memory was overwritten or is faulty: end this "
                "step and load the last checkpoint"
            )

    def close(self) -> None:
        """Let go of the memory; tensors made of it keep theirs, unpinned. Closing twice is allowed."""
        if self._pin is not None:
            self._pin.close()
        self._pin, self._experts = None, []
        # Not a slice of the cells: that would keep the memory mapped.
        self._version_LE = self._checksum_LE = np.zeros((0, 0), dtype=np.int64)
        self._memory.close()

    def _checksum(self, layer: int, expert: int) -> int:
        found = 0
        for tensor in self._experts[layer].tensors():
            found = zlib.crc32(tensor[expert].reshape(-1).view(torch.uint8).numpy(), found)
        return found


def store_bytes(layout: ExpertLayout, experts: int) -> int:
    """Host memory of a node's store: a version and a checksum per expert, and all weights."""
    return _cell_bytes(layout, experts) + layout.layers * layout.bytes_of(experts, layout.dtype)


def check_store_budget(layout: ExpertLayout, experts: int, options: TransferOptions) -> None:
    """Raise if the store of a node exceeds the budget; the same on all ranks, before anything is allocated."""
    needed, budget = store_bytes(layout, experts), options.store_bytes
    if budget is not None and needed > budget:
        raise TransferError(
            f"host store: {experts} experts in {layout.layers} layers need {needed:,} bytes per node; store_bytes is "
            f"{budget:,}: raise it, or pull inside nodes only (path='peer', no cross-node replicas)"
        )


def _cell_bytes(layout: ExpertLayout, experts: int) -> int:
    return aligned(2 * 8 * layout.layers * experts)


class StoreEntry(NamedTuple):
    """An expert to be written to the store, and the slot where it lies."""

    layer: int
    expert: int
    slot: int


def first_uses(plan: Plan, *, rank: int, pullers: Collection[int], paths: Collection[str]) -> list[StoreEntry]:
    """Experts of `rank` that `pullers` pull by one of `paths`, in the order in which the plan first does."""
    table, layers = plan.replica_table, plan.home_LE.shape[0]
    itinerary = plan.itinerary
    assert itinerary is not None, "an executed plan has an itinerary"
    at = {visit: i for i, visit in enumerate(itinerary.visits())}
    first: dict[tuple[int, int], int] = {}
    for p in range(len(table)):
        micro_step, layer = divmod(int(table.entry_P[p]), layers)
        expert = int(table.expert_P[p])
        if plan.home_LE[layer, expert] != rank or int(table.rank_P[p]) not in pullers:
            continue
        for phase, path in zip(PHASES, table.path_P2[p], strict=True):
            # A visit that the itinerary does not expect may still happen: last of all.
            when = at.get(Visit(micro_step, phase, layer), len(at))
            if PATHS[int(path)] in paths:
                first[layer, expert] = min(when, first.get((layer, expert), when))
    order = sorted(first, key=lambda key: (first[key], key))
    return [StoreEntry(layer, expert, int(plan.home_slot_LE[layer, expert])) for layer, expert in order]


class Refresher:
    """A thread that writes this rank's homes to the store of its node.

    After a version begins, each home writes only those experts that the plan pulls by the host path, in the order in
    which the itinerary first uses them. On a device the copies run in a lane of their own, and an expert is announced
    once its copy is finished.
    """

    def __init__(self, node: NodeMemory, store: HostStore) -> None:
        """Start the thread, with nothing to do."""
        self._node, self._store = node, store
        self._lane, self._written = Lane(node.device), REACHED
        self._failure: TransferError | None = None
        self._changed = threading.Condition()
        self._todo: list[StoreEntry] = []
        self._writing: StoreEntry | None = None
        self._open: set[int] = set()
        self._version, self._begin = 0, REACHED
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="equipoise-refresher", daemon=True)
        self._thread.start()

    def start(self, entries: Iterable[StoreEntry], *, version: int, layers: Iterable[int]) -> None:
        """Write these experts, in this order, as weights of `version`; returns at once.

        Args:
            layers: those whose homes hold their weights; others follow with `open_layer`
        """
        with self._changed:
            self._todo, self._version, self._open = list(entries), version, set(layers)
            self._begin = Mark.now(self._node.device)
            self._changed.notify_all()

    def open_layer(self, layer: int) -> None:
        """Write experts of a layer from now on: its homes hold their weights."""
        with self._changed:
            self._open.add(layer)
            self._changed.notify_all()

    def close_layer(self, layer: int) -> None:
        """Write no more of a layer, and wait until what has begun is written, on the device too."""
        with self._changed:
            self._open.discard(layer)
            self._wait(lambda: self._writing is None or self._writing.layer != layer)
            with self._lane.work():
                written = Mark.now(self._node.device)
            self._wait(written.is_reached)

    def pause(self) -> None:
        """Drop what is left, and wait until what has begun is written and announced."""
        with self._changed:
            self._todo.clear()
            self._wait(self._is_idle)

    def finish(self) -> None:
        """Wait until everything given, of layers that are open, is written and announced."""
        with self._changed:
            self._wait(lambda: self._next() is None and self._is_idle())

    def complete(self, *, version: int) -> None:
        """Write all experts of the model, those of other nodes too. Every rank must call this, between windows."""
        node, owned = self._node, self._node.layout.home_slots
        layers = range(node.layout.layers)
        entries = (StoreEntry(layer, node.rank * owned + slot, slot) for layer in layers for slot in range(owned))
        self.start(entries, version=version, layers=layers)
        self.finish()
        transfer = Transfer("refresh", path="host")
        node.agreement.largest([0], transfer)
        if node.layout.nodes > 1:
            for layer in layers:
                owners = owner_crossings(layer, node.node_R, home_slots=owned)
                send_crossings(node, self._store, owners, version=version)
            node.agreement.largest([0], transfer)

    def close(self) -> None:
        """End the thread. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._todo.clear()
            self._changed.notify_all()
        self._thread.join(1.0)

    def _is_idle(self) -> bool:
        return self._writing is None and self._written.is_reached()

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        transfer = Transfer("refresh", path="host")
        self._node.watchdog.wait(is_ready, transfer, pause=self._changed.wait)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while (item := self._take()) is not None:
            entry, version, begin = item
            try:
                self._write(entry, version, begin)
            except RuntimeError as error:
                transfer = Transfer("refresh", entry.layer, entry.expert, "host")
                self._failure = self._node.watchdog.abort(f"{transfer} failed: {error}")
            with self._changed:
                self._writing = None
                self._changed.notify_all()

    def _take(self) -> tuple[StoreEntry, int, Mark] | None:
        """Wait for the next expert whose layer is open; None once closed."""
        with self._changed:
            while not self._is_closed:
                self._writing = self._next()
                if self._writing is not None:
                    self._todo.remove(self._writing)
                    return self._writing, self._version, self._begin
                self._changed.wait()
        return None

    def _next(self) -> StoreEntry | None:
        return next((entry for entry in self._todo if entry.layer in self._open), None)

    def _write(self, entry: StoreEntry, version: int, begin: Mark) -> None:
        home, rows = self._node.home[self._node.rank][entry.layer], self._store.experts(entry.layer)
        self._store.withdraw(entry.layer, entry.expert)
        with self._lane.work(after=begin):
            copied = copy_expert(rows, entry.expert, home, entry.slot)
            self._store.announce_behind(entry.layer, entry.expert, version)
            self._written = Mark.now(self._node.device)
        self._node.counters.refresh(copied)


class Crossing(NamedTuple):
    """An expert that a node needs from another.

    A replica may be in another node than its expert's home (`Plan.cross_node`); its gradient returns (`returns`). It is
    pulled from the host store of its own node. So once a layer's homes hold a version, each needed expert is sent
    once per node, from its home to a rank of the node, which writes it to the store. The ranks of a node take turns, so
    that all of its links are used.
    """

    layer: int
    expert: int
    source: int
    """Home rank."""
    source_slot: int
    target: int
    """The rank of the node that needs it whose turn it is."""


def crossings(plan: Plan) -> list[Crossing]:
    """What every node needs from others under this plan, in layer order; the same on all ranks."""
    layer_P, expert_P, is_across_P = _across_nodes(plan)
    node_R = np.array(plan.cluster.node_R)
    node_P = node_R[plan.replica_table.rank_P]
    needed = np.unique(np.stack([layer_P, expert_P, node_P], axis=1)[is_across_P], axis=0).tolist()
    turns = {layer: _turns(plan.cluster.node_R) for layer, _, _ in needed}
    return [
        Crossing(
            layer,
            expert,
            int(plan.home_LE[layer, expert]),
            int(plan.home_slot_LE[layer, expert]),
            next(turns[layer][node]),
        )
        for layer, expert, node in needed
    ]


def owner_crossings(layer: int, node_R: Sequence[int], *, home_slots: int) -> list[Crossing]:
    """Every expert of a layer, from its owner to every other node; the same on all ranks."""
    turns = _turns(node_R)
    return [
        Crossing(layer, expert, *divmod(expert, home_slots), next(turns[node]))
        for expert in range(len(node_R) * home_slots)
        for node in turns
        if node != node_R[expert // home_slots]
    ]


def _turns(node_R: Sequence[int]) -> dict[int, Iterator[int]]:
    """By node: its ranks, again and again."""
    return {node: cycle([rank for rank, of in enumerate(node_R) if of == node]) for node in dict.fromkeys(node_R)}


def crossings_by_layer(plan: Plan) -> dict[int, list[Crossing]]:
    """The same, layer by layer."""
    return {layer: list(found) for layer, found in groupby(crossings(plan), key=lambda crossing: crossing.layer)}


def send_crossings(node: NodeMemory, store: HostStore, needed: Sequence[Crossing], *, version: int) -> None:
    """Send experts of one layer to the stores of other nodes. Every rank of the group must call this.

    Args:
        version: of their weights
    """
    landing = node.landings[node.layout.dtype]
    for crossing in needed:
        if crossing.target == node.rank:
            store.withdraw(crossing.layer, crossing.expert)
    for together in _by_boxes(needed, boxes=node.layout.boxes):
        messages: list[Message] = []
        transfers: list[Transfer] = []
        # Both sides go through the crossings in the same order.
        for box, (layer, expert, source, source_slot, target) in together:
            if node.rank not in (source, target):
                continue
            is_leaving = source == node.rank
            peer = target if is_leaving else source
            experts, slot = (node.home[node.rank][layer], source_slot) if is_leaving else (landing, box)
            messages += node.messages(experts, slot, peer=peer, is_leaving=is_leaving)
            name = Transfer("refresh", layer, expert, "p2p", peer)
            transfers += [name] * (len(messages) - len(transfers))
        if messages:
            node.exchange(messages, transfers)
        arrived = [(box, crossing) for box, crossing in together if crossing.target == node.rank]
        for box, (layer, expert, *_) in arrived:
            node.counters.arrive("p2p", copy_expert(store.experts(layer), expert, landing, box))
        node.synchronize(Transfer("refresh", path="host"))
        for _, (layer, expert, *_) in arrived:
            store.announce(layer, expert, version)


def _by_boxes(needed: Sequence[Crossing], *, boxes: int) -> list[list[tuple[int, Crossing]]]:
    """Divide crossings so that each target has a box for every one that arrives; the same on all ranks."""
    divided: list[list[tuple[int, Crossing]]] = []
    arriving: Counter[int] = Counter()
    for crossing in needed:
        if not divided or arriving[crossing.target] == boxes:
            divided.append([])
            arriving.clear()
        divided[-1].append((arriving[crossing.target], crossing))
        arriving[crossing.target] += 1
    return divided


def check_crossings(plan: Plan, *, rank: int, host_paths: Collection[str]) -> None:
    """Refuse replicas of this rank that cannot be pulled from another node.

    Args:
        host_paths: the plan's names of paths that lead to the host store
    """
    layer_P, expert_P, is_across_P = _across_nodes(plan)
    for p in np.flatnonzero(is_across_P & (plan.replica_table.rank_P == rank)).tolist():
        expert, layer = int(expert_P[p]), int(layer_P[p])
        replica = (
            f"the replica of expert {expert} in layer index {layer} has its home on rank "
            f"{int(plan.home_LE[layer, expert])}, in another node"
        )
        path = PATHS[int(plan.replica_table.path_P2[p, 0])]
        if path not in host_paths:
            raise TransferError(
                f"{replica}, where path {path!r} does not reach; only the host store does: plan the pull by 'host', "
                "and do not force path='peer'"
            )


def _across_nodes(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[P] layer and expert of every replica, and whether it is in another node than its home."""
    table, node_R = plan.replica_table, np.array(plan.cluster.node_R)
    layer_P = table.entry_P % plan.home_LE.shape[0]
    home_P = plan.home_LE[layer_P, table.expert_P]
    return layer_P, table.expert_P, node_R[home_P] != node_R[table.rank_P]
