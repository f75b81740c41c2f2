"""One EP group's window under one plan per pipeline stage: run on the clock, and split into parts, ranks and paths.

The clock itself is `cost.clock`, which plans take their seconds from, too: for one pipeline stage whose activations are
kept, the parts of a window are its plan's own predicted seconds, and attention beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from equipoise.core import LoadMatrix, LoadsError
from equipoise.core.options import Activations, PlanOptions
from equipoise.core.plan import Plan, Sends
from equipoise.core.split import BLIND
from equipoise.core.value import Value
from equipoise.cost import CostModel
from equipoise.cost.clock import (
    ACROSS,
    ATTENTION,
    COLLECT,
    COMPUTE,
    INSIDE,
    NANO,
    PLANNING,
    PUBLISH,
    PULL,
    RETURN,
    Replayed,
    draw,
    replay,
)
from equipoise.cost.links import rows_between, tokens_between
from equipoise.cost.work import Decision, Transfers, Work, works_of
from equipoise.loads.skew import skew_ML
from equipoise.planner.assemble import build_itinerary
from equipoise.sim.result import RANK_PARTS, Balance, Parts, PathName, PathUse, TimelineEvent

_ROWS = (
    "forward_MLR",
    "backward_MLR",
    "attention_MLR",
    "attention_backward_MLR",
    "exchange_ML",
    "tail_ML2",
    "hidden_ML2",
    "planning_ML",
    "push_ML",
    "send_M",
)
"""What rows take, as opposed to experts."""
PATH_NAMES: tuple[PathName, ...] = ("peer", "host", "return")
"""Paths of replicas, in the order of the clock."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupOutcome(Value):
    """What one group's window took."""

    seconds: Parts
    rank_s_CX: np.ndarray
    """[C, X] seconds of each rank by kind, in the order of RANK_PARTS."""
    paths: tuple[PathUse, ...]
    works: tuple[Work, ...]
    waves: int = 1
    """The most of its plans."""
    waves_saved_s: float = 0.0
    """What these save against the same plans in one wave."""


def plan_work(
    plan: Plan,
    *,
    options: PlanOptions | None = None,
    activations: Activations = "kept",
    sends: Sends = "tokens",
    pair_LEE: np.ndarray | None = None,
    live: LoadMatrix | None = None,
) -> Work:
    """Price what every rank does under a plan of one window, EP group and pipeline stage.

    Args:
        plan: of any policy
        options: execution order, where the plan has none of its own because it is not executed
        activations: whether the backward pass repeats the forward pass
        sends: what crosses nodes
        pair_LEE: [L, E, E] tokens that chose both experts, which thin the rows that cross nodes
        live: the rows that really come, where they are not the planned ones; replicas take what `live_rows` says
    """
    stage, itinerary = plan.loads.stage, plan.itinerary
    loads, decision = plan.loads, Decision.of(plan)
    if live is not None:
        # Waves of other rows than the planned ones are taken to be level.
        replicas = replace(plan.replica_table, rows_P=live_rows(plan, live))
        loads, decision = live, decision._replace(replicas=replicas, rows_MLRS=None)
    if itinerary is None:
        itinerary = build_itinerary(stage, np.zeros(plan.ns_ML.shape, dtype=np.bool_), options or PlanOptions())
    cost = CostModel.of(plan.cluster, plan.model, stage=stage, sends=sends)
    repeats_forward = activations == "recomputed" and stage == "update"
    [work] = works_of(cost, loads, itinerary, [decision], pair_LEE=pair_LEE, repeats_forward=repeats_forward)
    return work


def live_rows(plan: Plan, live: LoadMatrix) -> np.ndarray:
    """[P] rows that each replica takes when other rows come than were planned, as `layer.dispatch.assign_slots` has it.

    Holders of an expert take a source's rows in ascending rank order, each at most as many as planned; all others go
    home. So no rank ever takes more rows as a replica than its plan says.
    """
    if (live.stage, live.load_MLRE.shape) != (plan.loads.stage, plan.loads.load_MLRE.shape):
        raise LoadsError(
            f"live rows are of stage {live.stage} and shape {live.load_MLRE.shape}, the plan of {plan.loads.stage} and "
            f"{plan.loads.load_MLRE.shape} (micro-steps, layers, ranks, experts); give the same window's"
        )
    table, layers = plan.replica_table, plan.loads.num_layers
    rows_P = np.zeros(len(table), dtype=np.int64)
    for entry in np.unique(table.entry_P).tolist():
        cut = slice(int(table.start_ML[entry]), int(table.start_ML[entry + 1]))
        where = divmod(entry, layers)
        end_RER = plan.split_RER(*where).cumsum(axis=2)
        taken_RER = np.diff(np.minimum(end_RER, live.load_MLRE[where][..., None]), axis=2, prepend=0)
        rows_P[cut] = taken_RER.sum(axis=0)[table.expert_P[cut], table.rank_P[cut]]
    return rows_P


def owners_LR(plan: Plan) -> np.ndarray:
    """[L, R] different owners of the experts at home on each rank; 1 where none is displaced."""
    layers, ranks = plan.loads.num_layers, plan.cluster.ep
    is_home_LRR = np.zeros((layers, ranks, ranks), dtype=np.int64)
    is_home_LRR[np.arange(layers)[:, None], plan.home_LE, plan.owner_E] = 1
    return is_home_LRR.sum(axis=2)


def replica_rows_MLR(plan: Plan) -> np.ndarray:
    """[M, L, R] rows that each rank's replicas take as planned, and at most if other rows come."""
    table = plan.replica_table
    rows_XR = np.zeros((len(table.start_ML) - 1, plan.cluster.ep), dtype=np.int64)
    np.add.at(rows_XR, (table.entry_P, table.rank_P), table.rows_P)
    return rows_XR.reshape(*plan.ns_ML.shape, -1)


def overhead_seconds(work: Work) -> float:
    """Return what pulls, returns, publish and collect take with nothing to hide behind: the most that they can add.

    Seconds are lengths of longest paths, so those of rows and transfers together are at most those of each alone.
    """
    idle = {f.name: np.zeros_like(getattr(work, f.name)) for f in fields(work) if f.name in _ROWS}
    return replay([replace(work, **idle)]).total / NANO


def run_group(plans: Sequence[Plan], works: Sequence[Work], *, planning_s: float) -> GroupOutcome:
    """Run one group's window on the clock, with a plan and its work per pipeline stage.

    `planning_s` are seconds of planning that the window waits for.
    """
    done = replay(works)
    busy_Q = done.part_QC.sum(axis=1)
    # The stage with most to do waits least: its parts are the critical ones.
    busiest = int(busy_Q.argmax())
    part_C = [int(ns) / NANO for ns in done.part_QC[busiest]]
    return GroupOutcome(
        seconds=Parts(
            compute=part_C[COMPUTE],
            all_to_all_inside=part_C[INSIDE],
            all_to_all_across=part_C[ACROSS],
            pull=part_C[PULL],
            return_=part_C[RETURN],
            publish=part_C[PUBLISH],
            collect=part_C[COLLECT],
            planning=part_C[PLANNING] + planning_s,
            attention=part_C[ATTENTION],
            bubble=(done.total - int(busy_Q[busiest])) / NANO,
        ),
        rank_s_CX=_rank_seconds(works, done, busy_Q, planning_s),
        paths=_paths(plans, done, busiest),
        works=tuple(works),
        waves=max(plan.waves for plan in plans),
    )


def _rank_seconds(works: Sequence[Work], done: Replayed, busy_Q: np.ndarray, planning_s: float) -> np.ndarray:
    stages = []
    for p, work in enumerate(works):
        times = 2 if work.repeats_forward else 1
        compute_R = (times * work.forward_MLR + work.backward_MLR).sum(axis=(0, 1))
        attention_R = (times * work.attention_MLR + work.attention_backward_MLR).sum(axis=(0, 1))
        part_C = done.part_QC[p]
        exchange = part_C[INSIDE] + part_C[ACROSS]
        edges = part_C[PUBLISH] + part_C[COLLECT] + part_C[PLANNING] + work.push_ML.sum()
        wait_R = busy_Q[p] - compute_R - attention_R - exchange - edges + round(planning_s * NANO)
        kinds = (compute_R, attention_R, exchange, edges, wait_R, done.total - busy_Q[p])
        stages.append(np.stack([np.broadcast_to(kind, wait_R.shape) for kind in kinds]))
    assert len(stages[0]) == len(RANK_PARTS), "one line per kind of seconds"
    return np.concatenate(stages, axis=1) / NANO


def _paths(plans: Sequence[Plan], done: Replayed, busiest: int) -> tuple[PathUse, ...]:
    """Use of every path; publish and collect together are the path "edges"."""
    each = plans[0].model.expert_bytes
    replicas = (
        PathUse(
            path=name,
            moved_s=int(done.moved_Q3[busiest, i]) / NANO,
            exposed_s=int(done.exposed_Q3[busiest, i]) / NANO,
            bytes=int(done.count_Q3[:, i].sum()) * each,
        )
        for i, name in enumerate(PATH_NAMES)
    )
    moved_ns, exposed_ns = int(plans[busiest].edge_ns_2L.sum()), int(done.part_QC[busiest, [PUBLISH, COLLECT]].sum())
    edges = PathUse(
        path="edges",
        moved_s=max(moved_ns, exposed_ns) / NANO,
        exposed_s=exposed_ns / NANO,
        bytes=sum(plan.bytes.edge_inside + plan.bytes.edge_across for plan in plans),
    )
    return (*replicas, edges)


def balance_of(rank_load_MLR: np.ndarray) -> Balance:
    """Describe how level the ranks of a window are."""
    return Balance(
        skew_M=skew_ML(rank_load_MLR).mean(axis=1),
        busiest_M=rank_load_MLR.max(axis=2).sum(axis=1),
        mean_M=rank_load_MLR.mean(axis=2).sum(axis=1),
        rank_load_MR=rank_load_MLR.sum(axis=1),
        rank_load_LR=rank_load_MLR.sum(axis=0),
    )


def bytes_between(
    plans: Sequence[Plan], micro_step: int, *, sends: Sends = "tokens", activations: Activations = "kept"
) -> np.ndarray:
    """Return [R, R] bytes of all-to-all from rank to rank in one micro-step: all layers and exchanges.

    Backward exchanges carry the same rows both ways again; where it repeats forward, so does that. With `sends` tokens,
    a token counts once for each node it is sent to, and once for each rank it is forwarded to there.
    """
    first = plans[0]
    ranks, node_R = first.cluster.ep, first.cluster.node_array_R
    ahead_RR = (np.arange(ranks) - np.arange(ranks)[:, None]) % ranks
    moved_RR = np.zeros((ranks, ranks))
    for plan in plans:
        for layer in range(plan.loads.num_layers):
            load_RE = np.array(plan.loads.load_MLRE[micro_step, layer])
            if plan.policy == "balanced":
                # Whole rows, of every source alike: those that are left over go to the ranks behind it, one each.
                row_R1 = load_RE.sum(axis=1, keepdims=True)
                rows_RR = row_R1 // ranks + (ahead_RR < row_R1 % ranks)
            else:
                rows_RR = rows_between(load_RE, plan.quota_ER(micro_step, layer), node_R, plan.policy in BLIND)
            moved_RR += rows_RR if sends == "rows" else tokens_between(rows_RR, node_R, plan.model.top_k)
    np.fill_diagonal(moved_RR, 0)
    # Dispatched rows are returned combined.
    both_ways = moved_RR + moved_RR.T
    times = 1 if first.loads.stage == "recompute" else 3 if activations == "recomputed" else 2
    found: np.ndarray = np.rint(both_ways * times * first.model.row_bytes).astype(np.int64)
    return found


def timeline_of(work: Work, *, micro_step: int, layers: int) -> tuple[TimelineEvent, ...]:
    """Return the bars of one micro-step's first layers on one pipeline stage, 0 at its start.

    The micro-step before it is run too, so that pulls find the lanes as they would.
    """
    before = 1 if micro_step > 0 else 0
    part = cut(work, micro_steps=slice(micro_step - before, micro_step + 1), layers=slice(0, layers))
    bars, begin_V = draw(part)
    start = int(begin_V[before * part.shape[1] * (2 if part.stage == "update" else 1)]) / NANO
    return tuple(
        TimelineEvent(bar.rank, bar.lane, bar.name, bar.start_ns / NANO - start, bar.end_ns / NANO - start)
        for bar in bars
        if bar.end_ns / NANO > start
    )


def cut(work: Work, *, micro_steps: slice, layers: slice) -> Work:
    """Cut some micro-steps and layers out of a window; they publish and collect if they are at its edges."""
    kept_ML = np.arange(work.exchange_ML.size).reshape(work.exchange_ML.shape)[micro_steps, layers]
    arrays = {f.name: getattr(work, f.name)[micro_steps, layers] for f in fields(work) if "_ML" in f.name}
    transfers, count_ML = work.transfers, np.diff(work.transfers.start_ML)
    is_kept_P = np.isin(np.repeat(np.arange(len(count_ML)), count_ML), kept_ML)
    chosen = Transfers(
        start_ML=np.concatenate([[0], np.cumsum(count_ML[kept_ML.reshape(-1)])]),
        rank_P=transfers.rank_P[is_kept_P],
        home_P=transfers.home_P[is_kept_P],
        path_P2=transfers.path_P2[is_kept_P],
    )
    needs_ML = (count_ML[kept_ML] > 0) & work.itinerary.pulls_V.any()
    itinerary = build_itinerary(work.stage, needs_ML, PlanOptions(depth=work.itinerary.depth))
    has_edges_21 = np.array([[micro_steps.start == 0], [micro_steps.stop == work.shape[0]]])
    edges = {f.name: getattr(work, f.name)[:, layers] * has_edges_21 for f in fields(work) if f.name.endswith("_2L")}
    return replace(work, **arrays, **edges, itinerary=itinerary, send_M=work.send_M[micro_steps], transfers=chosen)
