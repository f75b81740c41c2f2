"""One EP group's window under one plan per pipeline stage: replayed, and cut into parts, ranks and paths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.core.plan import Plan, Sends
from equipoise.core.value import Value
from equipoise.cost.links import rows_between, tokens_between
from equipoise.loads.forecast import Activations
from equipoise.loads.skew import skew_ML
from equipoise.sim.events import play
from equipoise.sim.replay import (
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
    Work,
    cut,
    replay,
    work_of,
)
from equipoise.sim.result import (
    RANK_PARTS,
    Balance,
    Event,
    Parts,
    PathName,
    PathUse,
)
from equipoise.sim.windows import StepSetting

# What a result shows of one EP group beside its seconds: balance, bytes between ranks, a timeline.
#
# Invariants (asserted by the tests):
# 1. The byte matrix holds every row that leaves its rank, once per exchange, and no other; or every token, once for
# each
#    node on the way to its relay there, and once for each rank that it is handed on to.
# 2. A timeline's bars are those of the shown micro-step; pulls that began before it have a negative start. The first
#    one shows what is published, the last one what is collected.


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
    plans: Sequence[Plan], micro_step: int, *, sends: Sends = "rows", activations: Activations = "kept"
) -> np.ndarray:
    """[R, R] bytes of all-to-all from rank to rank in one micro-step: all layers and exchanges.

    Backward exchanges carry the same rows both ways again; where it repeats forward, so does that.
    """
    first = plans[0]
    moved_RR = np.zeros((first.cluster.ep, first.cluster.ep))
    for plan in plans:
        for layer in range(plan.loads.num_layers):
            moved_RR += _moved_between(plan, micro_step, layer, sends)
    np.fill_diagonal(moved_RR, 0)
    # What is dispatched comes back combined.
    both_ways = moved_RR + moved_RR.T
    times = 1 if first.loads.stage == "recompute" else 3 if activations == "recomputed" else 2
    found: np.ndarray = np.rint(both_ways * times * first.model.row_bytes).astype(np.int64)
    return found


def _moved_between(plan: Plan, micro_step: int, layer: int, sends: Sends) -> np.ndarray:
    """[R, R] rows from source to the rank that computes them; or tokens, on their way by relay."""
    load_RE, ranks, node_R = plan.loads.load_MLRE[micro_step, layer], plan.cluster.ep, plan.cluster.node_array_R
    if plan.policy == "balanced":
        # Whole rows, of every source alike: those that are left over go to the ranks behind it, one each.
        row_R1, ahead_RR = load_RE.sum(axis=1, keepdims=True), (np.arange(ranks) - np.arange(ranks)[:, None]) % ranks
        between_RR = row_R1 // ranks + (ahead_RR < row_R1 % ranks)
    else:
        between_RR = rows_between(np.array(load_RE), plan.quota_ER(micro_step, layer), node_R, plan.persistent)
    if sends == "rows":
        return between_RR
    moved_RR: np.ndarray = tokens_between(between_RR, node_R, plan.model.top_k)
    return moved_RR


def timeline_of(work: Work, *, micro_step: int, layers: int, depth: int) -> tuple[Event, ...]:
    """Bars of one micro-step's first layers on one pipeline stage, 0 at its start.

    The micro-step before it is played too, so that pulls find the lanes as they would.
    """
    before = 1 if micro_step > 0 else 0
    part = cut(work, micro_steps=slice(micro_step - before, micro_step + 1), layers=slice(0, layers))
    played = play([part], depth=depth)
    visits = part.shape[1] * (2 if part.has_backward else 1)
    start = played.visit_start[(0, before * visits)] / NANO
    bars = [bar for _, bar in played.bars if bar.end_s > start]
    return tuple(sorted(bar._replace(start_s=bar.start_s - start, end_s=bar.end_s - start) for bar in bars))


# One EP group's window under one plan per pipeline stage: replayed, and cut into parts, ranks and paths.
#
# Invariants (asserted by the tests):
# 1. The parts of the group add up to its seconds; what a stage does not do itself is its bubble.
# 2. The six kinds of seconds of a rank add up to the group's.


PATH_NAMES: tuple[PathName, ...] = ("peer", "host", "return")
"""Paths of replicas, in the order of `replay`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupOutcome(Value):
    """What one group's window took."""

    seconds: Parts
    rank_s_CX: np.ndarray
    """[C, X] seconds of each rank by kind, in the order of RANK_PARTS."""
    paths: tuple[PathUse, ...]
    works: tuple[Work, ...]


def run_group(
    plans: Sequence[Plan],
    *,
    setting: StepSetting,
    depth: int,
    planning_s: float,
    pairs_Q: Sequence[np.ndarray | None],
) -> GroupOutcome:
    """Replay one group's window.

    Args:
        plans: one per pipeline stage
        setting: the step around the experts
        depth: visits ahead that pulls may start
        planning_s: seconds of planning that the window waits for
        pairs_Q: per stage, [L, E, E] tokens that chose both experts, or None
    """
    works = [
        work_of(plan, activations=setting.activations, sends=setting.sends, pair_LEE=pair_LEE)
        for plan, pair_LEE in zip(plans, pairs_Q, strict=True)
    ]
    done = replay(works, depth=depth)
    busy_Q = done.part_QC.sum(axis=1)
    # The stage with most to do waits least: its parts are the critical ones.
    busiest = int(busy_Q.argmax())
    part_C = [int(ns) / NANO for ns in done.part_QC[busiest]]
    seconds = Parts(
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
    )
    return GroupOutcome(
        seconds=seconds,
        rank_s_CX=_rank_seconds(works, done, busy_Q, planning_s),
        paths=(*_paths(plans, done, busiest), _edges(plans, done, busiest)),
        works=tuple(works),
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
    each = plans[0].model.expert_bytes
    return tuple(
        PathUse(
            path=name,
            moved_s=int(done.moved_Q3[busiest, i]) / NANO,
            exposed_s=int(done.exposed_Q3[busiest, i]) / NANO,
            bytes=int(done.count_Q3[:, i].sum()) * each,
        )
        for i, name in enumerate(PATH_NAMES)
    )


def _edges(plans: Sequence[Plan], done: Replayed, busiest: int) -> PathUse:
    """Publish and collect together."""
    moved_ns, exposed_ns = int(plans[busiest].edge_ns_2L.sum()), int(done.part_QC[busiest, [PUBLISH, COLLECT]].sum())
    return PathUse(
        path="edges",
        moved_s=max(moved_ns, exposed_ns) / NANO,
        exposed_s=exposed_ns / NANO,
        bytes=sum(plan.bytes.edge_inside + plan.bytes.edge_across for plan in plans),
    )
