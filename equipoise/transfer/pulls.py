"""`Puller`: a thread that fills replica buffers ahead of the visits that use them.

Knows the walk, the buffers and the paths. Does not know windows' edges or gradients.

One thread per rank, one fill at a time, one lock around the walk's state. Replicas of a visit that are there go in one
submission. Weights are one-sided within a version: a pull waits until its path says that the weights of that version
are there, and nobody overwrites weights before all have paused. On a device the copies run in a lane beside the layers:
they begin once the layer that used the buffer last is finished there, and the layer that uses it next waits for them on
the device, not in the thread that feeds it.

Invariants (asserted by the tests):
1. Replicas are bit-equal to their home's weights of the current version, whatever the delays on either side.
2. After `pause` no pull runs, and none starts before `resume`; after `close_layer` none of that layer, before
   `open_layer`.
3. A pull that fails or hangs raises in the rank that waits for it, by name, within the bound.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from equipoise.core.cluster import Cluster
from equipoise.core.errors import TransferError
from equipoise.core.plan import PATHS, PHASES, Itinerary, Phase, Plan, Visit
from equipoise.core.plan import Path as PathName
from equipoise.transfer.bank import ExpertWeights
from equipoise.transfer.copies import Copier, make_copier
from equipoise.transfer.edges import copies_of, copy_all, copy_expert
from equipoise.transfer.host_store import HostStore
from equipoise.transfer.node import NodeMemory
from equipoise.transfer.waits import REACHED, VERSION, Lane, Mark, Standstill, Transfer

# Paths that bring experts' weights from their homes to replica slots of this rank.
#
# A path is chosen by the plan for each pull (`core.itinerary.Path`), or forced (`TransferOptions.path`).
#
#     MappedPath   home weights of the node's ranks, mapped: `peer` on CUDA devices, `shm` on the CPU
#     HostPath     the node's host store (`host_store`), pinned where there is a device: `host`
#
# To add one: implement `Path`, and give it to the engine under the plan's name for it. A path copies and nothing else:
# it says when the weights of a version are there, and who waits for them is the puller's business.


class Need(NamedTuple):
    """A replica that this rank holds at a visit, and where its weights come from."""

    layer: int
    expert: int
    source: int
    """Home rank."""
    source_slot: int
    path: PathName


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
            PATHS[int(table.path_P2[p, PHASES.index(phase)])],
        )
        for p in entries
        if table.rank_P[p] == rank
    )


# `Walk`: where a rank stands in its plan's itinerary, what each replica buffer holds, and what to fill next.
#
# A visit that the layer announces becomes the position, whether it is the next one or not. Ahead of it, at most
# `depth`
# visits, `next_fill` follows the itinerary's buffers. A visit whose replicas are nowhere is filled first of all.
#
# Invariants (asserted by the tests):
# 1. `holds` is true only for a buffer that was filled completely for that very micro-step and layer.
# 2. The buffer of the latest announced visit is never filled for another one.
# 3. Nothing is filled earlier than its `ready_from`, nor more than `depth` visits ahead, nor while its layer is
# closed.
# 4. Visits in the itinerary's order, backward and repeated ones included, are never on demand.


class Fill(NamedTuple):
    """A buffer to fill with the replicas of one micro-step of one layer."""

    micro_step: int
    layer: int
    buffer: int
    needs: tuple[Need, ...]

    @property
    def key(self) -> tuple[int, int]:
        """What the buffer then holds."""
        return self.micro_step, self.layer


class Walk:
    """One rank's way through one window."""

    def __init__(self, plan: Plan, *, rank: int) -> None:
        if plan.itinerary is None:
            raise TransferError(f"a plan of policy {plan.policy!r} has no itinerary and cannot be executed")
        self._plan, self._rank = plan, rank
        self._itinerary: Itinerary = plan.itinerary
        self._index = {self._itinerary.visit(i): i for i in range(len(self._itinerary))}
        self._needs: dict[Visit, tuple[Need, ...]] = {}
        self._position = -1
        self._holds: list[tuple[int, int] | None] = [None] * (self._itinerary.depth + 1)
        self._leased: int | None = None
        self._urgent: Fill | None = None
        self._open: set[int] = set()
        self.filling: Fill | None = None

    @property
    def cluster(self) -> Cluster:
        """What the plan was made for."""
        return self._plan.cluster

    def announce(self, visit: Visit) -> tuple[Fill, bool]:
        """Make `visit` the position.

        Returns: the buffer with its replicas, once `holds` is true for it; and whether it was not to be expected
        """
        at, before = self._index.get(visit), self._position
        needs = self._needs_at(visit)
        if at is not None:
            self._position = at
        fill = Fill(visit.micro_step, visit.layer, self._buffer_of(visit, at), needs)
        self._leased = fill.buffer if needs else None
        self._urgent = None
        if not needs or self.holds(fill):
            return fill, False
        if self.filling is None or self.filling[:3] != fill[:3]:
            self._urgent = fill
        is_due = at is not None and before < at <= before + self._itinerary.depth
        return fill, not is_due

    def holds(self, fill: Fill) -> bool:
        """Whether the buffer holds what `fill` says, completely."""
        return self._holds[fill.buffer] == fill.key

    def next_fill(self) -> Fill | None:
        """What to fill now, if anything may be."""
        if self._urgent is not None and self.is_open(self._urgent.layer):
            return self._urgent
        plan = self._itinerary
        for at in range(self._position + 1, min(self._position + 1 + plan.depth, len(plan))):
            if not plan.pulls_V[at] or plan.ready_from_V[at] > max(self._position, 0):
                continue
            if not self.is_open(int(plan.layer_V[at])):
                continue
            fill = self._fill_at(at)
            if fill.needs and fill.buffer != self._leased and not self.holds(fill):
                return fill
        return None

    def begin(self, fill: Fill) -> None:
        """Note that `fill` is being filled: until `end` its buffer holds nothing."""
        self._holds[fill.buffer] = None
        self.filling = fill
        if self._urgent == fill:
            self._urgent = None

    def end(self, *, is_filled: bool = True) -> None:
        """Note that what was begun is complete, or that it was given up and the buffer holds nothing."""
        assert self.filling is not None, "end of a fill that was not begun"
        self._holds[self.filling.buffer] = self.filling.key if is_filled else None
        self.filling = None

    def open(self, layer: int) -> None:
        """Say that the home weights of a layer are there; closed at first."""
        self._open.add(layer)

    def close(self, layer: int) -> None:
        """Say that the home weights of a layer are about to go: no buffer holds any of them from now on."""
        self._open.discard(layer)
        self._holds = [None if held is not None and held[1] == layer else held for held in self._holds]

    def is_open(self, layer: int) -> bool:
        """Whether the home weights of a layer are there."""
        return layer in self._open

    def forget(self) -> None:
        """Let all buffers hold nothing, because weights may have changed."""
        self._holds = [None] * len(self._holds)
        self._leased = self._urgent = None

    def _fill_at(self, at: int) -> Fill:
        visit = self._itinerary.visit(at)
        return Fill(visit.micro_step, visit.layer, int(self._itinerary.buffer_V[at]), self._needs_at(visit))

    def _needs_at(self, visit: Visit) -> tuple[Need, ...]:
        if visit not in self._needs:
            micro_step, phase, layer = visit
            self._needs[visit] = needs_of(self._plan, micro_step, layer, rank=self._rank, phase=phase)
        return self._needs[visit]

    def _buffer_of(self, visit: Visit, at: int | None) -> int:
        """The buffer that holds the visit's replicas already, else the itinerary's, else the first."""
        key = (visit.micro_step, visit.layer)
        if key in self._holds:
            return self._holds.index(key)
        return 0 if at is None else int(self._itinerary.buffer_V[at])


# `PathShift`: later pulls of a window leave a path that falls behind, if the other one does not.
#
# The plan chose each pull's path by the rates of its cluster (`nvlink_bytes_per_s`, `host_bytes_per_s`). What pulls
# really reach, waits for their weights included, is measured visit by visit. A path is *behind* where the last
# `RECENT`
# visits together reached less than half of the plan's rate; one that was not measured is not. A pull planned by a path
# that is behind goes by the other one, if that is not behind and has the weights now: the store has those of experts
# that
# some pull of the plan takes from there.
#
# Both paths bring the same bits, so this changes seconds alone. Off under a forced path. Every window begins anew.
#
# Invariants (asserted by the tests):
# 1. Replicas have the same bits wherever they come from.
# 2. No pull is shifted to a path that is behind, that does not have its weights, or that does not reach its home.
# 3. Nothing is shifted before its path was measured, nor under a forced path.


RECENT = 4
"""Visits by which a path is judged."""
BEHIND = 0.5
"""Share of the plan's rate below which a path is behind."""

_OTHER: dict[PathName, PathName] = {"peer": "host", "host": "peer"}


class _Visit(NamedTuple):
    """What one path brought for one visit."""

    num_bytes: int
    waited_s: float
    """By the caller's clock: for the weights, and for the copy where there is no device."""
    copying: Standstill
    """The copy in the lane of a device."""


class PathShift:
    """Where the pulls of one rank go."""

    def __init__(self, paths: Mapping[str, Path], *, near: Collection[int], is_on: bool) -> None:
        """
        Args:
            paths: by the plan's name for them; more may come
            near: ranks whose homes this rank has mapped
        """
        self._paths, self._near, self._is_on = paths, frozenset(near), is_on
        self._planned: dict[PathName, int] = {}
        self._recent: dict[PathName, deque[_Visit]] = {}

    def open_window(self, cluster: Cluster) -> None:
        """Forget what was measured, and take the rates that the plan counted on."""
        self._planned = {"peer": cluster.nvlink_bytes_per_s, "host": cluster.host_bytes_per_s}
        self._recent = {name: deque(maxlen=RECENT) for name in self._planned}

    def note(self, name: PathName, num_bytes: int, *, waited_s: float, copying: Standstill) -> None:
        """Take note of what a path brought for a visit."""
        if self._is_on:
            self._recent[name].append(_Visit(num_bytes, waited_s, copying))

    def choose(self, need: Need, *, version: int) -> Need:
        """Return the need as planned, or by the other path."""
        name = _OTHER[need.path]
        if not self._is_on or need.source not in self._near or name not in self._paths:
            return need
        other = need._replace(path=name)
        is_better = self.is_behind(need.path) and not self.is_behind(name)
        return other if is_better and self._paths[name].is_ready(other, version) else need

    def is_behind(self, name: PathName) -> bool:
        """Whether what the path brought lately took more than twice as long as planned; False where not measured."""
        over = [visit for visit in self._recent.get(name, ()) if visit.copying.is_over()]
        seconds = sum(visit.waited_s + visit.copying.seconds() for visit in over)
        return sum(visit.num_bytes for visit in over) < BEHIND * self._planned.get(name, 0) * seconds


_JOIN_S = 1.0
"""How long closing waits for a pull that hangs before it leaves the (daemon) thread behind."""


class Puller:
    """The thread that fills the replica buffers, and what each holds."""

    def __init__(self, node: NodeMemory, paths: Mapping[str, Path]) -> None:
        """Start the thread, paused.

        Args:
            paths: by the plan's name for them; may be changed while paused
        """
        self._node, self._paths = node, paths
        self._buffers, count = node.buffers, node.layout.depth + 1
        self._lane = Lane(node.device)
        self._shift = PathShift(paths, near=node.peers, is_on=node.options.path == "plan")
        self._filled, self._free = [REACHED] * count, [REACHED] * count
        self._lent: int | None = None
        self._changed = threading.Condition()
        self._walk: Walk | None = None
        self._version = 0
        self._is_paused, self._is_closed = True, False
        self._failure: TransferError | None = None
        self._thread = threading.Thread(target=self._run, name="equipoise-puller", daemon=True)
        self._thread.start()

    def resume(self, walk: Walk, *, version: int) -> None:
        """Fill along `walk` from now on, with weights of `version`."""
        with self._changed:
            self._shift.open_window(walk.cluster)
            self._walk, self._version, self._is_paused = walk, version, False
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop filling, and wait until a fill that has begun is over, on the device too."""
        with self._changed:
            self._is_paused = True
            filling = None if self._walk is None else self._walk.filling
            transfer = Transfer("pull") if filling is None else self._transfer(filling.needs[0])
            self._wait(lambda: self._walk is None or self._walk.filling is None, transfer)
            self._wait(lambda: all(mark.is_reached() for mark in self._filled), transfer)

    def open_layer(self, layer: int) -> None:
        """Pull from the homes of a layer from now on: their weights are there, on all ranks of the node."""
        with self._changed:
            if self._walk is not None:
                self._walk.open(layer)
            self._changed.notify_all()

    def close_layer(self, layer: int) -> None:
        """Pull from the homes of a layer no more, and wait until a fill that has begun is over, on the device too."""
        with self._changed:
            walk = self._walk
            if walk is None:
                return
            walk.close(layer)
            transfer = Transfer("pull", layer=layer, path=self._node.direct_path)
            self._wait(lambda: walk.filling is None or walk.filling.layer != layer, transfer)
            # A fill that has ended meanwhile may have been marked as held.
            walk.close(layer)
            self._wait(lambda: all(mark.is_reached() for mark in self._filled), transfer)

    def weights(self, visit: Visit) -> ExpertWeights:
        """Return this rank's replica weights at `visit`; what the current stream is given next waits for them."""
        fill = self._lend(visit)
        return ExpertWeights(*(None if t is None else t[: len(fill.needs)] for t in self._buffers.slots(fill.buffer)))

    def joined(self, visit: Visit) -> ExpertWeights | None:
        """Return home slots and then this rank's replicas at `visit`, in one tensor each; None where they are apart."""
        if not self._buffers.is_joined:
            return None
        fill = self._lend(visit)
        held, home = len(fill.needs), self._node.home(self._node.rank, visit.layer)
        matrices = self._buffers.joined(visit.layer, fill.buffer)
        pairs = zip(home[2:], self._buffers.slots(fill.buffer)[2:], strict=False)
        biases = (None if a is None or b is None else torch.cat([a, b[:held]]) for a, b in pairs)
        return ExpertWeights(*(matrix[: home.num_slots + held] for matrix in matrices), *biases)

    def close(self) -> None:
        """End the thread and let go of the buffers. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        # Whoever frees the buffers next must not do so under a copy.
        self._lane.mark().block()
        # An error refers to the calls it went through, and they to this object and to shared memory.
        self._walk, self._paths, self._failure = None, {}, None

    def _lend(self, visit: Visit) -> Fill:
        """Let the current stream have the buffer with the replicas of `visit`, and take back the one it had."""
        standstill = Standstill(self._node.device)
        with self._changed:
            if self._walk is None or self._is_paused:
                raise TransferError(f"{visit} asks for replicas, but no window is open or the engine is suspended")
            walk = self._walk
            if self._lent is not None:
                # All that used it has been given to the stream by now.
                self._free[self._lent] = Mark.now(self._node.device)
            fill, is_on_demand = walk.announce(visit)
            self._lent = fill.buffer if fill.needs else None
            self._changed.notify_all()
            if fill.needs:
                waited = self._wait(lambda: walk.holds(fill), self._transfer(fill.needs[0]))
                self._filled[fill.buffer].hold_up(self._node.device)
                standstill.end()
                self._count(fill, waited, standstill)
                self._node.counters.on_demand += is_on_demand
        return fill

    def _count(self, fill: Fill, waited: float, standstill: Standstill) -> None:
        path = self._paths[fill.needs[0].path].name
        if self._node.device.type == "cpu":
            self._node.counters.wait(path, waited)
        else:
            self._node.counters.stop(path, standstill)

    def _wait(self, is_ready: Callable[[], bool], transfer: Transfer) -> float:
        """Wait with the lock given up in between, until ready or failed."""
        waited = self._node.watchdog.wait(
            lambda: self._failure is not None or is_ready(),
            transfer,
            pause=self._changed.wait,
        )
        if self._failure is not None:
            raise self._failure
        return waited

    def _run(self) -> None:
        try:
            while (fill := self._take()) is not None:
                with self._lane.work(after=self._free[fill.buffer]):
                    is_filled = self._pull(fill)
                with self._changed:
                    self._filled[fill.buffer] = self._lane.mark()
                    if self._walk is not None:
                        self._walk.end(is_filled=is_filled)
                    self._changed.notify_all()
        except RuntimeError as error:
            self._fail(error)

    def _take(self) -> Fill | None:
        """Wait for the next fill and begin it; None once closed."""
        with self._changed:
            while not self._is_closed:
                fill = None if self._walk is None or self._is_paused else self._walk.next_fill()
                if fill is not None and self._walk is not None:
                    self._walk.begin(fill)
                    return fill
                self._changed.wait()
        return None

    def _pull(self, fill: Fill) -> bool:
        """Bring a visit's replicas; False where a pause, or the layer's end, came before their weights."""
        needs, slot = self._chosen(fill), 0
        while slot < len(needs):
            waited_s = self._node.watchdog.wait(partial(self._is_over, needs[slot]), self._transfer(needs[slot]))
            together = self._ready_from(needs, slot)
            if not together:
                return False
            self._copy(fill.buffer, together, waited_s=waited_s)
            slot += len(together)
        return True

    def _chosen(self, fill: Fill) -> list[Need]:
        """The needs by the paths they really take."""
        chosen = [self._shift.choose(need, version=self._version) for need in fill.needs]
        self._node.counters.shifted += sum(a is not b for a, b in zip(chosen, fill.needs, strict=True))
        return chosen

    def _is_over(self, need: Need) -> bool:
        return self._is_closed or self._is_paused or not self._is_open(need) or self._is_ready(need)

    def _is_open(self, need: Need) -> bool:
        return self._walk is not None and self._walk.is_open(need.layer)

    def _is_ready(self, need: Need) -> bool:
        return self._is_open(need) and self._paths[need.path].is_ready(need, self._version)

    def _ready_from(self, needs: Sequence[Need], first: int) -> dict[int, Need]:
        """Replicas by slot, from one on, that can be copied together now: by one path, without a gap."""
        together: dict[int, Need] = {}
        for slot, need in enumerate(needs[first:], first):
            if self._paths[need.path] is not self._paths[needs[first].path] or not self._is_ready(need):
                break
            together[slot] = need
        return together

    def _copy(self, buffer: int, needs: Mapping[int, Need], *, waited_s: float) -> None:
        first = next(iter(needs.values()))
        path, begin, copying = self._paths[first.path], time.monotonic(), Standstill(self._node.device)
        with torch.profiler.record_function("equipoise.pull"):
            try:
                copied = path.pull(needs, self._buffers.slots(buffer))
            except TransferError as error:
                # Of several, the path's own words say which.
                one = self._transfer(first)
                whole = one if len(needs) == 1 else one._replace(expert=None, peer=None)
                raise self._node.watchdog.abort(f"{whole} failed: {error}") from error
        copying.end()
        if self._node.device.type == "cpu":
            waited_s += time.monotonic() - begin
        self._shift.note(first.path, copied, waited_s=waited_s, copying=copying)
        self._node.counters.arrive(path.name, copied)
        self._node.counters.pulls += len(needs)

    def _transfer(self, need: Need) -> Transfer:
        return Transfer("pull", need.layer, need.expert, self._paths[need.path].name, need.source)

    def _fail(self, error: RuntimeError) -> None:
        failure = error if isinstance(error, TransferError) else self._node.watchdog.abort(f"pull failed: {error}")
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
