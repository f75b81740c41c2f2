"""`Refresher`: a thread that writes home weights to the host store, the first to be pulled first.

After a version begins, only those experts are written that the plan pulls by the host path, each by its home, in the
order in which the itinerary first uses them. On a device the copies run in a lane of their own, and an expert is
announced once its copy is finished.

Knows the store and the plan's pulls. Does not know who waits for them.

Invariants (asserted by the tests):
1. Exactly the experts that the plan pulls by the host path and that have their home here are written, in that order.
2. After `pause` nothing is written or announced, and nothing will be before the next `start`. Nothing of a layer is
   before `open_layer`, nor after `close_layer`.
3. A write that fails ends the step on all ranks, by name.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import NamedTuple

from equipoise.core.itinerary import PATHS, PHASES, Visit
from equipoise.core.plan import Plan
from equipoise.runtime.connection import Message
from equipoise.runtime.host_store import HostStore
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.relocate import copy_expert
from equipoise.runtime.streams import REACHED, Announcer, Lane, Mark
from equipoise.runtime.watchdog import Transfer


class Entry(NamedTuple):
    """An expert to be written to the store, and the slot where it lies."""

    layer: int
    expert: int
    slot: int


def first_uses(plan: Plan, *, rank: int, pullers: Collection[int], paths: Collection[str]) -> list[Entry]:
    """Experts of `rank` that `pullers` pull by one of `paths`, in the order in which the plan first does."""
    table, layers = plan.replica_table, plan.home_LE.shape[0]
    itinerary = plan.itinerary
    assert itinerary is not None, "an executed plan has an itinerary"
    at = {itinerary.visit(i): i for i in range(len(itinerary))}
    first: dict[tuple[int, int], int] = {}
    for p in range(len(table)):
        micro_step, layer = divmod(int(table.entry_P[p]), layers)
        expert = int(table.expert_P[p])
        if plan.home_LE[layer, expert] != rank or int(table.rank_P[p]) not in pullers:
            continue
        for phase, path in zip(PHASES, table.path_P2[p], strict=True):
            # A visit that the itinerary does not expect may come all the same: last of all.
            when = at.get(Visit(micro_step, phase, layer), len(at))
            if PATHS[int(path)] in paths:
                first[layer, expert] = min(when, first.get((layer, expert), when))
    order = sorted(first, key=lambda key: (first[key], key))
    return [Entry(layer, expert, int(plan.home_slot_LE[layer, expert])) for layer, expert in order]


class Refresher:
    """Writes this rank's homes to the store of its node."""

    def __init__(self, node: NodeMemory, store: HostStore) -> None:
        """Start the thread, with nothing to do."""
        self._node, self._store = node, store
        self._lane, self._announcer = Lane(node.device), Announcer(node.device)
        self._changed = threading.Condition()
        self._todo: list[Entry] = []
        self._writing: Entry | None = None
        self._open: set[int] = set()
        self._version, self._begin = 0, REACHED
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="equipoise-refresher", daemon=True)
        self._thread.start()

    def start(self, entries: Iterable[Entry], *, version: int, layers: Iterable[int]) -> None:
        """Write these experts, in this order, as weights of `version`; returns at once.

        Args:
            layers: those whose home weights are there; others are written once they are
        """
        with self._changed:
            self._todo, self._version, self._open = list(entries), version, set(layers)
            self._begin = Mark.now(self._node.device)
            self._changed.notify_all()

    def open_layer(self, layer: int) -> None:
        """Write experts of a layer from now on: their weights are there."""
        with self._changed:
            self._open.add(layer)
            self._changed.notify_all()

    def close_layer(self, layer: int) -> None:
        """Leave what is left of a layer, and wait until what has begun is written, on the device too."""
        with self._changed:
            self._open.discard(layer)
            self._wait(lambda: self._writing is None or self._writing.layer != layer)
            self._wait(self._lane.mark().is_reached)

    def pause(self) -> None:
        """Drop what is left, and wait until what has begun is written and announced."""
        with self._changed:
            self._todo.clear()
            self._wait(self._is_settled)

    def finish(self) -> None:
        """Wait until everything given, of layers that are open, is written and announced."""
        with self._changed:
            self._wait(lambda: self._next() is None and self._is_settled())

    def complete(self, *, version: int) -> None:
        """Write all experts of the model, those of other nodes too. Every rank must call this, between windows."""
        node, owned = self._node, self._node.layout.home_slots
        layers = range(node.layout.layers)
        entries = (Entry(layer, node.rank * owned + slot, slot) for layer in layers for slot in range(owned))
        self.start(entries, version=version, layers=layers)
        self.finish()
        transfer = Transfer("refresh", path="host")
        node.agree([0], transfer)
        if len(set(node.node_R)) > 1:
            for layer in layers:
                self._cross(layer, version)
            node.agree([0], transfer)

    def close(self) -> None:
        """End the thread. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._todo.clear()
            self._changed.notify_all()
        self._thread.join(1.0)
        self._announcer.close()

    def _cross(self, layer: int, version: int) -> None:
        """Send what this rank owns to the first rank of every other node; if this is one, write what comes."""
        node, rows = self._node, self._store.experts(layer)
        first = {name: node.node_R.index(name) for name in dict.fromkeys(node.node_R)}
        is_first = first[node.node_R[node.rank]] == node.rank
        away = [rank for rank in range(len(node.node_R)) if rank not in node.peers]
        pairs = [(True, node.rank, first[name]) for name in first if first[name] not in node.peers]
        pairs += [(False, rank, rank) for rank in away] if is_first else []
        messages = [
            Message(tensor[self._owned(owner)], peer, is_leaving)
            for is_leaving, owner, peer in pairs
            for tensor in rows.tensors()
        ]
        coming = (
            [e for rank in away for e in range(self._owned(rank).start, self._owned(rank).stop)] if is_first else []
        )
        for expert in coming:
            self._store.withdraw(layer, expert)
        if messages:
            node.finish(messages, [Transfer("refresh", layer, path="p2p")] * len(messages))
        for expert in coming:
            self._store.announce(layer, expert, version)

    def _owned(self, rank: int) -> slice:
        """Experts that a rank owns."""
        count = self._node.layout.home_slots
        return slice(rank * count, (rank + 1) * count)

    def _is_settled(self) -> bool:
        return self._writing is None and self._announcer.is_done()

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        transfer = Transfer("refresh", path="host")
        self._node.watchdog.wait(is_ready, transfer, pause=self._changed.wait)
        if self._announcer.failure is not None:
            raise self._node.watchdog.abort(f"{transfer} failed: {self._announcer.failure}")

    def _run(self) -> None:
        while (item := self._take()) is not None:
            entry, version, begin = item
            try:
                self._write(entry, version, begin)
            except RuntimeError as error:
                words = Transfer("refresh", entry.layer, entry.expert, "host")
                self._announcer.failure = self._node.watchdog.abort(f"{words} failed: {error}")
            with self._changed:
                self._writing = None
                self._changed.notify_all()

    def _take(self) -> tuple[Entry, int, Mark] | None:
        """Wait for the next expert whose layer is open; None once closed."""
        with self._changed:
            while not self._is_closed:
                self._writing = self._next()
                if self._writing is not None:
                    self._todo.remove(self._writing)
                    return self._writing, self._version, self._begin
                self._changed.wait()
        return None

    def _next(self) -> Entry | None:
        return next((entry for entry in self._todo if entry.layer in self._open), None)

    def _write(self, entry: Entry, version: int, begin: Mark) -> None:
        home, rows = self._node.home(self._node.rank, entry.layer), self._store.experts(entry.layer)
        self._store.withdraw(entry.layer, entry.expert)
        with self._lane.work(after=begin):
            copied = copy_expert(rows, entry.expert, home, entry.slot)
        self._node.counters.refresh(copied)
        say = partial(self._store.announce, entry.layer, entry.expert, version)
        self._announcer.after(self._lane.mark(), say)
