"""Predicted seconds: the cost model's own, level where loads are level, never a negative loss."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Seconds
from equipoise.cost import CostModel
from equipoise.planner import plan
from equipoise.sim.analysis import Prediction, add_seconds, predict, transfer_seconds
from equipoise.sim.sweep import deal_out

MODEL = ModelShape.preset("olmoe", layers=2)
CLUSTER = Cluster.preset("h200", ep=4, ranks_per_node=2)


def random_loads(seed: int, *, micro_steps: int = 3, ranks: int = 4, high: int = 400, stage="update") -> LoadMatrix:
    rng = np.random.default_rng(seed)
    load = rng.integers(0, high, (micro_steps, 2, ranks, 64)) * rng.integers(0, 3, (1, 2, 1, 64))
    return LoadMatrix(load, stage=stage)


def predicted(loads: LoadMatrix) -> Prediction:
    return predict([loads], cluster=CLUSTER, model=MODEL)


@pytest.mark.parametrize("stage", ["recompute", "update"])
def test_now_is_the_planners_static_seconds(stage):
    loads = random_loads(1, stage=stage)
    made = plan(loads, cluster=CLUSTER, model=MODEL, policy="static")
    assert predicted(loads).now == made.seconds
    assert predicted(loads).now.total == made.static_seconds


def test_balanced_is_the_mean_rank_at_the_cost_models_price():
    loads = random_loads(2)
    cost = CostModel.of(CLUSTER, MODEL, stage="update")
    # The mean rank, rounded up, with its part of the experts that have rows, which are not all.
    means = -(-loads.load_MLRE.sum(axis=(2, 3)) // 4)
    busy = -(-(loads.load_MLRE.sum(axis=2) > 0).sum(axis=2) // 4)
    assert busy.min() < 16
    wanted = sum(cost.compute_ns(int(rows), int(slots)) for rows, slots in zip(means.flat, busy.flat, strict=True))
    assert predicted(loads).balanced.compute == pytest.approx(wanted * 1e-9)
    assert predicted(loads).balanced == plan(loads, cluster=CLUSTER, model=MODEL, policy="balanced").seconds


def test_one_hot_expert_costs_its_rows_and_level_loads_lose_nothing():
    load = np.full((1, 2, 4, 64), 100, dtype=np.int64)
    level = predicted(LoadMatrix(load))
    assert level.lost_seconds == 0 and level.now.compute > 0
    load[:, :, :, 5] += 4000
    hot, cost = predicted(LoadMatrix(load)), CostModel.of(CLUSTER, MODEL)
    assert hot.now.compute == pytest.approx(2 * cost.compute_ns(4 * (15 * 100 + 4100), 16) * 1e-9)
    assert hot.lost_seconds > 0.2 * hot.now.total


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 40, 5000]))
def test_lost_is_never_negative(seed, high):
    found = predicted(random_loads(seed, high=high))
    assert found.lost_seconds == max(0, found.now.total - found.balanced.total)


def test_a_rank_with_one_busy_expert_is_not_charged_for_sixteen():
    # Level already, and with fewer non-empty slots than an even spread would have.
    load = np.zeros((1, 2, 4, 64), dtype=np.int64)
    load[:, :, :, ::16] = 64
    assert predicted(LoadMatrix(load)).lost_seconds == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 9, 300]))
def test_dealing_out_keeps_every_source_and_levels_every_rank(seed, ranks, high):
    load = np.random.default_rng(seed).integers(0, high, (2, 3, ranks, 16))
    dealt = deal_out(load)
    assert dealt.min() >= 0
    assert np.array_equal(dealt.sum(axis=3), load.sum(axis=3))
    received = dealt.sum(axis=2).reshape(2, 3, ranks, 16 // ranks).sum(axis=3)
    assert np.array_equal(received.max(axis=2), -(-load.sum(axis=(2, 3)) // ranks))
    assert (received.max(axis=2) - received.min(axis=2)).max() <= 1


def test_seconds_add_up_over_micro_steps():
    loads = random_loads(3, micro_steps=4)
    parts = [predicted(loads.micro_steps(m, m + 1)) for m in range(4)]
    whole, added = predicted(loads), sum(parts[1:], parts[0])
    assert added.to_dict()["now"] == pytest.approx(whole.to_dict()["now"])
    assert added.to_dict()["balanced"] == pytest.approx(whole.to_dict()["balanced"])


def test_the_update_takes_longer_than_the_forward_pass_alone():
    forward, update = (predicted(random_loads(4, stage=stage)).now for stage in ("recompute", "update"))
    assert update.compute > 2 * forward.compute
    assert update.all_to_all == pytest.approx(2 * forward.all_to_all, rel=1e-6)


def test_other_sources_leave_compute_and_no_all_to_all():
    loads = random_loads(5, ranks=3)
    gathered = np.zeros((3, 2, 4, 64), dtype=np.int64)
    gathered[:, :, 2] = loads.load_MLRE.sum(axis=2)
    found = predicted(loads)
    assert found.now.compute == predicted(LoadMatrix(gathered)).now.compute > 0
    assert found.to_dict()["now"]["all_to_all"] is None
    assert found.to_dict()["now"]["total"] == found.now.compute


def test_a_window_takes_its_slowest_group():
    slow, fast = random_loads(6, high=900), random_loads(6, high=90)
    together = predict([fast, slow], cluster=CLUSTER, model=MODEL)
    assert together.now == predicted(slow).now
    assert together.balanced == predicted(slow).balanced


def test_idle_windows_take_only_the_fixed_cost_of_exchanges():
    found = predicted(LoadMatrix(np.zeros((1, 2, 4, 64), dtype=np.int64)))
    assert found.now.compute == 0 and found.lost_seconds == 0
    assert Prediction(now=Seconds(), balanced=Seconds()).share(0.0) == 0


def test_saved_is_now_minus_planned_with_every_transfer():
    planned = Seconds(compute=1.0, all_to_all=0.5, pull=0.1, return_=0.2, publish=0.3, collect=0.4)
    one = Prediction(now=Seconds(compute=4.0), balanced=Seconds(compute=1.0), planned=planned)
    assert transfer_seconds(planned) == pytest.approx(1.0)
    assert one.saved_seconds == pytest.approx(1.5)
    assert one.to_dict()["saved"] == {"seconds": pytest.approx(1.5), "share": pytest.approx(0.375)}
    unplanned = Prediction(now=Seconds(compute=1.0), balanced=Seconds())
    assert (one + one).planned == add_seconds([planned, planned])
    assert (one + unplanned).planned is None and (one + unplanned).to_dict()["saved"] is None
