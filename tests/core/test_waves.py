"""`wave_cuts`: the waves of a rank have as many rows, one after the other, whatever slots these are in."""

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
def test_waves_have_as_many_rows_one_after_the_other(plan):
    for m, layer in np.ndindex(MICRO_STEPS, LAYERS):
        cuts, rows = wave_cuts(plan, m, layer), rows_by_slot(plan, m, layer)
        for rank, own in enumerate(rows):
            # The obvious way: all rows in a row, each by the slot that it is in.
            slots = [slot for slot, count in enumerate(own) for _ in range(count)]
            begin = [wave * len(slots) // plan.waves for wave in range(1, plan.waves)]
            assert cuts.slot_XW[rank].tolist() == [slots[row] if slots else len(own) - 1 for row in begin]
            assert cuts.before_XW[rank].tolist() == [
                sum(slot == slots[row] for slot in slots[:row]) if slots else 0 for row in begin
            ]
            assert cuts.rows_XW[rank].tolist() == [own[slots[row]] if slots else 0 for row in begin]


def test_an_experts_rows_are_cut_where_a_wave_begins_in_them():
    load = np.full((MICRO_STEPS, LAYERS, RANKS, EXPERTS), 2)
    plan = plan_of(loads=LoadMatrix(load), replica_table=table_of(), waves=4)
    cuts = wave_cuts(plan, 0, 0)
    total = RANKS * 2
    assert cuts.slot_XW.tolist() == [[0, 1, 1]] * RANKS
    assert cuts.before_XW.tolist() == [[total // 2, 0, total // 2]] * RANKS
    assert cuts.rows_XW.tolist() == [[total] * 3] * RANKS


def test_a_rank_without_rows_is_cut_in_its_last_slot():
    load = np.zeros((MICRO_STEPS, LAYERS, RANKS, EXPERTS), dtype=np.int64)
    cuts = wave_cuts(plan_of(loads=LoadMatrix(load), replica_table=table_of(), waves=3), 1, 1)
    assert cuts.slot_XW.tolist() == [[2, 2]] * RANKS and not cuts.before_XW.any() and not cuts.rows_XW.any()


def test_a_plan_that_is_not_executed_has_no_waves():
    with pytest.raises(InfeasiblePlanError, match="policy 'eplb-oracle' keeps replicas for the whole window"):
        wave_cuts(plan_of(persistent=True, policy="eplb-oracle"), 0, 0)
