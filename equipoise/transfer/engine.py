"""`TransferEngine`: moves the experts of one EP group, window by window, beside the layers that use them.

Every rank does the following in each window:
1. `open_window(plan)`: check that parameters are where they were registered, announce a version, and start publishing
   one layer after another in the background (`publish_layer`). A published layer may be pulled.
2. Each layer waits only for its own home weights (`wait_for`), gets its replicas (`weights` or `joined`), sends their
   gradients home, and adds the gradients that its own replicas returned.
3. After its last visit (`layer_done`), a layer is collected in the background while others compute (`collect_layer`).
   If it runs again nevertheless, it is published again; the wait counts as exposed.
4. `close_window()`: stop pulling, wait until all ranks of the node have stopped, collect what is left.

If a transfer does not finish within its time-out, every rank raises an error that names rank, layer, expert and path.
After `close`, also after a failure, parameters are in ordinary memory and no shared memory is left.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from equipoise.core.errors import InfeasiblePlanError, TransferError
from equipoise.core.options import RowLimits, TransferOptions
from equipoise.core.plan import PATHS, Plan, Visit
from equipoise.transfer.edges import WindowEdges
from equipoise.transfer.host_store import (
    Crossing,
    HostStore,
    Refresher,
    check_crossings,
    check_store_budget,
    crossings_by_layer,
    first_uses,
    send_crossings,
)
from equipoise.transfer.mapped_rows import MappedRows
from equipoise.transfer.node import ExpertWeights, GradientOf, NodeMemory
from equipoise.transfer.pulls import HostPath, MappedPath, Puller, PullPath, PullSchedule
from equipoise.transfer.returns import Mailboxes
from equipoise.transfer.waits import RETIRED, VERSION, Counters, JobQueue, Mark, Transfer

_SUSPENDED = "the engine is suspended; call resume() first: parameters may be anywhere"


class LayerTransfers(Protocol):
    """What a balanced layer asks of whoever moves experts: `TransferEngine`, or `NoTransfers` where nothing moves.

    The layer keeps this order on every rank of the EP group, whatever its rows and replicas:
    1. `wait_for` at the beginning of a visit, then `joined` or `weights`. Under activation recomputation the second
       forward is part of the backward visit, so one visit may begin more than once.
    2. What `weights` or `joined` returned is read until the next visit begins, also after gradients were handed in.
    3. Where experts train, `hand_in` once per (micro-step, layer) and then `collect_returns` once.
    Slots are in the order of the plan: ascending position in the replica table.
    """

    def wait_for(self, visit: Visit) -> None:
        """Begin a visit, and wait until the home weights of its layer have arrived."""
        ...

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`, zero-size where it has none; waits for their pulls."""
        ...

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home slots and then this rank's replicas at `visit` in one tensor each; None where they are apart."""
        ...

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Take the gradients of this rank's replicas and start them towards their homes.

        Waits for no home of this layer, but for a free mailbox where homes are layers behind.
        """
        ...

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Wait for what replicas of this rank's home experts returned and add it, in place, in ascending rank order.

        Args:
            gradients: [home_slots, ...] gradients that the home itself computed; where gradients accumulate in a wider
                dtype elsewhere, returns are added there instead
        """
        ...


class LayerProgress:
    """Finds the layers that one rank is done with in a window, from the visits that have been.

    A layer of an update window is done when the gradients of all its micro-steps have returned, one of a recompute
    window when all its micro-steps have run forward. It is reported when the next visit begins: until then the layer
    may still read its weights, and autograd may not have accumulated its gradients yet. So the last layer of a window
    is never reported.
    """

    def __init__(self, plan: Plan) -> None:
        self.has_gradients = plan.loads.stage != "recompute"
        """Whether the gradients of a layer that is done are complete."""
        self._left = [set(range(plan.loads.num_micro_steps)) for _ in range(plan.loads.num_layers)]
        self._done: int | None = None
        self._at: Visit | None = None

    def begin(self, visit: Visit) -> int | None:
        """Begin a visit, and return the layer that is done by that."""
        if visit == self._at:
            return None
        done, self._done = self._done, None
        if not self.has_gradients and visit.phase == "forward":
            self.passed(visit.micro_step, visit.layer)
        self._at = visit
        return done

    def passed(self, micro_step: int, layer: int) -> None:
        """Note that a micro-step of a layer runs forward, or that its gradients are about to be accumulated."""
        self._at = None
        left = self._left[layer]
        if micro_step in left:
            left.discard(micro_step)
            self._done = None if left else layer


class TransferEngine:
    """Publishes, pulls, returns and collects the experts of one EP group."""

    def __init__(
        self,
        homes: Sequence[ExpertWeights],
        *,
        group: Any,
        node_R: Sequence[int],
        options: TransferOptions,
        paths: Mapping[str, PullPath] | None = None,
        gradient_of: GradientOf | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """Share memory with the node's ranks and move the parameters in. Every rank of `group` must call this.

        Args:
            homes: per layer, this rank's expert parameters [home_slots, ...]
            group: the EP group, able to move CPU tensors
            node_R: node of each rank of the group
            options: slots, depth, budget and bounds
            paths: by the plan's name for them, instead of the ones that `options` ask for
            gradient_of: where a parameter's accumulated gradient lies, if not in its `grad`
            names: of the layers, for errors; left out: their indices
        """
        self._node = NodeMemory(homes, group=group, node_R=node_R, options=options)
        self.counters: Counters = self._node.counters
        self.transport = self._node.transport
        """What moves experts between nodes: `nccl` or `gloo`."""
        self._paths: dict[str, PullPath] = {"peer": MappedPath(self._node), **(paths or {})}
        if options.path == "peer":
            self._paths = dict.fromkeys(PATHS, self._paths["peer"])
        self._host_paths = {"host": PATHS, "plan": ("host",), "peer": ()}[options.path]
        """The plan's names of paths that lead to the host store."""
        self._store: HostStore | None = None
        self._refresher: Refresher | None = None
        self._puller = Puller(self._node, self._paths)
        self._edges = WindowEdges(self._node, gradient_of=gradient_of, names=names)
        self._mailboxes = Mailboxes(self._node, gradient_of=gradient_of)
        self._jobs = JobQueue(self._node.watchdog, self._node.device)
        self._mapped: MappedRows | None = None
        self._window = self._version = 0
        self._is_suspended = False
        # Of the open window:
        self._plan: Plan | None = None
        self._schedule: PullSchedule | None = None
        self._progress: LayerProgress | None = None
        self._published_L: list[Future[None]] = []
        self._collected: set[int] = set()
        self._done: deque[tuple[int, Future[None] | None]] = deque()
        """Layers that are done, and what collects them; None where nothing of them moves."""
        self._crossings: dict[int, list[Crossing]] = {}

    @property
    def extra_bytes(self) -> int:
        """Bytes of this rank beyond the home weights."""
        return self._node.layout.extra_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of the page in which this rank shows its rows to its node; as large as the windows so far needed."""
        return 0 if self._mapped is None else self._mapped.num_bytes

    def open_window(self, plan: Plan, *, with_weights: bool = True, rows: MappedRows | None = None) -> None:
        """Start publishing the plan's placement, and pulling. Every rank of the group must call this.

        Args:
            with_weights: whether weights go back to their owners when the window ends; see `WindowEdges.begin`
            rows: by which the window's layers exchange rows, if by mapped memory; its steps order returned gradients
        """
        schedule = PullSchedule(plan, rank=self._node.rank)
        # Step 1: if one rank cannot, all raise at once and nothing has moved.
        used = {PATHS[index] for index in np.unique(plan.replica_table.path_P2)}
        needs_store = bool(used & set(self._host_paths))
        self._node.agreement.all_or_none(partial(self._check_open, plan, needs_store), Transfer("publish", path="p2p"))
        if needs_store:
            self._open_store()
        # Step 2: gradients that owners hold already go to the homes.
        with self._exposed("publish"):
            self._edges.begin(plan, with_weights=with_weights)
        # Step 3: layers are published one after the other in the background, in layer order.
        self._plan, self._schedule, self._progress = plan, schedule, LayerProgress(plan)
        self._collected, self._window = set(), self._window + 1
        self._done.clear()
        self._mailboxes.open_window(plan, number=self._window, rows=rows)
        self._start_version()
        layers = range(self._node.layout.layers)
        self._published_L = [self._jobs.submit(partial(self.publish_layer, layer)) for layer in layers]

    def map_rows(self, plan: Plan, *, pad: int, is_relayed: bool) -> MappedRows:
        """Make room for a window's rows in memory that a node's ranks map. Every rank of the group must call this.

        Args:
            pad: groups of rows are filled to a multiple of this
            is_relayed: tokens cross nodes in two levels
        """
        self._mapped = self._mapped or MappedRows(self._node, top_k=plan.model.top_k)
        self._mapped.reserve(RowLimits.of(plan, pad=pad, is_relayed=is_relayed))
        return self._mapped

    def publish_layer(self, layer: int) -> None:
        """Move a layer's weights to their homes, then let others read them. Runs in the background, on every rank."""
        # Returns once all ranks of the node have written theirs.
        self._edges.publish_layer(layer)
        self._open_layer(layer)

    def _open_layer(self, layer: int) -> None:
        """Let others read a layer's home weights, which all ranks of the node hold."""
        if self._store is not None and self._refresher is not None:
            # Experts that other nodes need cross to their stores once per version; homes write to their own node's.
            send_crossings(self._node, self._store, self._crossings.pop(layer, ()), version=self._version)
            self._refresher.open_layer(layer)
        self._puller.open_layer(layer)

    def wait_for(self, visit: Visit) -> None:
        """Begin a visit, and wait until the home weights of its layer have arrived."""
        self._begin(visit)
        layer = visit.layer
        if layer in self._collected:
            self._collected.discard(layer)
            self._published_L[layer] = self._jobs.submit(partial(self.publish_layer, layer))
        if not self._published_L[layer].done():
            with self._exposed("wait_for"):
                self._published_L[layer].exception()
        self._published_L[layer].result()

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`, which `wait_for` has begun; waits for their pulls."""
        with torch.profiler.record_function("equipoise.weights"):
            return self._puller.weights(visit)

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home and replica weights at `visit`, which `wait_for` has begun; None without an arena."""
        with torch.profiler.record_function("equipoise.weights"):
            return self._puller.joined(visit)

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Take the gradients of this rank's replicas and start them towards their homes."""
        plan = self._begin(Visit(micro_step, "backward", layer))
        with torch.profiler.record_function("equipoise.hand_in"):
            self._mailboxes.hand_in(plan, micro_step, layer, gradients)

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Wait for what replicas of this rank's home experts returned and add it, in place, in ascending rank order."""
        plan = self._begin(Visit(micro_step, "backward", layer))
        with torch.profiler.record_function("equipoise.collect_returns"):
            self._mailboxes.collect(plan, micro_step, layer, gradients)
        if self._progress is not None and self._progress.has_gradients:
            self._progress.passed(micro_step, layer)

    def layer_done(self, layer: int) -> None:
        """Collect a layer in the background: its last visit is over, and its gradients are complete."""
        if not self._edges.moves_anything(layer):
            self._done.append((layer, None))
            return
        if self._progress is not None and self._progress.has_gradients:
            self._edges.complete(layer)
        self._collected.add(layer)
        collect = partial(self.collect_layer, layer)
        self._done.append((layer, self._jobs.submit(collect, after=Mark.now(self._node.device))))

    def layers_home(self) -> list[int]:
        """Return the layers whose gradients are complete and with their owners, in the order they were done, each once.

        Called in the thread that trains; does not wait. The last layers of a window are home when it has ended.
        """
        found = list[int]()
        while self._done and (self._done[0][1] is None or self._done[0][1].done()):
            layer, collected = self._done.popleft()
            if collected is not None:
                collected.result()
            found.append(layer)
        return found

    def abort(self, reason: str) -> None:
        """Make all ranks of the node leave their window with an error that names this rank and the reason."""
        self._node.watchdog.abort(reason)

    def collect_layer(self, layer: int) -> None:
        """Move a layer to its owners once nobody reads its homes. Runs in the background, on every rank."""
        # Step 1: no rank of the group pulls from the homes any more.
        self._puller.close_layer(layer)
        self._node.agreement.largest([0], Transfer("collect", layer, path="p2p"))
        # Step 2: this rank writes no more to the store. Not before all have stopped, because another rank may wait for
        # an expert that this one has yet to write.
        if self._refresher is not None:
            self._refresher.close_layer(layer)
        # Step 3: gradients and weights go to their owners.
        self._edges.collect_layer(layer)

    def close_window(self) -> None:
        """End the window: gradients and weights go to their owners. Every rank of the group must call this."""
        if self._plan is None:
            raise TransferError("no window is open; call open_window(plan) first")
        self._retire_version()
        self._mailboxes.check_empty()
        self._node.agreement.all_or_none(self._edges.check_unchanged, Transfer("collect", path="p2p"))
        with self._exposed("collect"):
            self._edges.end()
        self.counters.flush()
        self._plan = self._schedule = self._progress = None

    def complete_store(self) -> HostStore:
        """Write every expert of the model to this node's host store. Every rank must call this, between windows.

        Returns: the store, complete: the source for weight sync, export and checkpoints until the next window opens
        """
        if self._plan is not None:
            raise TransferError("a window is open; close it before the host store is completed")
        self._node.agreement.all_or_none(self._check_store, Transfer("refresh", path="host"))
        self._open_store()
        assert self._store is not None and self._refresher is not None, "opened above"
        self._version += 1
        self._refresher.complete(version=self._version)
        return self._store

    def suspend(self) -> None:
        """Stop all transfers, so that parameters may be moved or freed. Every rank of the group must call this."""
        if not self._is_suspended:
            self._retire_version()
        self._is_suspended = True

    def resume(self) -> None:
        """Register the parameters where they are now, and go on. Every rank of the group must call this."""
        if not self._is_suspended:
            return
        self._node.adopt(version=self._version + 1)
        self._is_suspended = False
        if self._schedule is not None:
            self._schedule.forget()
            self._start_version()
            for layer in range(len(self._published_L)):
                if layer not in self._collected:
                    self._open_layer(layer)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend and resume around a `with` block, also one that raises: a suspended engine could not go on."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Hold all weights at their owners, for whatever reads or writes them from outside. Every rank must enter."""
        with self.suspended(), self._edges.canonical():
            yield

    def close(self) -> None:
        """Free everything; parameters get memory of their own. Closing twice is allowed."""
        self._jobs.close()
        self._puller.close()
        self._mailboxes.close()
        self._edges.unfollow()
        if self._refresher is not None:
            self._refresher.close()
        self._plan = self._schedule = self._progress = None
        # A job that failed keeps its error, the error its frames, and they the node's memory.
        self._published_L, self._paths = [], {}
        self._done.clear()
        if self._mapped is not None:
            self._mapped.close()
        self._node.close()
        if self._store is not None:
            self._store.close()
        self._store = self._refresher = None

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self, visit: Visit) -> Plan:
        """Begin a visit, which may mean that another layer is done, and return the window's plan."""
        if self._plan is None or self._progress is None:
            raise TransferError("no window is open; call open_window(plan) first")
        if self._is_suspended:
            raise TransferError(_SUSPENDED)
        done = self._progress.begin(visit)
        if done is not None:
            self.layer_done(done)
        return self._plan

    def _start_version(self) -> None:
        """Announce a version of this rank's homes, refresh what will be pulled from the store, let the puller run."""
        assert self._schedule is not None and self._plan is not None, "a version starts with a plan"
        node, plan = self._node, self._plan
        self._version += 1
        node.synchronize(Transfer("fence", path=node.direct_path))
        node.cells[node.rank][VERSION] = self._version
        if self._refresher is not None:
            self._crossings = crossings_by_layer(plan)
            entries = first_uses(plan, rank=node.rank, pullers=node.peers, paths=self._host_paths)
            self._refresher.start(entries, version=self._version, layers=())
        self._puller.resume(self._schedule, version=self._version)

    def _retire_version(self) -> None:
        """Stop all transfers, and wait until every rank of the node has: from here on weights may be overwritten."""
        with self._exposed("drain"):
            self._jobs.drain()
        node, fence = self._node, Transfer("fence", path=self._node.direct_path)
        self._puller.pause()
        self._mailboxes.finish()
        node.synchronize(fence)
        self.counters.flush()
        node.cells[node.rank][RETIRED] = self._version
        node.watchdog.wait_peers(RETIRED, self._version, fence)
        if self._refresher is not None:
            # Not before: until all have stopped, another rank may wait for an expert that this one has yet to write.
            self._refresher.pause()

    def _open_store(self) -> None:
        """Make the node's host store and the path from it, once. Every rank must call this."""
        if self._store is not None:
            return
        node = self._node
        # Bounded, unlike what follows: all ranks are here from now on.
        node.agreement.largest([0], Transfer("publish", path="host"))
        self._store = HostStore(
            node.layout,
            experts=node.num_experts,
            group=node.group,
            node_R=node.node_R,
            timeout_s=node.options.timeout_s,
            is_checked=node.options.is_checked,
        )
        self._refresher = Refresher(node, self._store)
        path = HostPath(self._store)
        self._paths.setdefault("host", path)
        if node.options.path == "host":
            self._paths.update(dict.fromkeys(PATHS, path))

    @contextmanager
    def _exposed(self, name: str) -> Iterator[None]:
        """Count the seconds of a `with` block as exposed: training waits in it.

        On a device only those in which it has nothing left to compute: threads are far ahead of it.
        """
        with (
            torch.profiler.record_function(f"equipoise.{name}"),
            self.counters.timed(self._edges.path, self._node.device),
        ):
            yield

    def _check_open(self, plan: Plan, needs_store: bool) -> None:
        """Refuse a plan whose pulls or slots this engine cannot serve."""
        if self._is_suspended:
            raise TransferError(_SUSPENDED)
        self._node.check()
        layout = self._node.layout
        depth = plan.itinerary.depth if plan.itinerary is not None else 0
        if plan.slots > layout.slots or depth > layout.depth:
            raise TransferError(
                f"the plan uses {plan.slots} slots at depth {depth}; buffers exist for {layout.slots} at depth "
                f"{layout.depth}: open the engine with more or plan with less"
            )
        if plan.cross_node:
            check_crossings(plan, rank=self._node.rank, host_paths=self._host_paths)
        if needs_store:
            check_store_budget(layout, self._node.num_experts, self._node.options)

    def _check_store(self) -> None:
        if self._is_suspended:
            raise TransferError(_SUSPENDED)
        self._node.check()
        check_store_budget(self._node.layout, self._node.num_experts, self._node.options)


class NoTransfers:
    """The engine of a disabled balancer: every expert computes at its owner, and nothing is shared or waited for."""

    def __init__(self, homes: Sequence[ExpertWeights]) -> None:
        self.counters = Counters()
        self.extra_bytes = self.row_bytes = 0
        self._homes = homes
        self._is_open = False

    def open_window(self, plan: Plan, *, with_weights: bool = True, rows: MappedRows | None = None) -> None:
        """Refuse a plan that has replicas."""
        if not self._homes:
            raise TransferError("no layers are attached; attach the balanced layers before a window begins")
        if len(plan.replica_table):
            raise InfeasiblePlanError(
                f"the plan has {len(plan.replica_table)} replicas and no engine moves them; use one, or slots=0"
            )
        self._is_open = True

    def close_window(self) -> None:
        """Forget the window."""
        self._is_open = False

    def layers_home(self) -> list[int]:
        """Return none: nothing moves, and nothing says when gradients are complete."""
        return []

    def abort(self, reason: str) -> None:
        """Do nothing: no rank waits for another here."""

    def wait_for(self, visit: Visit) -> None:
        """Check that a window is open; home weights are always there."""
        if not self._is_open:
            raise TransferError("no window is open; begin one before its layers run")

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return zero-size tensors."""
        return self._homes[0].map(lambda tensor: tensor.detach()[:0])

    def joined(self, visit: Visit) -> None:
        """There are no replicas to join."""

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Check that there is nothing to return."""
        assert gradients.num_slots == 0, "gradients of replicas that the plan does not have"

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Leave the gradients as they are: no replica returns any."""

    def suspended(self) -> AbstractContextManager[None]:
        """Do nothing: nothing runs."""
        return nullcontext()

    def canonical(self) -> AbstractContextManager[None]:
        """Do nothing: weights are at their owners."""
        return nullcontext()

    def complete_store(self) -> HostStore:
        """Refuse: there is no store, and every owner holds its experts."""
        raise TransferError("nothing is moved here, so there is no host store; read the experts from their parameters")

    def close(self) -> None:
        """Do nothing: nothing was opened."""
