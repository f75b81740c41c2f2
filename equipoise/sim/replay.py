"""`replay`: run one EP group's window on a clock, visit by visit, all ranks at once. The fast form of `events.py`.

The model, in the words of one visit (one layer of one micro-step on one pipeline stage):
1. Forward: attention of every rank; dispatch, an all-to-all in which all ranks meet; experts, which wait for the pulls
   of this visit; combine, where all meet again.
2. Backward: the forward pass again where activations are not kept; the two exchanges around the experts' backward; then
   attention's backward. A rank that is home to replicas waits there for their gradients, and adds them.
3. A visit begins when all ranks have ended the one before.
4. Pulls of a visit are issued at the start of an earlier visit, by the itinerary. A pull holds its rank's host lane, or
   its rank's incoming and its source's outgoing NVLink lane; a return holds its rank's outgoing and its home's incoming
   lane. Lanes serve in order of issue. All of them stand still during an all-to-all, which has the links to itself.
5. A pull slows the compute beside it: the experts of its visit take longer by a measured share of its time.
6. Publish and collect of displaced experts have a lane of their own, which stands still like the others. It serves the
   publish of every layer, from the window's start on, then the collect of each layer that all ranks are through with.
   A layer's experts, and pulls of them, wait for its publish; the window ends when all is collected. Each slows the
   compute beside it: the experts of its layer's first or last visit take longer by what the plan says.

Because every rank is in the all-to-all at the same time, lanes keep a clock of their own that leaves exchanges out:
a transfer's end is known when it is issued. That is all that makes this form fast.

Knows nanoseconds. Does not know plans.

Invariants (asserted by the tests):
1. Same seconds as `events.py`, on any work.
2. Parts add up to the time of the clock.
3. Nothing is faster for more rows, more transfers or fewer bytes per second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from equipoise.core import Stage
from equipoise.core.compiled import compiled
from equipoise.core.options import PlanOptions
from equipoise.core.plan import Itinerary, Plan, Sends
from equipoise.core.value import Value
from equipoise.cost import CostModel
from equipoise.cost.links import kept_permille
from equipoise.cost.model import Tables
from equipoise.cost.ranks import RankRows, level_rows, rank_rows, visit_ns
from equipoise.loads.forecast import Activations
from equipoise.planner.assemble import FORWARD, build_itinerary
from equipoise.planner.baselines import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS, count_before

NANO = 10**9


# `Work`: what one EP group has to do in one window, in nanoseconds per rank; a plan translated for replaying.
#
# Steps of `work_of`:
# 1. Settle every entry: rows and busy slots of each rank, rows of the busiest links (`cost.ranks`).
# 2. Price them: forward and backward of each rank's experts, attention of each source, one exchange (`cost`).
# 3. List the transfers: pulls ahead of each visit with their path, returns after it.
# 4. Publish and collect of each layer are the plan's own; charges in the open come from its seconds.
#
# Invariants (asserted by the tests):
# 1. Of every entry, the busiest rank's forward + backward and the exchanges are the planner's own compute and
# all-to-all,
#    up to the rank that is busiest in one phase alone.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers(Value):
    """Replicas of a window, sorted by entry (micro-step * L + layer); empty where weights do not move in it."""

    start_ML: np.ndarray
    """[M * L + 1] where each entry's replicas begin."""
    rank_P: np.ndarray
    home_P: np.ndarray
    path_P2: np.ndarray
    """[P, 2] 0 peer, 1 host; forward and backward."""
    has_pulls: bool
    """Whether weights are pulled ahead; where not, they are pushed in the open, and only gradients return."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work(Value):
    """One EP group's window on one pipeline stage; all times in nanoseconds."""

    stage: Stage
    forward_MLR: np.ndarray
    """Experts of each rank."""
    backward_MLR: np.ndarray
    """Experts of each rank, zero in recompute."""
    attention_MLR: np.ndarray
    """Attention and shared experts of each rank, and spreading its tokens to rows and combining them, forward."""
    attention_backward_MLR: np.ndarray
    exchange_ML: np.ndarray
    """One all-to-all."""
    is_across_ML: np.ndarray
    """[M, L] bool, whether its busiest link crosses nodes."""
    planning_ML: np.ndarray
    """Planning between router and dispatch, of policies that react."""
    push_ML: np.ndarray
    """Weights pushed in the open, of policies that react."""
    send_M: np.ndarray
    """Hidden states from one pipeline stage to the next."""
    transfers: Transfers
    slowdown_2: np.ndarray
    """[2] thousandths by which a pull from a peer, or from the host, slows the compute beside it."""
    tables: Tables
    edge_ns_2L: np.ndarray
    """[2, L] publish and collect of each layer."""
    edge_slow_2L: np.ndarray
    """[2, L] what they add to the compute beside them."""
    repeats_forward: bool
    """Whether backward repeats the forward pass."""
    rows_MLR: np.ndarray
    """[M, L, R] rows of each rank."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Micro-steps, layers, ranks."""
        micro_steps, layers, ranks = self.forward_MLR.shape
        return micro_steps, layers, ranks

    @property
    def has_backward(self) -> bool:
        """Whether gradients flow."""
        return self.stage == "update"


class _Settled(NamedTuple):
    """What every rank does in a window."""

    rows_MLR: np.ndarray
    busy_MLR: np.ndarray
    inside_ML: np.ndarray
    across_ML: np.ndarray


def work_of(
    plan: Plan,
    *,
    activations: Activations = "kept",
    sends: Sends = "rows",
    pair_LEE: np.ndarray | None = None,
) -> Work:
    """Translate a plan of one window and EP group.

    Args:
        plan: of any policy
        activations: whether the backward pass repeats the forward pass
        sends: what crosses nodes
        pair_LEE: [L, E, E] tokens that chose both experts, with which the planner thins rows that cross nodes
    """
    cost = CostModel.of(plan.cluster, plan.model, stage=plan.loads.stage)
    settled = _settle(plan, pair_LEE, sends)
    tables = cost.tables(int(settled.busy_MLR.max(initial=1)))
    sent_MLR = plan.loads.load_MLRE.sum(axis=3)
    visits = visit_ns(cost, rows_MLR=settled.rows_MLR, busy_MLR=settled.busy_MLR, sent_MLR=sent_MLR)
    planning_ML, push_ML = _open_charges(plan)
    inside_ML, across_ML = settled.inside_ML * tables.inside_ps, settled.across_ML * tables.across_ps
    return Work(
        stage=plan.loads.stage,
        **visits._asdict(),
        exchange_ML=tables.exchange_fixed_ns + np.maximum(inside_ML, across_ML) // 1000,
        is_across_ML=across_ML > inside_ML,
        planning_ML=planning_ML,
        push_ML=push_ML,
        send_M=-(-sent_MLR.max(axis=(1, 2)) // plan.model.top_k) * tables.across_ps // 1000,
        transfers=_transfers(plan),
        slowdown_2=np.array([cost.profile.peer_slowdown_permille, cost.profile.host_slowdown_permille]),
        tables=tables,
        edge_ns_2L=plan.edge_ns_2L,
        edge_slow_2L=plan.edge_slow_2L,
        repeats_forward=activations == "recomputed" and plan.loads.stage == "update",
        rows_MLR=settled.rows_MLR,
    )


def cut(work: Work, *, micro_steps: slice, layers: slice) -> Work:
    """Some micro-steps and layers of a window, as work of their own; published and collected where its edges are."""
    kept_ML = np.arange(work.exchange_ML.size).reshape(work.exchange_ML.shape)[micro_steps, layers]
    arrays = {f.name: getattr(work, f.name)[micro_steps, layers] for f in fields(work) if "_ML" in f.name}
    transfers = work.transfers
    count_ML = np.diff(transfers.start_ML)
    is_kept_P = np.isin(np.repeat(np.arange(len(count_ML)), count_ML), kept_ML)
    chosen = Transfers(
        start_ML=np.concatenate([[0], np.cumsum(count_ML[kept_ML.reshape(-1)])]),
        rank_P=transfers.rank_P[is_kept_P],
        home_P=transfers.home_P[is_kept_P],
        path_P2=transfers.path_P2[is_kept_P],
        has_pulls=transfers.has_pulls,
    )
    has_edges_21 = np.array([[micro_steps.start == 0], [micro_steps.stop == work.shape[0]]])
    edges = {f.name: getattr(work, f.name)[:, layers] * has_edges_21 for f in fields(work) if f.name.endswith("_2L")}
    return replace(work, **arrays, **edges, send_M=work.send_M[micro_steps], transfers=chosen)


def _settle(plan: Plan, pair_LEE: np.ndarray | None, sends: Sends) -> _Settled:
    """What every rank does, layer by layer."""
    load_MLRE, node_R = plan.loads.load_MLRE, plan.cluster.node_array_R
    expert_MLRS, rows_MLRS = slots_of(plan)
    found: list[RankRows] = []
    top_k, forwards = plan.model.top_k, sends == "tokens"
    none_EE = np.zeros((0, 0), dtype=np.int64)
    for layer in range(plan.loads.num_layers):
        # Copies, because a read-only array would compile the kernels a second time.
        load_MRE, home_E = np.array(load_MLRE[:, layer]), np.array(plan.home_LE[layer])
        pair_EE = none_EE if pair_LEE is None else np.array(pair_LEE[layer], dtype=np.int64, order="C")
        keep_N = kept_permille(node_R[home_E], plan.cluster.num_ep_nodes, pair_EE, top_k)
        if plan.policy == "balanced":
            # Tokens choose as many experts together as they do at the owners.
            found.append(level_rows(load_MRE, node_R, top_k=top_k, forwards=forwards, keep_permille=int(keep_N.mean())))
            continue
        slots = np.array(expert_MLRS[:, layer]), np.array(rows_MLRS[:, layer])
        found.append(rank_rows(load_MRE, home_E, node_R, *slots, keep_N, plan.persistent, top_k, forwards))
    return _Settled(*(np.stack(arrays, axis=1) for arrays in zip(*found, strict=True)))


def slots_of(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Replica slots of a plan: ([M, L, R, S] expert, -1 where empty; [M, L, R, S] rows)."""
    table, ranks = plan.replica_table, plan.cluster.ep
    shape_ML = (plan.loads.num_micro_steps, plan.loads.num_layers)
    place_P = table.entry_P * ranks + table.rank_P
    slot_P = count_before(place_P[None, :])[0]
    width = int(slot_P.max(initial=-1)) + 1
    expert = np.full((shape_ML[0] * shape_ML[1] * ranks, width), -1)
    rows = np.zeros_like(expert)
    expert[place_P, slot_P] = table.expert_P
    rows[place_P, slot_P] = table.rows_P
    shape = (*shape_ML, ranks, width)
    return expert.reshape(shape), rows.reshape(shape)


def _transfers(plan: Plan) -> Transfers:
    """Pulls and returns; none where copies stay for the whole window."""
    table = plan.replica_table
    if plan.persistent:
        return _no_transfers(len(table.start_ML) - 1)
    return Transfers(
        start_ML=table.start_ML,
        rank_P=table.rank_P,
        home_P=plan.home_LE[table.entry_P % plan.loads.num_layers, table.expert_P],
        path_P2=table.path_P2,
        has_pulls=plan.itinerary is not None,
    )


def _no_transfers(entries: int) -> Transfers:
    none = np.zeros(0, dtype=np.int64)
    return Transfers(
        start_ML=np.zeros(entries + 1, dtype=np.int64),
        rank_P=none,
        home_P=none,
        path_P2=np.zeros((0, 2), dtype=np.int64),
        has_pulls=False,
    )


def _open_charges(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """([M, L] planning, [M, L] push): what a policy that reacts to the router does in the open."""
    shape_ML = plan.ns_ML.shape
    if plan.policy == "reactive":
        has_replicas_ML = np.diff(plan.replica_table.start_ML).reshape(shape_ML) > 0
        return np.full(shape_ML, REACTIVE_PLAN_NS), has_replicas_ML * REACTIVE_PUSH_NS
    charged_ns = round(plan.seconds.planning * NANO) // max(1, shape_ML[0] * shape_ML[1])
    return np.full(shape_ML, charged_ns), np.zeros(shape_ML, dtype=np.int64)


# The order of a window: passes over a pipeline stage's layers, visits of each pass, and when pulls may be issued.
#
# A *pass* is one micro-step going once through the layers of one pipeline stage, forward or backward. Passes of a
# stage
# follow one another as its itinerary has them (`planner.itinerary`); passes of different stages wait for each other:
# forward for the stage before, backward for the stage after.
#
# Invariants (asserted by the tests):
# 1. Every pass of every stage appears exactly once, after the passes it waits for.
# 2. A layer's first visit is forward; its last is backward in an update.


class Pass(NamedTuple):
    """One micro-step through one pipeline stage."""

    pipeline_stage: int
    phase: int
    """0 forward, 1 backward."""
    micro_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course(Value):
    """The visits of one pipeline stage, and what is issued at each."""

    itinerary: Itinerary
    passes: tuple[Pass, ...]
    """In execution order; pass i makes visits i * L to i * L + L - 1."""
    issue_start_V: np.ndarray
    """[V + 1] where the visits begin whose pulls are issued at each visit's start."""
    issue_visit_I: np.ndarray
    first_L: np.ndarray
    """[L] the first visit of each layer: its experts wait for their publish there."""
    last_L: np.ndarray
    """[L] the last visit of each layer: it is collected after it."""


def course_of(work: Work, *, depth: int, pipeline_stage: int = 0, pipeline_stages: int = 1) -> Course:
    """Lay out the visits of one pipeline stage.

    Args:
        work: of the stage
        depth: visits ahead that pulls may start
        pipeline_stage: which of the `pipeline_stages`
    """
    micro_steps, layers, _ = work.shape
    needs_ML = np.diff(work.transfers.start_ML).reshape(micro_steps, layers) > 0
    options = PlanOptions(
        depth=depth,
        order="1f1b" if pipeline_stages > 1 else "plain",
        pipeline_stage=pipeline_stage,
        pipeline_stages=pipeline_stages,
    )
    itinerary = build_itinerary(work.stage, needs_ML & work.transfers.has_pulls, options)
    first_V = np.arange(0, len(itinerary), layers)
    passes = tuple(
        Pass(pipeline_stage, int(phase), int(m))
        for phase, m in zip(itinerary.phase_V[first_V], itinerary.micro_step_V[first_V], strict=True)
    )
    pulling = np.flatnonzero(itinerary.pulls_V & ~itinerary.resident_V)
    order = np.argsort(itinerary.ready_from_V[pulling], kind="stable")
    count_V = np.bincount(itinerary.ready_from_V[pulling], minlength=len(itinerary))
    return Course(
        itinerary=itinerary,
        passes=passes,
        issue_start_V=np.concatenate([[0], np.cumsum(count_V)]),
        issue_visit_I=pulling[order],
        first_L=np.unique(itinerary.layer_V, return_index=True)[1],
        last_L=len(itinerary) - 1 - np.unique(itinerary.layer_V[::-1], return_index=True)[1],
    )


def waits_for(one: Pass, pipeline_stages: int) -> Pass | None:
    """The pass of another stage whose result this one needs; None where it needs none."""
    other = one.pipeline_stage + (-1 if one.phase == FORWARD else 1)
    return one._replace(pipeline_stage=other) if 0 <= other < pipeline_stages else None


def in_order(courses: Sequence[Course]) -> list[tuple[int, Pass]]:
    """(index within its stage, pass) of all stages, each after those it waits for."""
    done: set[Pass] = set()
    ordered: list[tuple[int, Pass]] = []
    next_Q = [0] * len(courses)
    total = sum(len(course.passes) for course in courses)
    while len(ordered) < total:
        for stage, course in enumerate(courses):
            while next_Q[stage] < len(course.passes):
                one = course.passes[next_Q[stage]]
                needed = waits_for(one, len(courses))
                if needed is not None and needed not in done:
                    break
                ordered.append((next_Q[stage], one))
                done.add(one)
                next_Q[stage] += 1
    return ordered


COMPUTE, INSIDE, ACROSS, PULL, RETURN, PLANNING, ATTENTION, PUBLISH, COLLECT = range(9)
"""Parts of a stage's busy time, nanoseconds each."""
PEER, HOST, BACK = range(3)
"""Paths: weights from a peer, weights from the host store, gradients back home."""
HOST_LANE, IN_LANE, OUT_LANE = range(3)


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
    start_ML: np.ndarray
    rank_P: np.ndarray
    home_P: np.ndarray
    path_P2: np.ndarray
    visit_V3: np.ndarray
    """[V, 3] micro-step, phase, layer."""
    issue_start_V: np.ndarray
    issue_visit_I: np.ndarray
    published_L: np.ndarray
    """[L] when each layer's publish is done, on the lanes' clock; 0 where nothing is published."""
    collect_V: np.ndarray
    """[V] what is collected after a visit: of the layer whose last visit it is."""
    slowdown_2: np.ndarray
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
    """[2, V] what of it is publish, and what collect."""
    carried: np.ndarray
    """[1] when the lane of publish and collect is free, on the lanes' clock."""
    part_C: np.ndarray
    exposed_3: np.ndarray
    moved_3: np.ndarray
    """[3] what each path's transfers would take in the open, or did."""
    count_3: np.ndarray
    """[3] experts moved by each path."""


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


def replay(works: list[Work], *, depth: int = 1) -> Replayed:
    """Replay one EP group's window.

    Args:
        works: one per pipeline stage, first to last
        depth: visits ahead that pulls may start
    """
    stages = len(works)
    courses = [course_of(work, depth=depth, pipeline_stage=p, pipeline_stages=stages) for p, work in enumerate(works)]
    figures = [_figures(work, course) for work, course in zip(works, courses, strict=True)]
    clocks = [_clock(work, course) for work, course in zip(works, courses, strict=True)]
    now_Q = [0] * stages
    ended: dict[Pass, int] = {}
    for index, one in in_order(courses):
        p, needed = one.pipeline_stage, waits_for(one, stages)
        # Pipeline stages cannot begin before what they need has been sent.
        ready = 0 if needed is None else ended[needed] + int(works[needed.pipeline_stage].send_M[one.micro_step])
        layers = works[p].shape[1]
        now_Q[p] = int(_run_pass(figures[p], clocks[p], index * layers, layers, max(now_Q[p], ready)))
        ended[one] = now_Q[p]
    for p, clock in enumerate(clocks):
        # What is left to collect when all layers are through.
        late = max(0, int(clock.carried[0] + clock.exchanged[0]) - now_Q[p])
        clock.part_C[COLLECT] += late
        now_Q[p] += late
    return Replayed(
        total=max(now_Q),
        part_QC=np.stack([clock.part_C for clock in clocks]),
        exposed_Q3=np.stack([clock.exposed_3 for clock in clocks]),
        moved_Q3=np.stack([np.maximum(clock.moved_3, clock.exposed_3) for clock in clocks]),
        count_Q3=np.stack([clock.count_3 for clock in clocks]),
    )


def _figures(work: Work, course: Course) -> _Figures:
    # Copies, because a read-only array would compile the kernel a second time.
    names = _Figures._fields[:8]
    itinerary, transfers = course.itinerary, work.transfers
    publish_L, collect_L = work.edge_ns_2L
    collect_V = np.zeros(len(itinerary), dtype=np.int64)
    collect_V[course.last_L] = collect_L
    return _Figures(
        **{name: np.array(getattr(work, name)) for name in names},
        start_ML=np.array(transfers.start_ML),
        rank_P=np.array(transfers.rank_P),
        home_P=np.array(transfers.home_P),
        path_P2=np.array(transfers.path_P2),
        visit_V3=np.stack([itinerary.micro_step_V, itinerary.phase_V, itinerary.layer_V], axis=1),
        issue_start_V=np.array(course.issue_start_V),
        issue_visit_I=np.array(course.issue_visit_I),
        published_L=np.where(publish_L > 0, np.cumsum(publish_L), 0),
        collect_V=collect_V,
        slowdown_2=np.array(work.slowdown_2),
        tables=work.tables,
        repeats_forward=work.repeats_forward,
    )


def _clock(work: Work, course: Course) -> _Clock:
    visits, ranks = len(course.itinerary), work.shape[2]
    shapes = (1, (3, ranks), (2, visits, ranks), (visits, ranks), (2, visits), 1, 9, 3, 3, 3)
    clock = _Clock(*(np.zeros(shape, dtype=np.int64) for shape in shapes))
    clock.edge_slow_2V[0, course.first_L], clock.edge_slow_2V[1, course.last_L] = work.edge_slow_2L
    clock.slowed_VR[:] = clock.edge_slow_2V.sum(axis=0)[:, None]
    clock.carried[0] = work.edge_ns_2L[0].sum()
    return clock


@compiled
def _run_pass(f: _Figures, clock: _Clock, first: int, layers: int, now: int) -> int:
    for v in range(first, first + layers):
        _issue_pulls(f, clock, v, now)
        if f.visit_V3[v, 1] == 0:
            now = _react(f, clock, v, now)
            now = _forward(f, clock, v, now)
        else:
            if f.repeats_forward:
                now = _forward(f, clock, v, now)
            now = _backward(f, clock, v, now)
        if f.collect_V[v] > 0:
            clock.carried[0] = max(clock.carried[0], now - clock.exchanged[0]) + f.collect_V[v]
    return now


@compiled
def _react(f: _Figures, clock: _Clock, visit: int, now: int) -> int:
    """Plan and push in the open, where a policy does that."""
    m, _, layer = f.visit_V3[visit]
    planning, push = f.planning_ML[m, layer], f.push_ML[m, layer]
    clock.part_C[PLANNING] += planning
    clock.part_C[PULL] += push
    clock.exposed_3[PEER] += push
    if push > 0:
        entry = m * f.exchange_ML.shape[1] + layer
        clock.count_3[PEER] += f.start_ML[entry + 1] - f.start_ML[entry]
    return now + planning + push


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
                begin = max(begin, lane_3R[HOST_LANE, rank])
            else:
                took = t.peer_ns + (t.peer_fixed_ns if is_first else 0)
                begin = max(begin, max(lane_3R[IN_LANE, rank], lane_3R[OUT_LANE, home]))
                lane_3R[OUT_LANE, home] = begin + took
                load_3R[OUT_LANE, home] += took
            lane = HOST_LANE if path == HOST else IN_LANE
            lane_3R[lane, rank] = begin + took
            load_3R[lane, rank] += took
            clock.count_3[path] += 1
            clock.slowed_VR[v, rank] += took * f.slowdown_2[path] // 1000
            clock.arrive_2VR[path, v, rank] = begin + took
        clock.moved_3[HOST] += load_3R[HOST_LANE].max()
        clock.moved_3[PEER] += load_3R[IN_LANE:].max()


@compiled
def _exchange(f: _Figures, clock: _Clock, m: int, layer: int, now: int) -> int:
    """All ranks meet; lanes stand still."""
    took = f.exchange_ML[m, layer]
    clock.exchanged[0] += took
    clock.part_C[ACROSS if f.is_across_ML[m, layer] else INSIDE] += took
    return now + took


@compiled
def _experts(f: _Figures, clock: _Clock, visit: int, compute_R: np.ndarray, now: int) -> int:
    """Experts of every rank, after their publish and their pulls; returns when the last rank is through."""
    lane_now = now - clock.exchanged[0]
    published = f.published_L[f.visit_V3[visit, 2]]
    last, level, late_path = np.int64(0), np.int64(0), 0
    for r in range(len(compute_R)):
        peer, host = clock.arrive_2VR[PEER, visit, r], clock.arrive_2VR[HOST, visit, r]
        ready = max(published, max(peer, host))
        end = max(np.int64(0), ready - lane_now) + compute_R[r] + clock.slowed_VR[visit, r]
        if end > last:
            last, late_path = end, (PEER if peer >= host else HOST)
        level = max(level, compute_R[r])
    publish = max(np.int64(0), published - lane_now) + clock.edge_slow_2V[0, visit]
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
    attention = f.attention_MLR[m, layer].max()
    clock.part_C[ATTENTION] += attention
    now = _exchange(f, clock, m, layer, now + attention)
    now = _experts(f, clock, visit, f.forward_MLR[m, layer], now)
    return _exchange(f, clock, m, layer, now)


@compiled
def _backward(f: _Figures, clock: _Clock, visit: int, now: int) -> int:
    m, _, layer = f.visit_V3[visit]
    now = _exchange(f, clock, m, layer, now)
    began = now - clock.exchanged[0]
    compute_R = f.backward_MLR[m, layer] + clock.slowed_VR[visit]
    now = _experts(f, clock, visit, f.backward_MLR[m, layer], now)
    back_R, returns_R = _return(f, clock, visit, compute_R, began)
    now = _exchange(f, clock, m, layer, now)
    lane_now = now - clock.exchanged[0]
    attention_R = f.attention_backward_MLR[m, layer]
    level = attention_R.max()
    last = level
    for r in range(len(attention_R)):
        if back_R[r] > 0:
            last = max(last, max(attention_R[r], back_R[r] - lane_now) + returns_R[r] * f.tables.add_ns)
    clock.part_C[ATTENTION] += level
    clock.part_C[RETURN] += last - level
    clock.exposed_3[BACK] += last - level
    return now + last


@compiled
def _return(f: _Figures, clock: _Clock, visit: int, compute_R: np.ndarray, began: int) -> tuple[np.ndarray, np.ndarray]:
    """[R] when the last gradient arrives at each home, on the lanes' clock, 0 where none does; [R] how many arrive."""
    m, _, layer = f.visit_V3[visit]
    t, lane_3R = f.tables, clock.lane_3R
    back_R, returns_R = np.zeros(lane_3R.shape[1], dtype=np.int64), np.zeros(lane_3R.shape[1], dtype=np.int64)
    load_2R = np.zeros((2, lane_3R.shape[1]), dtype=np.int64)
    entry = m * f.exchange_ML.shape[1] + layer
    for p in range(f.start_ML[entry], f.start_ML[entry + 1]):
        rank, home = f.rank_P[p], f.home_P[p]
        pulled = max(clock.arrive_2VR[PEER, visit, rank], clock.arrive_2VR[HOST, visit, rank])
        ended = max(began, pulled) + compute_R[rank]
        begin = max(ended, max(lane_3R[OUT_LANE, rank], lane_3R[IN_LANE, home]))
        back_R[home] = lane_3R[OUT_LANE, rank] = lane_3R[IN_LANE, home] = begin + t.return_ns
        returns_R[home] += 1
        load_2R[0, rank] += t.return_ns
        load_2R[1, home] += t.return_ns
    if f.start_ML[entry + 1] > f.start_ML[entry]:
        clock.moved_3[BACK] += load_2R.max() + returns_R.max() * t.add_ns
        clock.count_3[BACK] += f.start_ML[entry + 1] - f.start_ML[entry]
    return back_R, returns_R
