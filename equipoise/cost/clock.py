"""The clock: run one EP group's window visit by visit, all ranks at once. The only predictor of a window's seconds.

`plan`, `analyze`, `simulate` and the report all take their seconds from here. The model of one visit (one layer of one
micro-step on one pipeline stage):
1. Forward: attention of every rank; dispatch, an all-to-all in which all ranks meet; experts, which wait for the pulls
   of this visit; combine, where all ranks meet again.
2. Backward: the forward pass again where activations are not kept; the two exchanges around the experts' backward; then
   attention's backward. A rank that is home to replicas waits there for their gradients, and adds them.
3. A visit begins when all ranks have ended the one before.
4. Pulls of a visit are issued at the start of an earlier visit, by the itinerary. A pull holds its rank's host lane, or
   its rank's incoming and its source's outgoing NVLink lane; a return holds its rank's outgoing and its home's incoming
   lane. Lanes serve in order of issue. All of them pause during an all-to-all, which has the links to itself; where
   waves hide a part of it beside the experts (`waves.py`), all of that is taken to come first.
5. A pull slows the compute beside it: the experts of its visit take longer by a measured share of its time.
6. Publish and collect of displaced experts have a lane of their own, which pauses like the others. It serves the
   publish of every layer, from the window's start on, then the collect of each layer after its last visit. A layer's
   experts, and pulls of them, wait for its publish; the window ends when everything is collected. Each slows the
   compute beside it: the experts of its layer's first or last visit.

Every rank is in the all-to-all at the same time, so lanes keep a clock of their own that leaves exchanges out: the end
of a transfer is known when it is issued, and one pass over the visits is enough. All times are whole nanoseconds.

Invariants (asserted by the tests):
1. Same times and bars as the event-by-event reference (`tests/cost/events.py`), on any work.
2. Parts add up to the time of the clock.
3. Nothing is faster for more rows, more transfers or fewer bytes per second.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.core.plan import Itinerary, Seconds
from equipoise.core.value import Value
from equipoise.cost.model import Tables
from equipoise.cost.work import Work

NANO = 10**9
COMPUTE, INSIDE, ACROSS, PULL, RETURN, PLANNING, ATTENTION, PUBLISH, COLLECT = range(9)
"""Parts of a stage's busy time, nanoseconds each."""
PEER, HOST, BACK = range(3)
"""Paths: weights from a peer, weights from the host store, gradients back home."""
HOST_LANE, IN_LANE, OUT_LANE = range(3)


Lane = Literal["compute", "all-to-all", "pull", "return", "edges"]
BARS: tuple[tuple[Lane, str], ...] = (
    ("compute", "react"),
    ("compute", "attention"),
    ("compute", "experts"),
    ("compute", "experts backward"),
    ("compute", "attention backward"),
    ("compute", "add"),
    ("all-to-all", "dispatch"),
    ("all-to-all", "combine"),
    ("all-to-all", "combine backward"),
    ("all-to-all", "dispatch backward"),
    ("pull", "pull from peer"),
    ("pull", "pull from host"),
    ("return", "return"),
    ("edges", "publish"),
    ("edges", "collect"),
)
"""(lane, name) of each kind of bar."""
REACT_BAR, ATTENTION_BAR, EXPERTS_BAR, EXPERTS_BACKWARD_BAR, ATTENTION_BACKWARD_BAR, ADD_BAR = range(6)
DISPATCH_BAR, COMBINE_BAR, COMBINE_BACKWARD_BAR, DISPATCH_BACKWARD_BAR = range(6, 10)
PULL_BAR, RETURN_BAR, PUBLISH_BAR, COLLECT_BAR = 10, 12, 13, 14


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed(Value):
    """What happened; all times in nanoseconds."""

    total: int
    """From the window's start to its end, edges included."""
    part_QC: np.ndarray
    """[Q, 9] busy time by part."""
    exposed_Q3: np.ndarray
    moved_Q3: np.ndarray
    """[Q, 3] by path."""
    count_Q3: np.ndarray
    """[Q, 3] experts moved by each path."""

    @property
    def seconds(self) -> Seconds:
        """Seconds of the first pipeline stage's expert layers, by part: what a plan of one stage predicts."""
        part_C = [int(ns) / NANO for ns in self.part_QC[0]]
        return Seconds(
            compute=part_C[COMPUTE],
            all_to_all=int(self.part_QC[0, INSIDE] + self.part_QC[0, ACROSS]) / NANO,
            pull=part_C[PULL],
            return_=part_C[RETURN],
            publish=part_C[PUBLISH],
            collect=part_C[COLLECT],
            planning=part_C[PLANNING],
        )


class Pass(NamedTuple):
    """One micro-step through the layers of one pipeline stage, forward or backward."""

    pipeline_stage: int
    phase: int
    """0 forward, 1 backward."""
    micro_step: int


def replay(works: Sequence[Work]) -> Replayed:
    """Run one EP group's window on the clock; `works` has one per pipeline stage, first to last."""
    stages = [_Stage.of(work) for work in works]
    now_Q = [0] * len(works)
    if len(works) == 1:
        # One stage waits for no other, and all its visits are one call.
        now_Q[0] = int(_run_visits(*stages[0], 0, len(works[0].itinerary), 0))
    else:
        ended: dict[Pass, int] = {}
        for index, one in order_passes(works):
            p, needed = one.pipeline_stage, waits_for(one, len(works))
            # A pipeline stage cannot begin before what it needs has been sent.
            ready = 0 if needed is None else ended[needed] + int(works[needed.pipeline_stage].send_M[one.micro_step])
            layers = works[p].shape[1]
            now_Q[p] = ended[one] = int(_run_visits(*stages[p], index * layers, layers, max(now_Q[p], ready)))
    clocks = [stage.clock for stage in stages]
    for p, clock in enumerate(clocks):
        # What is left to collect when all layers are done.
        late = max(0, int(clock.edges_free[0] + clock.exchanged[0]) - now_Q[p])
        clock.part_C[COLLECT] += late
        now_Q[p] += late
    return Replayed(
        total=max(now_Q),
        part_QC=np.stack([clock.part_C for clock in clocks]),
        exposed_Q3=np.stack([clock.exposed_3 for clock in clocks]),
        moved_Q3=np.stack([np.maximum(clock.moved_3, clock.exposed_3) for clock in clocks]),
        count_Q3=np.stack([clock.count_3 for clock in clocks]),
    )


def passes_of(work: Work, pipeline_stage: int) -> list[Pass]:
    """The passes of a stage in execution order; pass i makes visits i * L to i * L + L - 1."""
    itinerary, first_V = work.itinerary, np.arange(0, len(work.itinerary), work.shape[1])
    phases, micro_steps = itinerary.phase_V[first_V].tolist(), itinerary.micro_step_V[first_V].tolist()
    return [Pass(pipeline_stage, phase, m) for phase, m in zip(phases, micro_steps, strict=True)]


def waits_for(one: Pass, pipeline_stages: int) -> Pass | None:
    """The pass of another stage whose result this one needs; None where it needs none."""
    other = one.pipeline_stage + (1 if one.phase else -1)
    return one._replace(pipeline_stage=other) if 0 <= other < pipeline_stages else None


def order_passes(works: Sequence[Work]) -> list[tuple[int, Pass]]:
    """(index within its stage, pass) of all stages, each after those it waits for."""
    passes_Q = [passes_of(work, p) for p, work in enumerate(works)]
    ordered: list[tuple[int, Pass]] = []
    done: set[Pass | None] = {None}
    next_Q = [0] * len(works)
    while len(ordered) < sum(map(len, passes_Q)):
        for p, passes in enumerate(passes_Q):
            while next_Q[p] < len(passes) and waits_for(passes[next_Q[p]], len(works)) in done:
                ordered.append((next_Q[p], passes[next_Q[p]]))
                done.add(passes[next_Q[p]])
                next_Q[p] += 1
    return ordered


class _Figures(NamedTuple):
    """Everything a visit reads."""

    forward_MLR: np.ndarray
    backward_MLR: np.ndarray
    attention_MLR: np.ndarray
    attention_backward_MLR: np.ndarray
    exchange_ML: np.ndarray
    is_across_ML: np.ndarray
    planning_ML: np.ndarray
    push_ML: np.ndarray
    hidden_ML2: np.ndarray
    tail_ML2: np.ndarray
    start_ML: np.ndarray
    rank_P: np.ndarray
    home_P: np.ndarray
    path_P2: np.ndarray
    visit_V3: np.ndarray
    """[V, 3] micro-step, phase, layer."""
    issue_start_V: np.ndarray
    """[V + 1] where the visits begin, in `issue_visit_I`, whose pulls are issued at each visit's start."""
    issue_visit_I: np.ndarray
    published_L: np.ndarray
    """[L] when each layer's publish is done, on the lanes' clock; 0 where nothing is published."""
    collect_V: np.ndarray
    """[V] what is collected after a visit: of the layer whose last visit it is."""
    tables: Tables
    repeats_forward: bool


class _Clock(NamedTuple):
    """Everything a visit changes."""

    exchanged: np.ndarray
    """[1] nanoseconds of all-to-all so far: what the lanes' clock leaves out."""
    lane_3R: np.ndarray
    """[3, R] when each lane is free, on the lanes' clock."""
    arrive_2VR: np.ndarray
    """[2, V, R] when a rank's pulls of a visit have arrived, by path, on the lanes' clock."""
    slowed_VR: np.ndarray
    """[V, R] what a visit's pulls, and its layer's publish and collect, still add to the compute beside them."""
    edge_slow_2V: np.ndarray
    """[2, V] the share of publish, and of collect, in `slowed_VR`."""
    edges_free: np.ndarray
    """[1] when the lane of publish and collect is free, on the lanes' clock."""
    part_C: np.ndarray
    exposed_3: np.ndarray
    moved_3: np.ndarray
    """[3] what each path's transfers would take with nothing to hide behind, or did."""
    count_3: np.ndarray
    """[3] experts moved by each path."""
    begin_V: np.ndarray
    """[V] when each visit begins."""
    log_I6: np.ndarray
    """[I, 6] bars of a timeline: kind, rank (-1: all), layer, start, end, and when a transfer was issued. Transfers are
    on the lanes' clock; other bars are on the clock itself and have -1 in the last column. Empty: nothing is logged."""
    logged: np.ndarray
    """[1] bars in the log."""


class _Stage(NamedTuple):
    """One pipeline stage."""

    figures: _Figures
    clock: _Clock

    @classmethod
    def of(cls, work: Work, log_size: int = 0) -> "_Stage":
        itinerary, transfers = work.itinerary, work.transfers
        visits, ranks = len(itinerary), work.shape[2]
        # When the pulls of a visit are issued; a layer's experts wait for their publish at its first visit, and it is
        # collected after its last.
        pulling = np.flatnonzero(itinerary.pulls_V & ~itinerary.resident_V)
        count_V = np.bincount(itinerary.ready_from_V[pulling], minlength=visits)
        first_L, last_L = layer_ends(itinerary)
        publish_L, collect_L = work.edge_ns_2L
        collect_V = np.zeros(visits, dtype=np.int64)
        collect_V[last_L] = collect_L
        # Copies, because a read-only array would compile the kernels a second time.
        figures = _Figures(
            **{name: np.array(getattr(work, name)) for name in _Figures._fields[:10]},
            **{name: np.array(getattr(transfers, name)) for name in _Figures._fields[10:14]},
            visit_V3=np.stack([itinerary.micro_step_V, itinerary.phase_V, itinerary.layer_V], axis=1),
            issue_start_V=np.concatenate([[0], np.cumsum(count_V)]),
            issue_visit_I=pulling[np.argsort(itinerary.ready_from_V[pulling], kind="stable")],
            published_L=np.where(publish_L > 0, np.cumsum(publish_L), 0),
            collect_V=collect_V,
            tables=work.tables,
            repeats_forward=work.repeats_forward,
        )
        sizes = (1, (3, ranks), (2, visits, ranks), (visits, ranks), (2, visits), 1, 9, 3, 3, 3, visits)
        clock = _Clock(*(np.zeros(size, dtype=np.int64) for size in (*sizes, (log_size, 6), 1)))
        clock.edge_slow_2V[0, first_L], clock.edge_slow_2V[1, last_L] = work.edge_slow_2L
        clock.slowed_VR[:] = clock.edge_slow_2V.sum(axis=0)[:, None]
        clock.edges_free[0] = publish_L.sum()
        return cls(figures, clock)


def layer_ends(itinerary: Itinerary) -> tuple[np.ndarray, np.ndarray]:
    """([L] the first visit of each layer, [L] its last)."""
    first_L = np.unique(itinerary.layer_V, return_index=True)[1]
    last_L = len(itinerary) - 1 - np.unique(itinerary.layer_V[::-1], return_index=True)[1]
    return first_L, last_L


@compiled
def _run_visits(f: _Figures, clock: _Clock, first: int, count: int, now: int) -> int:
    """Run visits one after another, the first of them at `now`; return when the last one ends."""
    for v in range(first, first + count):
        m, phase, layer = f.visit_V3[v]
        clock.begin_V[v] = now
        _issue_pulls(f, clock, v, now)
        if phase == 0:
            # Policies that react plan, and push weights, between router and dispatch.
            planning, push = f.planning_ML[m, layer], f.push_ML[m, layer]
            if planning + push > 0:
                _log(clock, REACT_BAR, -1, layer, now, now + planning + push, -1)
            clock.part_C[PLANNING] += planning
            clock.part_C[PULL] += push
            clock.exposed_3[PEER] += push
            if push > 0:
                entry = m * f.exchange_ML.shape[1] + layer
                clock.count_3[PEER] += f.start_ML[entry + 1] - f.start_ML[entry]
            now = _forward(f, clock, v, now + planning + push)
        else:
            if f.repeats_forward:
                now = _forward(f, clock, v, now)
            now = _backward(f, clock, v, now)
        if f.collect_V[v] > 0:
            begin = max(clock.edges_free[0], now - clock.exchanged[0])
            clock.edges_free[0] = begin + f.collect_V[v]
            _log(clock, COLLECT_BAR, -1, layer, begin, begin + f.collect_V[v], now)
    return now


@compiled
def _issue_pulls(f: _Figures, clock: _Clock, visit: int, now: int) -> None:
    """Put the pulls that may start at this visit on their lanes."""
    t, lane_3R = f.tables, clock.lane_3R
    for i in range(f.issue_start_V[visit], f.issue_start_V[visit + 1]):
        v = f.issue_visit_I[i]
        m, phase, layer = f.visit_V3[v]
        entry = m * f.exchange_ML.shape[1] + layer
        load_3R = np.zeros(lane_3R.shape, dtype=np.int64)
        for p in range(f.start_ML[entry], f.start_ML[entry + 1]):
            rank, home, path = f.rank_P[p], f.home_P[p], f.path_P2[p, phase]
            # A batch pays the fixed part of a path once.
            is_first = clock.arrive_2VR[path, v, rank] == 0
            begin = max(now - clock.exchanged[0], f.published_L[layer])
            if path == HOST:
                took = t.host_ns + (t.host_fixed_ns if is_first else 0)
                slow_permille = t.host_slow_permille
                begin = max(begin, lane_3R[HOST_LANE, rank])
            else:
                took = t.peer_ns + (t.peer_fixed_ns if is_first else 0)
                slow_permille = t.peer_slow_permille
                begin = max(begin, max(lane_3R[IN_LANE, rank], lane_3R[OUT_LANE, home]))
                lane_3R[OUT_LANE, home] = begin + took
                load_3R[OUT_LANE, home] += took
            lane = HOST_LANE if path == HOST else IN_LANE
            lane_3R[lane, rank] = begin + took
            load_3R[lane, rank] += took
            clock.count_3[path] += 1
            clock.slowed_VR[v, rank] += took * slow_permille // 1000
            clock.arrive_2VR[path, v, rank] = begin + took
            _log(clock, PULL_BAR + path, rank, layer, begin, begin + took, now)
        clock.moved_3[HOST] += load_3R[HOST_LANE].max()
        clock.moved_3[PEER] += load_3R[IN_LANE:].max()


@compiled
def _meet(f: _Figures, clock: _Clock, visit: int, now: int, bar: int, took: int, hidden: int) -> int:
    """All ranks meet; lanes pause, also while what is hidden runs beside the experts."""
    m, _, layer = f.visit_V3[visit]
    clock.exchanged[0] += took + hidden
    clock.part_C[ACROSS if f.is_across_ML[m, layer] else INSIDE] += took
    _log(clock, bar, -1, layer, now, now + took + hidden, -1)
    return now + took


@compiled
def _wait(ready: int, lane_now: int, hidden: int) -> int:
    """How long experts wait for a transfer that is ready at a time of the lanes' clock.

    That clock stands still at `lane_now + hidden` while what is hidden runs, so it is `lane_now` when experts begin.
    """
    return ready - lane_now if ready > lane_now + hidden else 0


@compiled
def _experts(f: _Figures, clock: _Clock, visit: int, compute_R: np.ndarray, now: int, hidden: int, bar: int) -> int:
    """Experts of every rank, after their publish and their pulls; return when the last rank is done."""
    lane_now = now - clock.exchanged[0]
    layer = f.visit_V3[visit, 2]
    published = f.published_L[layer]
    last, level, late_path = np.int64(0), np.int64(0), 0
    for r in range(len(compute_R)):
        peer, host = clock.arrive_2VR[PEER, visit, r], clock.arrive_2VR[HOST, visit, r]
        waited = _wait(max(published, max(peer, host)), lane_now, hidden)
        end = waited + compute_R[r] + clock.slowed_VR[visit, r]
        _log(clock, bar, r, layer, now + waited, now + end, -1)
        if end > last:
            last, late_path = end, (PEER if peer >= host else HOST)
        level = max(level, compute_R[r])
    publish = _wait(published, lane_now, hidden) + clock.edge_slow_2V[0, visit]
    collect = clock.edge_slow_2V[1, visit]
    pull = last - level - publish - collect
    # A visit that runs forward twice is slowed once.
    clock.slowed_VR[visit] = 0
    clock.edge_slow_2V[:, visit] = 0
    clock.part_C[COMPUTE] += level
    clock.part_C[PUBLISH] += publish
    clock.part_C[COLLECT] += collect
    clock.part_C[PULL] += pull
    clock.exposed_3[late_path] += pull
    return int(now + last)


@compiled
def _forward(f: _Figures, clock: _Clock, visit: int, now: int) -> int:
    m, _, layer = f.visit_V3[visit]
    attention_R = f.attention_MLR[m, layer]
    for r in range(len(attention_R)):
        _log(clock, ATTENTION_BAR, r, layer, now, now + attention_R[r], -1)
    clock.part_C[ATTENTION] += attention_R.max()
    hidden = f.hidden_ML2[m, layer, 0]
    now = _meet(f, clock, visit, now + attention_R.max(), DISPATCH_BAR, f.exchange_ML[m, layer], hidden)
    now = _experts(f, clock, visit, f.forward_MLR[m, layer], now, hidden, EXPERTS_BAR)
    return _meet(f, clock, visit, now, COMBINE_BAR, f.tail_ML2[m, layer, 0], 0)


@compiled
def _backward(f: _Figures, clock: _Clock, visit: int, now: int) -> int:
    m, _, layer = f.visit_V3[visit]
    hidden = f.hidden_ML2[m, layer, 1]
    now = _meet(f, clock, visit, now, COMBINE_BACKWARD_BAR, f.exchange_ML[m, layer], hidden)
    compute_R = f.backward_MLR[m, layer] + clock.slowed_VR[visit]
    issued, exchanged = now, clock.exchanged[0]
    now = _experts(f, clock, visit, f.backward_MLR[m, layer], now, hidden, EXPERTS_BACKWARD_BAR)
    back_R, returns_R = _return(f, clock, visit, compute_R, issued, exchanged)
    now = _meet(f, clock, visit, now, DISPATCH_BACKWARD_BAR, f.tail_ML2[m, layer, 1], 0)
    lane_now = now - clock.exchanged[0]
    attention_R = f.attention_backward_MLR[m, layer]
    level = attention_R.max()
    last = level
    for r in range(len(attention_R)):
        _log(clock, ATTENTION_BACKWARD_BAR, r, layer, now, now + attention_R[r], -1)
        if back_R[r] > 0:
            begin, add = max(attention_R[r], back_R[r] - lane_now), returns_R[r] * f.tables.add_ns
            _log(clock, ADD_BAR, r, layer, now + begin, now + begin + add, -1)
            last = max(last, begin + add)
    clock.part_C[ATTENTION] += level
    clock.part_C[RETURN] += last - level
    clock.exposed_3[BACK] += last - level
    return now + last


@compiled
def _return(
    f: _Figures, clock: _Clock, visit: int, compute_R: np.ndarray, issued: int, exchanged: int
) -> tuple[np.ndarray, np.ndarray]:
    """[R] when the last gradient arrives at each home, on the lanes' clock, 0 where none does; [R] how many arrive."""
    m, _, layer = f.visit_V3[visit]
    t, lane_3R, hidden, lane_now = f.tables, clock.lane_3R, f.hidden_ML2[m, layer, 1], issued - exchanged
    back_R, returns_R = np.zeros(lane_3R.shape[1], dtype=np.int64), np.zeros(lane_3R.shape[1], dtype=np.int64)
    load_2R = np.zeros((2, lane_3R.shape[1]), dtype=np.int64)
    entry = m * f.exchange_ML.shape[1] + layer
    for p in range(f.start_ML[entry], f.start_ML[entry + 1]):
        rank, home = f.rank_P[p], f.home_P[p]
        pulled = max(clock.arrive_2VR[PEER, visit, rank], clock.arrive_2VR[HOST, visit, rank])
        ended = lane_now + _wait(pulled, lane_now, hidden) + compute_R[rank]
        # Before what is hidden has ended, the lanes' clock stands still.
        ended = max(ended, lane_now + hidden)
        begin = max(ended, max(lane_3R[OUT_LANE, rank], lane_3R[IN_LANE, home]))
        # Only what comes from another node is pulled from the host.
        took = t.far_return_ns if f.path_P2[p, 1] == HOST else t.return_ns
        back_R[home] = lane_3R[OUT_LANE, rank] = lane_3R[IN_LANE, home] = begin + took
        _log(clock, RETURN_BAR, rank, layer, begin, begin + took, issued + hidden)
        returns_R[home] += 1
        load_2R[0, rank] += took
        load_2R[1, home] += took
    if f.start_ML[entry + 1] > f.start_ML[entry]:
        clock.moved_3[BACK] += load_2R.max() + returns_R.max() * t.add_ns
        clock.count_3[BACK] += f.start_ML[entry + 1] - f.start_ML[entry]
    return back_R, returns_R


@compiled
def _log(clock: _Clock, bar: int, rank: int, layer: int, start: int, end: int, issued: int) -> None:
    """Add a bar to the log, if one is kept."""
    at = clock.logged[0]
    if at < len(clock.log_I6):
        row = clock.log_I6[at]
        row[0], row[1], row[2], row[3], row[4], row[5] = bar, rank, layer, start, end, issued
        clock.logged[0] += 1


class Bar(NamedTuple):
    """What one rank did for some time."""

    rank: int
    lane: Lane
    name: str
    start_ns: int
    end_ns: int


def draw(work: Work) -> tuple[list[Bar], np.ndarray]:
    """Run the window of one pipeline stage and draw every bar of it: (bars, sorted, [V] when each visit begins)."""
    visits, ranks = len(work.itinerary), work.shape[2]
    # At most seven bars per visit and rank, five for all ranks, a pull each way and a return per replica, and edges.
    most = visits * (7 * ranks + 5) + 3 * len(work.transfers.rank_P) + 2 * work.shape[1]
    figures, clock = _Stage.of(work, log_size=most)
    ends_L = np.cumsum(work.edge_ns_2L[0])
    for layer, took in enumerate(work.edge_ns_2L[0].tolist()):
        if took:
            _log(clock, PUBLISH_BAR, -1, layer, ends_L[layer] - took, ends_L[layer], 0)
    _run_visits(figures, clock, 0, visits, 0)
    assert clock.logged[0] < most, "the log has room for every bar"
    log_I6 = clock.log_I6[: clock.logged[0]]
    start_I, end_I = _on_the_clock(log_I6)
    bars = []
    for (kind, rank, layer, *_), start, end in zip(log_I6.tolist(), start_I.tolist(), end_I.tolist(), strict=True):
        lane, name = BARS[kind]
        if end > start or lane != "compute":
            bars += [Bar(r, lane, f"{name} {layer}", start, end) for r in (range(ranks) if rank < 0 else (rank,))]
    return sorted(bars), clock.begin_V


def _on_the_clock(log_I6: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([I] start, [I] end) of every logged bar on the clock itself: transfers pause during each all-to-all."""
    start_I, end_I, issued_I = log_I6[:, 3].copy(), log_I6[:, 4].copy(), log_I6[:, 5]
    meets = (log_I6[:, 0] >= DISPATCH_BAR) & (log_I6[:, 0] < PULL_BAR)
    before_X = np.concatenate([[0], np.cumsum(end_I[meets] - start_I[meets])])
    lane_X = start_I[meets] - before_X[:-1]
    moves = issued_I >= 0
    # A transfer that ends when an exchange begins has ended; one that is issued after it starts after it.
    for ns_I in (start_I, end_I):
        ns_I[moves] += before_X[np.searchsorted(lane_X, ns_I[moves], side="left")]
        ns_I[moves] = np.maximum(ns_I[moves], issued_I[moves])
    return start_I, end_I
