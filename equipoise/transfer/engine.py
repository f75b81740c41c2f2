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

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from equipoise.core.errors import TransferError
from equipoise.core.options import TransferOptions
from equipoise.core.plan import PATHS, Plan, Visit
from equipoise.transfer.bank import ExpertWeights, NoReplicas, ReplicaBank
from equipoise.transfer.edges import GradientOf, WindowEdges
from equipoise.transfer.host_store import (
    Crossing,
    Entry,
    HostStore,
    Refresher,
    bring_far,
    check_far,
    check_store_budget,
    crossings_by_layer,
    first_uses,
)
from equipoise.transfer.node import NodeMemory, Registration
from equipoise.transfer.pulls import HostPath, MappedPath, Path, Puller, Walk
from equipoise.transfer.returns import Mailboxes
from equipoise.transfer.waits import REACHED, RETIRED, VERSION, Counters, Lane, Mark, Transfer

# `Turns`: which layers a window is through with, by the visits that have been.
#
# A layer of an update window is over when the gradients of all its micro-steps have come home, one of a recompute
# window
# when all its micro-steps have run forward. It is said when the next visit comes: until then the layer may still read
# its
# weights, and autograd, which accumulates gradients before it goes on to another layer, may not have done so. So the
# last
# layer of a window is never said to be over.
#
# Invariants (asserted by the tests):
# 1. Each layer is over at most once in a window, and only after every one of its micro-steps, in whatever order.
# 2. A visit that is asked for several times in a row does not end itself.


class Turns:
    """How far one rank has come in one window."""

    def __init__(self, plan: Plan) -> None:
        self._ends_forward = plan.loads.stage == "recompute"
        self._left = [set(range(plan.loads.num_micro_steps)) for _ in range(plan.loads.num_layers)]
        self._ended: int | None = None
        self._at: Visit | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients of a layer that is over are complete."""
        return not self._ends_forward

    def come_to(self, visit: Visit) -> int | None:
        """Begin a visit; return the layer that is over by that."""
        if visit == self._at:
            return None
        over, self._ended, self._at = self._ended, None, visit
        if self._ends_forward and visit.phase == "forward":
            self._pass(visit.micro_step, visit.layer)
        return over

    def returned(self, micro_step: int, layer: int) -> None:
        """Note that the gradients of a micro-step are with the home, about to be accumulated."""
        self._at = None
        if not self._ends_forward:
            self._pass(micro_step, layer)

    def _pass(self, micro_step: int, layer: int) -> None:
        left = self._left[layer]
        if micro_step in left:
            left.discard(micro_step)
            self._ended = None if left else layer


# `Porter`: a thread that does one job after the other, in the order given, beside the layers.
#
# On a device its work runs in a lane of its own, each job after a mark in the layers' work. Every wait inside a job is
# bounded by the watchdog, so a job ends or fails; whoever waits for one needs no bound of its own.
#
# Invariants (asserted by the tests):
# 1. Jobs run one at a time, in order, each after its mark.
# 2. After a job has failed no other begins, and everyone who waits for one gets its error.
# 3. Once closed it does nothing more; a job that hangs is told to give up, on all ranks of the node.


Job = Callable[[], None]

_JOIN_S = 1.0
"""How long closing waits for a job before it is told to give up, and for the thread after that."""


class Porter:
    """The thread, and how far it has come."""

    def __init__(self, node: NodeMemory) -> None:
        """Start the thread, with nothing to do."""
        self._node, self._lane = node, Lane(node.device)
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Job, Mark]] = deque()
        self._given = self._done = 0
        self._is_busy = self._is_closed = False
        self._failure: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="equipoise-porter", daemon=True)
        self._thread.start()

    def give(self, job: Job, *, after: Mark = REACHED) -> int:
        """Have a job done once all given before it are, and return its number."""
        with self._changed:
            self._jobs.append((job, after))
            self._given += 1
            self._changed.notify_all()
            return self._given

    def wait(self, number: int | None = None) -> None:
        """Wait until a job is done, all that were given if none is named, or raise what ended the porter's work."""
        with self._changed:
            wanted = self._given if number is None else number
            self._changed.wait_for(lambda: self._done >= wanted or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def is_done(self, number: int) -> bool:
        """Whether a job is done."""
        return self._done >= number

    def close(self) -> None:
        """Drop what has not begun and end the thread. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._jobs.clear()
            self._changed.notify_all()
            is_idle = self._changed.wait_for(lambda: not self._is_busy, _JOIN_S)
        if not is_idle:
            self._node.watchdog.abort("closed while experts were on their way between owners and homes")
        self._thread.join(_JOIN_S)
        # An error refers to the calls it went through, and they to shared memory.
        self._failure = None

    def _run(self) -> None:
        while (item := self._take()) is not None:
            job, after = item
            try:
                self._node.watchdog.wait(after.is_reached, Transfer("fence", path=self._node.direct_path))
                with torch.no_grad(), self._lane.work():
                    job()
            except Exception as error:  # noqa: BLE001  # kept for whoever waits; a thread has nobody to raise to
                self._fail(error)
            del item, job
            with self._changed:
                self._is_busy = False
                self._done += self._failure is None
                self._changed.notify_all()

    def _take(self) -> tuple[Job, Mark] | None:
        """Wait for the next job; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (bool(self._jobs) and self._failure is None))
            if self._is_closed:
                return None
            self._is_busy = True
            return self._jobs.popleft()

    def _fail(self, error: Exception) -> None:
        words = f"publish or collect failed: {error!r}"
        self._failure = error if isinstance(error, TransferError) else self._node.watchdog.abort(words)


# `Passage`: layers go to their homes ahead of their first turn in a window, and back behind their last one.
#
# The order of a window, the same on every rank:
# 1. `begin`, `publish`: layers are published one after the other in the background, the first first.
# 2. `arrive(visit)`: a layer that begins waits for its own weights, and for nothing else.
# 3. When a layer is over (`turns`), it is collected in the background, while the others still compute.
# 4. `close`: what has not been collected yet is, and the window is over.
# A visit that comes when its layer is over already has it published again: late, counted as exposed, and right.
#
# Invariants (asserted by the tests):
# 1. A layer's homes hold its weights from `arrive` until the next visit, whatever came before.
# 2. All ranks publish and collect layers in the same order, or all of them fail by name.
# 3. After `close` every owner holds its weights and gradients, whichever layers were over.


class Passage:
    """The way of one EP group's layers between owners and homes, seen from one rank."""

    def __init__(
        self,
        node: NodeMemory,
        edges: WindowEdges,
        *,
        arrived: Callable[[int], None],
        leaving: Callable[[int], None],
    ) -> None:
        """Start the background's thread.

        Args:
            arrived: called with a layer whose homes, on all ranks of the node, hold their weights from now on
            leaving: called with a layer that every rank of the group is about to collect; returns once nobody reads it
        """
        self._node, self._edges, self._porter = node, edges, Porter(node)
        self._arrived, self._leaving = arrived, leaving
        self._turns: Turns | None = None
        self._job_L: list[int] = []
        self._gone: set[int] = set()

    def begin(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Begin a window; no weights move yet. Every rank of the group must call this.

        Args:
            with_weights: see `WindowEdges.begin`
        """
        with torch.profiler.record_function("equipoise.publish"):
            begin = time.monotonic()
            self._edges.begin(plan, with_weights=with_weights)
            self._count(begin)
        self._turns, self._gone, self._job_L = Turns(plan), set(), []

    def publish(self) -> None:
        """Start the layers on their way, and return."""
        self._job_L = [self._give_publish(layer) for layer in range(self._node.layout.layers)]

    def arrive(self, visit: Visit) -> None:
        """Come to a visit, and wait until its layer's weights are with their homes."""
        self.come_to(visit)
        layer = visit.layer
        if layer in self._gone:
            self._gone.discard(layer)
            self._job_L[layer] = self._give_publish(layer)
        if not self._porter.is_done(self._job_L[layer]):
            with torch.profiler.record_function("equipoise.await_home"):
                begin = time.monotonic()
                self._porter.wait(self._job_L[layer])
                self._count(begin)

    def come_to(self, visit: Visit) -> None:
        """Come to a visit; a layer that is over by that is collected in the background."""
        turns = self._turns
        layer = None if turns is None else turns.come_to(visit)
        if turns is None or layer is None or not self._edges.moves_anything(layer):
            return
        if turns.has_gradients:
            self._edges.complete(layer)
        self._gone.add(layer)
        self._porter.give(partial(self._collect, layer), after=Mark.now(self._node.device))

    def returned(self, micro_step: int, layer: int) -> None:
        """Note that a micro-step's gradients of a layer are with its home."""
        if self._turns is not None:
            self._turns.returned(micro_step, layer)

    @property
    def layers_home(self) -> list[int]:
        """Layers whose weights are with their homes, and not about to go; nothing may be on its way."""
        return [layer for layer in range(len(self._job_L)) if layer not in self._gone]

    def drain(self) -> None:
        """Wait until nothing is on its way."""
        begin = time.monotonic()
        self._porter.wait()
        self._count(begin)

    def close(self) -> None:
        """End the window: all that is left goes to its owners. Every rank of the group must call this."""
        with torch.profiler.record_function("equipoise.collect"):
            begin = time.monotonic()
            self._edges.end()
            self._count(begin)
        self._turns = None

    def shut(self) -> None:
        """End the background's thread. Shutting twice is allowed."""
        self._porter.close()

    def _give_publish(self, layer: int) -> int:
        return self._porter.give(partial(self._publish, layer))

    def _publish(self, layer: int) -> None:
        self._edges.publish_layer(layer)
        self._arrived(layer)

    def _collect(self, layer: int) -> None:
        self._leaving(layer)
        self._edges.collect_layer(layer)

    def _count(self, begin: float) -> None:
        """Count seconds in which training stood still."""
        self._node.counters.wait(self._edges.path, time.monotonic() - begin)


# `Mover`: what brings experts where a plan says, and `Still`, the one that leaves every expert at its owner.


class Mover(ReplicaBank, Protocol):
    """Moves experts for one EP group, window by window, and is the bank of its layers."""

    @property
    def counters(self) -> Counters:
        """What this rank's transfers moved so far."""
        ...

    def open_window(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Start experts towards their homes; weights come back when the window ends, unless told otherwise."""
        ...

    def close_window(self) -> None:
        """Bring gradients and weights to their owners."""
        ...

    def canonical(self) -> AbstractContextManager[None]:
        """Hold all weights at their owners for the length of a `with` block."""
        ...

    def complete_store(self) -> HostStore:
        """Bring every expert of the model to this node's host store."""
        ...

    def suspend(self) -> None:
        """Stop all transfers, so that parameters may be moved or freed."""
        ...

    def resume(self) -> None:
        """Take the parameters where they are now, and go on."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@contextmanager
def suspended(mover: Mover) -> Iterator[None]:
    """Suspend and resume around a `with` block, also one that raises: a mover left suspended could not go on."""
    mover.suspend()
    try:
        yield
    finally:
        mover.resume()


class Still:
    """Moves nothing, shares nothing and waits for no one: every expert computes at its owner."""

    def __init__(self, homes: Sequence[ExpertWeights]) -> None:
        self._homes = homes
        self._counters = Counters()
        self._bank: ReplicaBank | None = None

    @property
    def counters(self) -> Counters:
        """Zeros."""
        return self._counters

    def open_window(self, plan: Plan, *, with_weights: bool = True) -> None:
        """Refuse a plan that has replicas."""
        if not self._homes:
            raise TransferError("no layers are attached; attach the balanced layers before a window begins")
        self._bank = NoReplicas(plan, self._homes[0])

    def close_window(self) -> None:
        """Forget the window."""
        self._bank = None

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return zero-size tensors."""
        return self._open().weights(visit)

    def hand_in(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Check that there is nothing to return."""
        self._open().hand_in(micro_step, layer, gradients)

    def collect_returns(self, micro_step: int, layer: int, gradients: ExpertWeights) -> None:
        """Leave the gradients as they are."""
        self._open().collect_returns(micro_step, layer, gradients)

    @contextmanager
    def canonical(self) -> Iterator[None]:
        """Change nothing: weights are at their owners."""
        yield

    def complete_store(self) -> HostStore:
        """Refuse: there is no store, and every owner holds its experts."""
        raise TransferError("nothing is moved here, so there is no host store; read the experts from their parameters")

    def suspend(self) -> None:
        """Do nothing: nothing runs."""

    def resume(self) -> None:
        """Do nothing: parameters may be anywhere."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _open(self) -> ReplicaBank:
        if self._bank is None:
            raise TransferError("no window is open; begin one before its layers run")
        return self._bank


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
