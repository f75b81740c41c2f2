"""`play`: the window of `cost.clock`, event by event: the specification of the clock. Never optimised, for small cases.

Every rank is a programme that says what it does next (`_Stage.rank_programme`): be busy, meet the others, wait for
transfers. Nothing is computed ahead.
"""

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from equipoise.core.plan import PATHS, Itinerary
from equipoise.cost.clock import Bar, Lane, Pass, passes_of, waits_for
from equipoise.cost.work import Work

# A programme is a generator that yields the signals it waits for. Transfers queue on lanes in order of issue; one runs
# when what it needs has been given and it is at the head of all its lanes, and stands still while its group is paused.
# A heap holds what happens next, ties in the order they were planned.


Signal = tuple[Any, ...]
"""The name of something that happens once."""
Programme = Generator[tuple[Signal, ...], None, None]
"""What a rank does: it yields the signals it waits for."""
LaneKey = tuple[str, int, int]
"""Kind of lane, pipeline stage, rank."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Weights or gradients on their way: of one expert, or of a layer at a window's edge."""

    name: str
    lane: Lane
    ranks: tuple[int, ...]
    """Whose bars it draws."""
    lanes: tuple[LaneKey, ...]
    left: int
    """Nanoseconds still to go."""
    needs: Signal
    done: Signal
    began: int = -1
    resumed: int = 0


@dataclass(slots=True, eq=False)
class World:
    """The clock, the signals given so far, the lanes, and the bars drawn."""

    now: int = 0
    agenda: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    given: set[Signal] = field(default_factory=set)
    waiting: dict[Signal, list[Callable[[], None]]] = field(default_factory=dict)
    queues: dict[LaneKey, list[Transfer]] = field(default_factory=dict)
    running: dict[int, list[Transfer]] = field(default_factory=dict)
    """Transfers on their way, by pipeline stage."""
    paused: set[int] = field(default_factory=set)
    met: dict[Signal, int] = field(default_factory=dict)
    bars: list[tuple[int, Bar]] = field(default_factory=list)
    """(pipeline stage, bar)."""
    order: Any = field(default_factory=count)

    def at(self, when: int, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.order), action))

    def run(self) -> None:
        while self.agenda:
            self.now, _, action = heapq.heappop(self.agenda)
            action()

    def give(self, signal: Signal) -> None:
        self.given.add(signal)
        for action in self.waiting.pop(signal, []):
            action()

    def when(self, signals: Sequence[Signal], action: Callable[[], None]) -> None:
        """Do `action` once all signals have been given."""
        missing = next((s for s in signals if s not in self.given), None)
        if missing is None:
            action()
        else:
            self.waiting.setdefault(missing, []).append(lambda: self.when(signals, action))

    def start(self, programme: Programme) -> None:
        def step() -> None:
            wanted = next(programme, None)
            if wanted is not None:
                self.when(wanted, step)

        step()

    def busy(self, stage: int, bar: tuple[int, Lane, str], took: int) -> Signal:
        """Draw a bar and give a signal at its end."""
        signal = ("busy", next(self.order))
        rank, lane, name = bar
        if took:
            self.bars.append((stage, Bar(rank, lane, name, self.now, self.now + took)))
        self.at(self.now + took, lambda: self.give(signal))
        return signal

    def meet(self, signal: Signal, ranks: int, then: Callable[[], None]) -> Signal:
        """Count a rank in; the last one does `then`, which gives the signal."""
        self.met[signal] = self.met.get(signal, 0) + 1
        if self.met[signal] == ranks:
            then()
        return signal

    def queue(self, stage: int, transfer: Transfer) -> None:
        for lane in transfer.lanes:
            self.queues.setdefault(lane, []).append(transfer)
        self.when((transfer.needs,), lambda: self.dispatch(stage))

    def dispatch(self, stage: int) -> None:
        """Start every transfer that is ready and at the head of all its lanes."""
        if stage in self.paused:
            return
        for lane, queued in self.queues.items():
            head = queued[0] if queued and lane[1] == stage else None
            if head is None or head in self.running.setdefault(stage, []) or head.needs not in self.given:
                continue
            if all(self.queues[other][0] is head for other in head.lanes):
                head.began = self.now if head.began < 0 else head.began
                self.running[stage].append(head)
                self._continue(stage, head)

    def _continue(self, stage: int, transfer: Transfer) -> None:
        transfer.resumed = self.now
        began = self.now
        self.at(self.now + transfer.left, lambda: self._finish(stage, transfer, began))

    def _finish(self, stage: int, transfer: Transfer, resumed: int) -> None:
        # An end that was announced before a pause no longer holds.
        if stage in self.paused or transfer not in self.running[stage] or transfer.resumed != resumed:
            return
        self.running[stage].remove(transfer)
        for lane in transfer.lanes:
            self.queues[lane].pop(0)
        for rank in transfer.ranks:
            bar = Bar(rank, transfer.lane, transfer.name, transfer.began, self.now)
            self.bars.append((stage, bar))
        self.give(transfer.done)
        self.dispatch(stage)

    def pause(self, stage: int) -> None:
        # What ends at this very moment has ended.
        for transfer in list(self.running.setdefault(stage, [])):
            transfer.left -= self.now - transfer.resumed
            if transfer.left == 0:
                transfer.left, transfer.resumed = 0, self.now
                self._finish(stage, transfer, self.now)
        self.paused.add(stage)

    def resume(self, stage: int) -> None:
        self.paused.discard(stage)
        for transfer in self.running[stage]:
            self._continue(stage, transfer)
        self.dispatch(stage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """What happened."""

    total: int
    """Nanoseconds, edges included."""
    bars: tuple[tuple[int, Bar], ...]
    """(pipeline stage, bar) in the order they ended."""
    visit_start: dict[tuple[int, int], int]
    """Nanoseconds at which each (pipeline stage, visit) began."""


def play(works: list[Work]) -> Played:
    """Play one EP group's window; arguments as in `replay`."""
    world, starts = World(), dict[tuple[int, int], int]()
    ends = [0] * len(works)
    # What needs nothing is ready when it is issued.
    world.given.add(("now",))
    for p, work in enumerate(works):
        stage = _Stage(world, work, p, len(works), starts, {})
        stage.queue_edges()
        for rank in range(work.shape[2]):
            world.start(stage.rank_programme(rank))
    world.run()
    for p, work in enumerate(works):
        passes = work.shape[0] * (2 if work.stage == "update" else 1)
        assert ("window", p) in world.given or not passes, f"pipeline stage {p} never came to its end"
        ends[p] = world.met[("end", p)]
    return Played(total=max(ends), bars=tuple(world.bars), visit_start=starts)


@dataclass(slots=True, eq=False)
class _Stage:
    """One pipeline stage: its ranks' programmes and its transfers."""

    world: World
    work: Work
    p: int
    stages: int
    starts: dict[tuple[int, int], int]
    slowed: dict[tuple[int, int], int]
    """(visit, rank) to what the visit's pulls, and its layer's publish and collect, still add to the compute."""

    @property
    def itinerary(self) -> Itinerary:
        return self.work.itinerary

    def queue_edges(self) -> None:
        """Queue every layer's publish, then every layer's collect in the order in which layers end."""
        of_layer = {layer: np.flatnonzero(self.itinerary.layer_V == layer) for layer in range(self.work.shape[1])}
        first_L, last_L = ([int(visits[at]) for visits in of_layer.values()] for at in (0, -1))
        for edge, (name, visit_L) in enumerate((("publish", first_L), ("collect", last_L))):
            for layer in np.argsort(visit_L).tolist():
                for rank in range(self.work.shape[2]):
                    at = (int(visit_L[layer]), rank)
                    self.slowed[at] = self.slowed.get(at, 0) + int(self.work.edge_slow_2L[edge, layer])
                needs = ("over", self.p, layer) if name == "collect" else ("now",)
                self._queue_edge(name, layer, int(self.work.edge_ns_2L[edge, layer]), needs)

    def _queue_edge(self, name: str, layer: int, left: int, needs: Signal) -> None:
        p, done = self.p, (name, self.p, layer)
        if left == 0:
            self.world.given.add(done)
            return
        ranks = tuple(range(self.work.shape[2]))
        self.world.queue(p, Transfer(f"{name} {layer}", "edges", ranks, (("edges", p, 0),), left, needs, done))

    def rank_programme(self, rank: int) -> Programme:
        p, layers = self.p, self.work.shape[1]
        for index, one in enumerate(passes_of(self.work, p)):
            needed = waits_for(one, self.stages)
            if needed is not None:
                yield (("sent", needed),)
            for v in range(index * layers, (index + 1) * layers):
                yield (self._together(("visit", p, v), lambda v=v: self._open_visit(v)),)  # type: ignore[misc]
                yield from self._visit(rank, v, one)
                yield (self._together(("through", p, v), lambda v=v: self._close_visit(v)),)  # type: ignore[misc]
            yield (self._together(("pass", p, index), lambda one=one: self._send(one)),)  # type: ignore[misc]
        yield tuple(("collect", p, layer) for layer in range(layers))
        yield (self._together(("window", p), self._close),)

    def _visit(self, rank: int, v: int, one: Pass) -> Programme:
        """One rank's part in one visit: the steps of the model, in order."""
        work, world, p, m = self.work, self.world, self.p, one.micro_step
        layer = int(self.itinerary.layer_V[v])
        at = (m, layer, rank)

        def first(phase: int) -> tuple[int, int]:
            return int(work.exchange_ML[m, layer]), int(work.hidden_ML2[m, layer, phase])

        if one.phase == 0:
            opened = int(work.planning_ML[m, layer] + work.push_ML[m, layer])
            yield (world.busy(p, (rank, "compute", f"react {layer}"), opened),)
        if one.phase == 0 or work.repeats_forward:
            yield (world.busy(p, (rank, "compute", f"attention {layer}"), int(work.attention_MLR[at])),)
            yield (self._exchange(rank, ("dispatch", p, v), at, *first(0)),)
            yield (("publish", p, layer), *self._pulled(v, rank))
            took = int(work.forward_MLR[at]) + self.slowed.pop((v, rank), 0)
            yield (world.busy(p, (rank, "compute", f"experts {layer}"), took),)
            yield (self._exchange(rank, ("combine", p, v), at, int(work.tail_ML2[m, layer, 0])),)
        if one.phase == 1:
            yield (self._exchange(rank, ("combine backward", p, v), at, *first(1)),)
            yield self._pulled(v, rank)
            took = int(work.backward_MLR[at]) + self.slowed.pop((v, rank), 0)
            yield (world.busy(p, (rank, "compute", f"experts backward {layer}"), took),)
            world.give(("ended", p, v, rank))
            yield (self._exchange(rank, ("dispatch backward", p, v), at, int(work.tail_ML2[m, layer, 1])),)
            took = int(work.attention_backward_MLR[at])
            yield (world.busy(p, (rank, "compute", f"attention backward {layer}"), took),)
            back = self._returns_to(v, rank)
            if back:
                yield back
                yield (world.busy(p, (rank, "compute", f"add {layer}"), len(back) * work.tables.add_ns),)

    def _together(self, signal: Signal, then: Callable[[], None]) -> Signal:
        def last() -> None:
            then()
            self.world.give(signal)

        return self.world.meet(signal, self.work.shape[2], last)

    def _exchange(self, rank: int, signal: Signal, at: tuple[int, int, int], took: int, hidden: int = 0) -> Signal:
        """Meet all ranks, then exchange; transfers stand still, also for what is hidden beside the experts."""
        world, p = self.world, self.p

        def begin() -> None:
            world.pause(p)
            end = world.now + took + hidden
            for r in range(self.work.shape[2]):
                bar = Bar(r, "all-to-all", f"{signal[0]} {at[1]}", world.now, end)
                world.bars.append((p, bar))
            world.at(end, lambda: world.resume(p))
            world.at(world.now + took, lambda: world.give(signal))

        # The meeting itself is an event, so that transfers ending at this moment end first.
        return world.meet(signal, self.work.shape[2], lambda: world.at(world.now, begin))

    def _open_visit(self, v: int) -> None:
        """Issue the pulls that may start here, and queue this visit's returns behind them."""
        self.starts[(self.p, v)] = self.world.now
        pulled_V = self.itinerary.pulls_V & ~self.itinerary.resident_V
        for issued in np.flatnonzero(pulled_V & (self.itinerary.ready_from_V == v)).tolist():
            seen: set[tuple[int, int]] = set()
            for at in self._replicas(issued):
                self._queue_pull(issued, at, seen)
        if self.itinerary.phase_V[v] == 1:
            for at in self._replicas(v):
                self._queue_return(v, at)
        self.world.dispatch(self.p)

    def _close_visit(self, v: int) -> None:
        """All ranks are through: after its last visit a layer can be collected."""
        layer = int(self.itinerary.layer_V[v])
        if not (self.itinerary.layer_V[v + 1 :] == layer).any():
            self.world.give(("over", self.p, layer))

    def _queue_pull(self, v: int, at: int, seen: set[tuple[int, int]]) -> None:
        transfers, t, p = self.work.transfers, self.work.tables, self.p
        rank, home = int(transfers.rank_P[at]), int(transfers.home_P[at])
        path = int(transfers.path_P2[at, int(self.itinerary.phase_V[v])])
        took, fixed = (t.host_ns, t.host_fixed_ns) if path else (t.peer_ns, t.peer_fixed_ns)
        lanes = (("host", p, rank),) if path else (("in", p, rank), ("out", p, home))
        name = f"pull from {PATHS[path]} {self.itinerary.layer_V[v]}"
        left = int(took + (0 if (path, rank) in seen else fixed))
        seen.add((path, rank))
        self.slowed[(v, rank)] = (
            self.slowed.get((v, rank), 0) + left * int(t.host_slow_permille if path else t.peer_slow_permille) // 1000
        )
        needs = ("publish", p, int(self.itinerary.layer_V[v]))
        self.world.queue(p, Transfer(name, "pull", (rank,), lanes, left, needs, ("pulled", p, v, at)))

    def _queue_return(self, v: int, at: int) -> None:
        transfers, t, p = self.work.transfers, self.work.tables, self.p
        rank, home = int(transfers.rank_P[at]), int(transfers.home_P[at])
        left = int(t.far_return_ns if transfers.path_P2[at, 1] else t.return_ns)
        name = f"return {self.itinerary.layer_V[v]}"
        lanes = (("out", p, rank), ("in", p, home))
        transfer = Transfer(name, "return", (rank,), lanes, left, ("ended", p, v, rank), ("returned", p, v, at))
        self.world.queue(p, transfer)

    def _replicas(self, v: int) -> range:
        itinerary = self.itinerary
        entry = int(itinerary.micro_step_V[v]) * self.work.shape[1] + int(itinerary.layer_V[v])
        start_ML = self.work.transfers.start_ML
        return range(int(start_ML[entry]), int(start_ML[entry + 1]))

    def _pulled(self, v: int, rank: int) -> tuple[Signal, ...]:
        """Signals of this rank's pulls for the visit; none where nothing is pulled for it."""
        itinerary = self.itinerary
        if not itinerary.pulls_V[v] or itinerary.resident_V[v]:
            return ()
        return tuple(("pulled", self.p, v, at) for at in self._replicas(v) if self.work.transfers.rank_P[at] == rank)

    def _returns_to(self, v: int, rank: int) -> tuple[Signal, ...]:
        home_P = self.work.transfers.home_P
        return tuple(("returned", self.p, v, at) for at in self._replicas(v) if home_P[at] == rank)

    def _send(self, one: Pass) -> None:
        took = int(self.work.send_M[one.micro_step])
        self.world.at(self.world.now + took, lambda: self.world.give(("sent", one)))

    def _close(self) -> None:
        self.world.met[("end", self.p)] = self.world.now
