"""`TransferEngine`: moves experts for one EP group, window by window, and is the bank of its balanced layers.

The order of a window, the same on every rank:
1. `open_window(plan)`: check that parameters are where they were registered, announce the version, start publishing and
   pulling.
2. The layers wait for their homes (`await_home`), ask for `weights`, `hand_in` replica gradients and `collect_returns`,
   keyed by micro-step and layer. A layer whose last turn is over is collected.
3. `close_window()`: stop pulling, wait until all ranks of the node have, collect what is left.

Knows windows and versions. Does not know rows, nor how a plan was made. Experts travel in `passage` (publish, collect),
`puller` (pulls), `refresher` (to the host store) and `returns`; the words in shared memory that order them are in
`watchdog`, the points in a device's work in `streams`.

Invariants (asserted by the tests):
1. Nobody overwrites home weights before every rank of the node has retired the version, or is through with the layer.
2. A visit that the itinerary does not expect is served on demand, counted, and never from a wrong buffer.
3. A pull, return, publish or collect that does not finish raises on every rank within the bound, naming rank, layer,
   expert and path.
4. After `close`, also after a failure, parameters live in memory of their own and nothing shared is left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.core.itinerary import PATHS, Visit
from equipoise.core.plan import Plan
from equipoise.runtime.bank import ExpertWeights
from equipoise.runtime.counters import Counters
from equipoise.runtime.crossing import Crossing, bring_far, check_far, crossings_by_layer
from equipoise.runtime.edges import GradientOf, WindowEdges
from equipoise.runtime.host_store import HostStore, check_store_budget
from equipoise.runtime.itinerary_walk import Walk
from equipoise.runtime.layout import TransferOptions
from equipoise.runtime.node import NodeMemory, Registration
from equipoise.runtime.passage import Passage
from equipoise.runtime.paths import HostPath, MappedPath, Path
from equipoise.runtime.puller import Puller
from equipoise.runtime.refresher import Entry, Refresher, first_uses
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
        gradient_of: GradientOf | None = None,
    ) -> None:
        """Share memory with the node's ranks and move the parameters in. Every rank of `group` must call this.

        Args:
            homes: per layer, this rank's expert parameters [home_slots, ...]
            group: the EP group, able to move CPU tensors
            node_R: node of each rank of the group
            options: slots, depth, budget and bounds
            paths: by the plan's name for them, instead of the ones that `options` ask for
            gradient_of: where a parameter's accumulated gradient lies, if not in its `grad`
        """
        self._node = NodeMemory(homes, group=group, node_R=node_R, options=options)
        self._paths: dict[str, Path] = {"peer": MappedPath(self._node), **(paths or {})}
        if options.path == "peer":
            self._paths = dict.fromkeys(PATHS, self._paths["peer"])
        self._store: HostStore | None = None
        self._refresher: Refresher | None = None
        self._puller = Puller(self._node, self._paths)
        self._edges = WindowEdges(self._node, gradient_of=gradient_of)
        self._passage = Passage(self._node, self._edges, arrived=self._let_in, leaving=self._see_off)
        self._far: dict[int, list[Crossing]] = {}
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

    def open_window(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Start publishing the plan's placement, and pulling. Every rank of the group must call this.

        Args:
            with_weights: whether weights go back to their owners when the window ends; see `WindowEdges.begin`
        """
        self._check_running()
        walk = Walk(plan, rank=self._node.rank)
        self._agreed(lambda: self._check_open(plan), Transfer("publish", path="p2p"))
        if self._needs_store(plan):
            self._open_store()
        self._passage.begin(plan, with_weights=with_weights)
        self._plan, self._walk = plan, walk
        self._window += 1
        self._mailboxes.open_window(self._window)
        self._start_version(layers=())
        self._passage.publish()

    def close_window(self) -> None:
        """End the window: gradients and weights go to their owners. Every rank of the group must call this."""
        self._open_plan()
        self._passage.drain()
        self._retire_version()
        self._mailboxes.check_empty()
        self._agreed(self._check_close, Transfer("collect", path="p2p"))
        self._passage.close()
        self._plan = self._walk = None

    def await_home(self, visit: Visit) -> None:
        """Wait until the home weights of a visit's layer are there."""
        self._open_plan()
        self._check_running()
        self._passage.arrive(visit)

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`; waits until they are there."""
        self.await_home(visit)
        with torch.profiler.record_function("equipoise.weights"):
            return self._puller.weights(visit)

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home and replica weights at `visit` in one tensor each; None without an arena."""
        self.await_home(visit)
        with torch.profiler.record_function("equipoise.weights"):
            return self._puller.joined(visit)

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Take the gradients of this rank's replicas and start them towards their homes."""
        plan = self._open_plan()
        self._passage.come_to(Visit(micro_step, "backward", layer))
        with torch.profiler.record_function("equipoise.hand_in"):
            waited = self._mailboxes.hand_in(plan, micro_step, layer, gradients)
        self._count_wait(waited)

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Wait for what replicas of this rank's home experts returned and add it, in place, in ascending rank order."""
        plan = self._open_plan()
        self._passage.come_to(Visit(micro_step, "backward", layer))
        with torch.profiler.record_function("equipoise.collect_returns"):
            waited = self._mailboxes.collect(plan, micro_step, layer, gradients)
        self._count_wait(waited)
        self._passage.returned(micro_step, layer)

    def complete_store(self) -> HostStore:
        """Bring every expert of the model to this node's host store. Every rank must call this, between windows.

        Returns: the store, complete: the source for weight sync, export and checkpoints until the next window opens
        """
        if self._plan is not None:
            raise TransferError("a window is open; close it before the host store is completed")
        self._check_running()
        self._agreed(self._check_store, Transfer("refresh", path="host"))
        self._open_store()
        assert self._store is not None and self._refresher is not None, "opened above"
        self._version += 1
        self._refresher.complete(version=self._version)
        return self._store

    def suspend(self) -> None:
        """Stop all transfers, so that parameters may be moved or freed. Every rank of the group must call this."""
        if not self._is_suspended:
            self._passage.drain()
            self._retire_version()
        self._is_suspended = True

    def resume(self) -> None:
        """Register the parameters where they are now, and go on. Every rank of the group must call this."""
        if not self._is_suspended:
            return
        self._node.adopt(version=self._version + 1)
        self._is_suspended = False
        if self._walk is not None:
            self._walk.forget()
            self._start_version(layers=self._passage.layers_home)

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
        self._passage.shut()
        self._puller.close()
        self._mailboxes.close()
        if self._refresher is not None:
            self._refresher.close()
        self._plan = self._walk = None
        self._paths = {}
        self._node.close()
        if self._store is not None:
            self._store.close()
        self._store = self._refresher = None

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_version(self, *, layers: Sequence[int]) -> None:
        """Announce a version of this rank's homes, refresh what will be pulled from the store, let the puller run.

        Args:
            layers: those whose homes hold their weights already; the others come by `_let_in`
        """
        assert self._walk is not None and self._plan is not None, "a version starts with a plan"
        self._version += 1
        self._node.settle(Transfer("fence", path=self._node.direct_path))
        self._node.words[self._node.rank][VERSION] = self._version
        self._far = {} if self._store is None else crossings_by_layer(self._plan)
        if self._refresher is not None:
            self._refresher.start(self._refreshed(self._plan), version=self._version, layers=())
        self._puller.resume(self._walk, version=self._version)
        for layer in layers:
            self._let_in(layer)

    def _let_in(self, layer: int) -> None:
        """Let others read a layer's home weights, which are there on all ranks of the node."""
        if self._store is not None and self._refresher is not None:
            # Once per version: what has crossed stays in the store.
            bring_far(self._node, self._store, self._far.pop(layer, ()), version=self._version)
            self._refresher.open_layer(layer)
        self._puller.open_layer(layer)

    def _see_off(self, layer: int) -> None:
        """Wait until no rank of the group reads a layer's home weights any more."""
        self._puller.close_layer(layer)
        self._node.agree([0], Transfer("collect", layer, path="p2p"))
        if self._refresher is not None:
            # Not before: until all are through, another rank may wait for an expert that this one has yet to write.
            self._refresher.close_layer(layer)

    def _retire_version(self) -> None:
        """Stop all transfers, and wait until every rank of the node has: from here on weights may be overwritten."""
        self._puller.pause()
        self._mailboxes.finish()
        self._node.settle(Transfer("fence", path=self._node.direct_path))
        self.counters.settle()
        self._node.fence(RETIRED, self._version, Transfer("fence", path=self._node.direct_path))
        if self._refresher is not None:
            # Not before: until all have stopped, another rank may wait for an expert that this one has yet to write.
            self._refresher.pause()

    @property
    def _host_paths(self) -> tuple[str, ...]:
        """The plan's names of paths that lead to the host store."""
        return {"host": PATHS, "plan": ("host",), "peer": ()}[self._node.options.path]

    @property
    def _num_experts(self) -> int:
        """Experts of a layer, of all ranks."""
        return self._node.layout.home_slots * len(self._node.node_R)

    def _needs_store(self, plan: Plan) -> bool:
        """Whether any rank pulls from the host store under this plan; the same on all ranks."""
        used = {PATHS[index] for index in np.unique(plan.replica_table.path_P2)}
        return bool(used & set(self._host_paths))

    def _open_store(self) -> None:
        """Make the node's host store and the path from it, once. Every rank must call this."""
        if self._store is not None:
            return
        node = self._node
        # Bounded, unlike what follows: all ranks are here from now on.
        node.agree([0], Transfer("publish", path="host"))
        given = {"group": node.group, "node_R": node.node_R, "timeout_s": node.options.timeout_s}
        self._store = HostStore(node.layout, experts=self._num_experts, is_checked=node.options.is_checked, **given)
        self._refresher = Refresher(node, self._store)
        path = HostPath(self._store)
        self._paths.setdefault("host", path)
        if node.options.path == "host":
            self._paths.update(dict.fromkeys(PATHS, path))

    def _refreshed(self, plan: Plan) -> list[Entry]:
        """This rank's experts that others pull from the store under this plan."""
        return first_uses(plan, rank=self._node.rank, pullers=self._node.peers, paths=self._host_paths)

    def _count_wait(self, waited: float) -> None:
        """Count what the caller waited; on a device its stream tells, see `Counters.stop`."""
        if self._node.device.type == "cpu":
            self.counters.wait(self._node.direct_path, waited)

    def _open_plan(self) -> Plan:
        if self._plan is None:
            raise TransferError("no window is open; call open_window(plan) first")
        return self._plan

    def _check_running(self) -> None:
        if self._is_suspended:
            raise TransferError("the engine is suspended; call resume() first: parameters may be anywhere")

    def _agreed(self, check: Callable[[], None], transfer: Transfer) -> None:
        """Check something of this rank alone; if one rank fails, all raise at once and nothing has moved."""
        failure: TransferError | None = None
        try:
            check()
        except TransferError as error:
            failure = error
        rank = self._node.rank
        (failed,) = self._node.agree([0 if failure is None else rank + 1], transfer)
        if failure is not None:
            raise failure
        if failed:
            raise TransferError(
                f"rank {rank}: {transfer} was not begun, because rank {failed - 1} refused; see its error"
            )

    def _check_store(self) -> None:
        self._node.check()
        check_store_budget(self._node.layout, self._num_experts, self._node.options)

    def _check_close(self) -> None:
        self._node.check()
        self._edges.check_unchanged()

    def _check_open(self, plan: Plan) -> None:
        self._node.check()
        self._check_reach(plan)

    def _check_reach(self, plan: Plan) -> None:
        """Refuse a plan whose pulls or slots this engine cannot serve."""
        layout = self._node.layout
        depth = plan.itinerary.depth if plan.itinerary is not None else 0
        if plan.slots > layout.slots or depth > layout.depth:
            raise TransferError(
                f"the plan uses {plan.slots} slots at depth {depth}; buffers are there for {layout.slots} at depth "
                f"{layout.depth}: open the engine with more or plan with less"
            )
        check_far(plan, rank=self._node.rank, host_paths=self._host_paths)
        if self._needs_store(plan):
            check_store_budget(layout, self._num_experts, self._node.options)
