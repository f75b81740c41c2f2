"""One EP group's window under one plan per pipeline stage: replayed, and cut into parts, ranks and paths.

Knows replays. Does not know other groups, windows or policies.

Invariants (asserted by the tests):
1. The parts of the group add up to its seconds; what a stage does not do itself is its bubble.
2. The six kinds of seconds of a rank add up to the group's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.core.plan import Plan
from equipoise.core.value import Value
from equipoise.sim.clockwork import NANO
from equipoise.sim.replay import (
    ACROSS,
    ATTENTION,
    COLLECT,
    COMPUTE,
    INSIDE,
    PLANNING,
    PUBLISH,
    PULL,
    RETURN,
    Replayed,
    replay,
)
from equipoise.sim.result import RANK_PARTS, Parts, PathName, PathUse
from equipoise.sim.setting import StepSetting
from equipoise.sim.work import Work, work_of

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
