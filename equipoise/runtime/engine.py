"""`TransferEngine`: moves experts for one EP group, window by window, and is the bank of its balanced layers.

The order of a window, the same on every rank:
1. `open_window(plan)`: check that parameters are where they were registered, publish, announce the version, pull.
2. The layers ask for `weights`, `hand_in` replica gradients and `collect_returns`, keyed by micro-step and layer.
3. `close_window()`: stop pulling, wait until all ranks of the node have, collect.

Knows windows and versions. Does not know rows, nor how a plan was made. Experts travel in `edges` (publish, collect),
`puller` (pulls) and `returns`; the words in shared memory that order them are in `watchdog`.

Invariants (asserted by the tests):
1. Nobody overwrites home weights before every rank of the node has retired the version.
2. A visit that the itinerary does not expect is served on demand, counted, and never from a wrong buffer.
3. A pull, return, publish or collect that does not finish raises on every rank within the bound, naming rank, layer,
   expert and path.
4. After `close`, also after a failure, parameters live in memory of their own and nothing shared is left.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from equipoise.core.errors import TransferError
from equipoise.core.itinerary import PATHS, Visit
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.counters import Counters
from equipoise.runtime.edges import WindowEdges
from equipoise.runtime.itinerary_walk import Walk
from equipoise.runtime.layout import TransferOptions
from equipoise.runtime.node import NodeMemory, Registration
from equipoise.runtime.paths import Path, ShmPath
from equipoise.runtime.puller import Puller
from equipoise.runtime.returns import Mailboxes
from equipoise.runtime.watchdog import RETIRED, VERSION, Transfer


class TransferEngine:
    """Publishes, pulls, returns and collects the experts of one EP group."""

    def __init__(
        self,
        homes: Sequence[ExpertWeights],
        *,
        group: Any,
        node_R: Sequence[int],
        options: TransferOptions,
        paths: Mapping[str, Path] | None = None,
    ) -> None:
        """Share memory with the node's ranks and move the parameters in. Every rank of `group` must call this.

        Args:
            homes: per layer, this rank's expert parameters [home_slots, ...]
            group: the EP group, able to move CPU tensors
            node_R: node of each rank of the group
            options: slots, depth, budget and bounds
            paths: by the plan's name for them; shared memory for all by default
        """
        self._node = NodeMemory(homes, group=group, node_R=node_R, options=options)
        shm = ShmPath(self._node)
        self._paths: dict[str, Path] = {"peer": shm, "host": shm, **(paths or {})}
        self._edges = WindowEdges(self._node)
        self._puller = Puller(self._node, self._paths)
        self._mailboxes = Mailboxes(self._node)
        self._plan: Plan | None = None
        self._walk: Walk | None = None
        self._window = self._version = 0
        self._is_suspended = False

    @property
    def counters(self) -> Counters:
        """What this rank's transfers moved so far."""
        return self._node.counters

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """Where this rank's parameters are, or must be when a stage starts."""
        return self._node.registrations

    @property
    def extra_bytes(self) -> int:
        """Bytes per rank beyond the parameters: replica buffers, mailboxes, outbox."""
        return self._node.layout.extra_bytes

    def open_window(self, plan: Plan) -> None:
        """Publish the plan's placement and start pulling. Every rank of the group must call this."""
        if self._is_suspended:
            raise TransferError("the engine is suspended; call resume() before the next window")
        walk = Walk(plan, rank=self._node.rank)
        self._check_reach(plan)
        self._node.check()
        self._edges.publish(plan)
        self._plan, self._walk = plan, walk
        self._window += 1
        self._mailboxes.open_window(self._window)
        self._start_version()

    def close_window(self, *, with_weights: bool = True) -> None:
        """End the window: gradients, and weights unless told otherwise, go to their owners. Every rank must call this.

        Args:
            with_weights: see `WindowEdges.collect`
        """
        self._open_plan()
        self._retire_version()
        self._mailboxes.check_empty()
        self._node.check()
        self._edges.collect(with_weights=with_weights)
        self._plan = self._walk = None

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`; waits until they are there."""
        self._open_plan()
        with torch.profiler.record_function("equipoise.weights"):
            return self._puller.weights(visit)

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Take the gradients of this rank's replicas and start them towards their homes."""
        with torch.profiler.record_function("equipoise.hand_in"):
            waited = self._mailboxes.hand_in(self._open_plan(), micro_step, layer, gradients)
        self.counters.wait("shm", waited)

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Wait for what replicas of this rank's home experts returned and add it, in place, in ascending rank order."""
        with torch.profiler.record_function("equipoise.collect_returns"):
            waited = self._mailboxes.collect(self._open_plan(), micro_step, layer, gradients)
        self.counters.wait("shm", waited)

    def suspend(self) -> None:
        """Stop all transfers, so that parameters may be moved or freed. Every rank of the node must call this."""
        if not self._is_suspended:
            self._retire_version()
        self._is_suspended = True

    def resume(self) -> None:
        """Register the parameters where they are now, and go on. Every rank of the node must call this."""
        if not self._is_suspended:
            return
        self._node.adopt(version=self._version + 1)
        self._is_suspended = False
        if self._walk is not None:
            self._walk.forget()
            self._start_version()

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Hold all weights at their owners, for whatever reads or writes them from outside. Every rank must enter."""
        self.suspend()
        try:
            with self._edges.canonical():
                yield
        finally:
            self.resume()

    def close(self) -> None:
        """Free everything; parameters get memory of their own. Closing twice is allowed."""
        self._puller.close()
        self._plan = self._walk = None
        self._paths = {}
        self._node.close()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_version(self) -> None:
        """Announce that this rank's homes are ready and let the puller run."""
        assert self._walk is not None, "a version starts with a walk"
        self._version += 1
        self._node.words[self._node.rank][VERSION] = self._version
        self._puller.resume(self._walk, version=self._version)

    def _retire_version(self) -> None:
        """Stop pulling, and wait until every rank of the node has stopped: from here on weights may be overwritten."""
        self._puller.pause()
        self._node.fence(RETIRED, self._version, Transfer("fence"))

    def _open_plan(self) -> Plan:
        if self._plan is None:
            raise TransferError("no window is open; call open_window(plan) first")
        return self._plan

    def _check_reach(self, plan: Plan) -> None:
        """Refuse a plan whose pulls or slots this engine cannot serve."""
        layout, table, me = self._node.layout, plan.replica_table, self._node.rank
        depth = plan.itinerary.depth if plan.itinerary is not None else 0
        if plan.slots > layout.slots or depth > layout.depth:
            raise TransferError(
                f"the plan uses {plan.slots} slots at depth {depth}; buffers are there for {layout.slots} at depth "
                f"{layout.depth}: open the engine with more or plan with less"
            )
        layer_P = table.entry_P % layout.layers
        home_P = plan.home_LE[layer_P, table.expert_P]
        for p in (table.rank_P == me).nonzero()[0].tolist():
            expert, layer, home = int(table.expert_P[p]), int(layer_P[p]), int(home_P[p])
            if not all(self._paths[PATHS[i]].reaches(home) for i in table.path_P2[p]):
                raise TransferError(
                    f"rank {me}: the replica of expert {expert} in layer index {layer} has its home on rank {home}, in "
                    "another node, where no path reaches; plan without cross-node replicas"
                )
