"""What a result shows of one EP group beside its seconds: balance, bytes between ranks, a timeline.

Knows plans and work. Computes no seconds of its own: the timeline is played by `events.py`.

Invariants (asserted by the tests):
1. The byte matrix holds every row that leaves its rank, once per exchange, and no other.
2. A timeline's bars are those of the shown micro-step; pulls that began before it have a negative start. The first
   one shows what is published, the last one what is collected.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.core.plan import Plan
from equipoise.cost.between import rows_between
from equipoise.loads.skew import skew_ML
from equipoise.sim.clockwork import NANO
from equipoise.sim.events import play
from equipoise.sim.result import Balance, Event
from equipoise.sim.work import Work, cut


def balance_of(rank_load_MLR: np.ndarray) -> Balance:
    """Describe how level the ranks of a window are."""
    return Balance(
        skew_M=skew_ML(rank_load_MLR).mean(axis=1),
        busiest_M=rank_load_MLR.max(axis=2).sum(axis=1),
        mean_M=rank_load_MLR.mean(axis=2).sum(axis=1),
        rank_load_MR=rank_load_MLR.sum(axis=1),
        rank_load_LR=rank_load_MLR.sum(axis=0),
    )


def bytes_between(plans: Sequence[Plan], micro_step: int) -> np.ndarray:
    """[R, R] bytes of all-to-all from source to destination in one micro-step: all layers and exchanges.

    Backward exchanges carry the same rows both ways again.
    """
    first = plans[0]
    rows_RR = np.zeros((first.cluster.ep, first.cluster.ep))
    for plan in plans:
        for layer in range(plan.loads.num_layers):
            rows_RR += _rows_between(plan, micro_step, layer)
    np.fill_diagonal(rows_RR, 0)
    # A dispatched row comes back combined; update does both once more, backward.
    both_ways = rows_RR + rows_RR.T
    times = 2 if first.loads.stage == "update" else 1
    found: np.ndarray = np.rint(both_ways * times * first.model.row_bytes).astype(np.int64)
    return found


def _rows_between(plan: Plan, micro_step: int, layer: int) -> np.ndarray:
    """[R, R] rows from source to the rank that computes them."""
    load_RE, ranks = plan.loads.load_MLRE[micro_step, layer], plan.cluster.ep
    if plan.policy == "balanced":
        return np.repeat(load_RE.sum(axis=1, keepdims=True) / ranks, ranks, axis=1)
    quota_ER, node_R = plan.quota_ER(micro_step, layer), plan.cluster.node_array_R
    between_RR: np.ndarray = rows_between(np.array(load_RE), quota_ER, node_R, plan.persistent)
    return between_RR


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
