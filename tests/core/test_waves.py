"""`wave_cuts`: waves cover every slot in order, their rows add up, and they are as level as the rule says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix
from equipoise.core.plan import wave_cuts
from tests.core.plans import EXPERTS, LAYERS, MICRO_STEPS, RANKS, plan_of, table_of

OWNER_E = np.arange(EXPERTS) // 2


def rows_by_slot(plan, micro_step, layer):
    """The obvious way: [rank][slot] rows, home slots first, then a rank's replicas as the plan lists them."""
    quota_ER = plan.quota_ER(micro_step, layer)
    rows = [[0] * (plan.home_slots + plan.slots) for _ in range(plan.cluster.ep)]
    for expert, (rank, slot) in enumerate(zip(plan.home_LE[layer], plan.home_slot_LE[layer], strict=True)):
        rows[rank][slot] = int(quota_ER[expert, rank])
    for rank in range(plan.cluster.ep):
        mine = [replica.expert for replica in plan.replicas(micro_step, layer) if replica.rank == rank]
        for number, expert in enumerate(mine):
            rows[rank][plan.home_slots + number] = int(quota_ER[expert, rank])
    return rows


def nearest_cut(rows, wave, waves):
    """The first slot before which there are nearest to wave / waves of the rows, by trying all."""
    misses = [abs(waves * sum(rows[:slot]) - wave * sum(rows)) for slot in range(len(rows) + 1)]
    return misses.index(min(misses))


@st.composite
def plans(draw):
    """Plans of random loads with up to two replicas per rank, cut into 1 to 8 waves."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load = rng.integers(0, draw(st.sampled_from([1, 2, 9, 1000])), (MICRO_STEPS, LAYERS, RANKS, EXPERTS))
    slots, replicas = draw(st.integers(0, 2)), []
    for m, layer in np.ndindex(MICRO_STEPS, LAYERS):
        left_E = load[m, layer].sum(axis=0)
        for rank in range(RANKS):
            others = [e for e in range(EXPERTS) if OWNER_E[e] != rank and left_E[e] > 0]
            for expert in rng.permutation(others).tolist()[:slots]:
                rows = int(rng.integers(1, left_E[expert] + 1))
                left_E[expert] -= rows
                replicas.append((m, layer, expert, rank, rows))
    slot_LE = np.stack([np.concatenate([rng.permutation(2) for _ in range(RANKS)]) for _ in range(LAYERS)])
    return plan_of(
        loads=LoadMatrix(load),
        cluster=Cluster.preset("h200", node_R=(0,) * RANKS),
        slots=slots,
        replica_table=table_of(*replicas),
        home_slot_LE=slot_LE,
        waves=draw(st.integers(1, 8)),
    )


@given(plans())
@settings(max_examples=60, deadline=None)
def test_waves_cover_every_slot_in_order_and_are_cut_where_rows_are_nearest(plan):
    for m, layer in np.ndindex(MICRO_STEPS, LAYERS):
        cut_RW, rows = wave_cuts(plan, m, layer), rows_by_slot(plan, m, layer)
        assert cut_RW.dtype == np.int64 and cut_RW.shape == (RANKS, plan.waves + 1)
        assert (cut_RW[:, 0] == 0).all() and (cut_RW[:, -1] == plan.home_slots + plan.slots).all()
        assert (np.diff(cut_RW, axis=1) >= 0).all()
        for rank, own in enumerate(rows):
            inner = [nearest_cut(own, wave, plan.waves) for wave in range(1, plan.waves)]
            assert cut_RW[rank, 1:-1].tolist() == inner
            by_wave = [sum(own[low:high]) for low, high in zip(cut_RW[rank], cut_RW[rank, 1:], strict=False)]
            assert sum(by_wave) == plan.rank_load_MLR[m, layer, rank]


def test_equal_rows_are_cut_evenly_and_a_tie_takes_the_lower_slot():
    load = np.full((MICRO_STEPS, LAYERS, RANKS, EXPERTS), 6)
    even = plan_of(loads=LoadMatrix(load), replica_table=table_of(), waves=2)
    assert wave_cuts(even, 0, 0).tolist() == [[0, 1, 3]] * RANKS
    # A quarter of the rows is as near to none as to half of them.
    assert (
        wave_cuts(plan_of(loads=even.loads, replica_table=table_of(), waves=4), 0, 0).tolist()
        == [[0, 0, 1, 1, 3]] * RANKS
    )


def test_a_rank_without_rows_has_all_its_slots_in_the_last_wave():
    load = np.zeros((MICRO_STEPS, LAYERS, RANKS, EXPERTS), dtype=np.int64)
    plan = plan_of(loads=LoadMatrix(load), replica_table=table_of(), waves=3)
    assert wave_cuts(plan, 1, 1).tolist() == [[0, 0, 0, 3]] * RANKS


def test_a_plan_that_is_not_executed_has_no_waves():
    with pytest.raises(InfeasiblePlanError, match="policy 'eplb-oracle' keeps replicas for the whole window"):
        wave_cuts(plan_of(persistent=True, policy="eplb-oracle"), 0, 0)
