"""What a result shows of one EP group beside its seconds: balance, bytes between ranks, a timeline.

Knows plans and work. Computes no seconds of its own: the timeline is played by `events.py`.

Invariants (asserted by the tests):
1. The byte matrix holds every row that leaves its rank, once per exchange, and no other; or every token, once for each
   node on the way to its relay there, and once for each rank that it is handed on to.
2. A timeline's bars are those of the shown micro-step; pulls that began before it have a negative start. The first
   one shows what is published, the last one what is collected.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.core.plan import Plan, Sends
from equipoise.cost.between import rows_between, tokens_between
from equipoise.loads.forecast import Activations
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
