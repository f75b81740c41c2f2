"""Capacities: what a plan says of receive buffers against counting slot by slot, and factors as an engine uses them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, ModelShape, Plan
from equipoise.core.options import Capacities
from equipoise.planner import plan as plan_window
from tests.core.plans import parts

RANKS, EXPERTS = 4, 8
CLUSTER = Cluster.preset("h200", node_R=(0, 0, 1, 1))
MODEL = ModelShape.preset("qwen3-30b-a3b", experts=EXPERTS, layers=2, top_k=2)


def count_by_slot(plan, align):
    """The obvious way: every expert's rows on every rank that holds it, filled up, one after the other."""
    rows_MLR = np.zeros_like(plan.rank_load_MLR)
    for m, layer, rank in np.ndindex(rows_MLR.shape):
        for expert in range(plan.loads.num_experts):
            rows = int(plan.split_RER(m, layer)[:, expert, rank].sum())
            rows_MLR[m, layer, rank] += math.ceil(rows / align) * align
    return rows_MLR


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    policy=st.sampled_from(["equipoise", "static", "eplb-oracle", "lplb"]),
    hot=st.integers(0, 500),
    align=st.sampled_from([1, 3, 16, 256]),
)
def test_every_slot_is_counted_and_filled(seed, policy, hot, align):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 40, size=(3, 2, RANKS, EXPERTS)) * (rng.random((3, 2, 1, EXPERTS)) < rng.random())
    load[..., 0] += hot
    plan = plan_window(LoadMatrix(load), cluster=CLUSTER, model=MODEL, slots=1, policy=policy, objective="skew")
    found = Capacities.of(plan, align=align)
    assert np.array_equal(found.rows_MLR, count_by_slot(plan, align))
    assert np.array_equal(Capacities.of(plan).rows_MLR, plan.rank_load_MLR)
    assert np.array_equal(found.own_MLR, plan.loads.load_MLRE.sum(axis=3))
    assert np.array_equal(found.bytes_MLR, found.rows_MLR * 2 * MODEL.hidden)


@given(
    rows=st.lists(st.integers(0, 10**7), min_size=1, max_size=6),
    own=st.lists(st.integers(1, 10**7), min_size=6, max_size=6),
)
def test_the_factor_is_the_least_that_drops_nothing(rows, own):
    own = own[: len(rows)]
    sizes = Capacities(rows_MLR=np.array([[rows]]), own_MLR=np.array([[own]]), row_bytes=1)
    factor = sizes.rank_factor()
    assert all(int(o * factor) >= r for o, r in zip(own, rows, strict=True))
    less = factor - 1e-6
    assert less <= 0 or any(int(o * less) < r for o, r in zip(own, rows, strict=True))


def test_a_level_plan_needs_less_room_than_contiguous_experts():
    load = np.ones((2, 2, RANKS, EXPERTS), dtype=np.int64) * 64
    load[..., 0] = 128
    window = LoadMatrix(load)
    of = {
        policy: Capacities.of(
            plan_window(window, cluster=CLUSTER, model=MODEL, slots=1, policy=policy, objective="skew")
        ).rank_factor()
        for policy in ("static", "equipoise")
    }
    # Rank 0 owns experts 0 and 1: 4 * (128 + 64) of 4 * 576 rows, on 4 ranks. A node's four experts are 320 of 576.
    assert of["static"] == pytest.approx(4 * 192 / 576, abs=1e-6)
    assert of["equipoise"] == pytest.approx(2 * 320 / 576, abs=1e-6)


def test_a_stash_holds_the_layers_of_what_is_in_flight():
    rows = np.array([[[65, 10], [64, 10]], [[1, 30], [1, 30]], [[64, 30], [64, 30]]])
    own = np.full((3, 2, 2), 40)
    sizes = Capacities(rows_MLR=rows, own_MLR=own, row_bytes=1)
    # Rank 0 keeps 128 + 64 rows of micro-step 0 in pages of 64; its own are 80.
    assert sizes.stash_factor() == pytest.approx(192 / 80, abs=2e-6)
    assert sizes.stash_factor(page_rows=1) == pytest.approx(129 / 80, abs=2e-6)
    assert sizes.stash_factor(in_flight=2) == pytest.approx(320 / 160, abs=2e-6)
    assert sizes.stash_factor(in_flight=9) == pytest.approx(448 / 240, abs=2e-6)


def test_what_cannot_be_known_is_refused_by_name():
    plan = Plan(**parts())
    with pytest.raises(InfeasiblePlanError, match="align is 0; it must be at least 1"):
        Capacities.of(plan, align=0)
    with pytest.raises(InfeasiblePlanError, match=r"25.0% of the plan's rows are estimated"):
        Capacities.of(replace(plan, estimated_share=0.25))
    with pytest.raises(InfeasiblePlanError, match=r"entry \[0, 0, 1\] receives 5 rows but has no tokens of its own"):
        Capacities(rows_MLR=np.array([[[0, 5]]]), own_MLR=np.array([[[8, 0]]]), row_bytes=1).rank_factor()
    empty = Capacities(rows_MLR=np.zeros((1, 1, 2), int), own_MLR=np.zeros((1, 1, 2), int), row_bytes=1)
    assert empty.rank_factor() == 0.0
