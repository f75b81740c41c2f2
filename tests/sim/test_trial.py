"""A trial: the planner's own plans, charged in full, worth it or not, with honest progress."""

import numpy as np
import pytest

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.loads.skew import skew
from equipoise.planner import plan, plan_step
from equipoise.sim.analysis import try_plans

MODEL = ModelShape.preset("olmoe", layers=2)
CLUSTER = Cluster.preset("h200", ep=4, ranks_per_node=2)


def hot_loads(seed: int, *, stage="update", rows: int = 4000) -> LoadMatrix:
    rng = np.random.default_rng(seed)
    load = rng.integers(50, 100, (2, 2, 4, 64))
    load[:, :, :, 3] += rows
    return LoadMatrix(load, stage=stage)


def test_plans_are_those_of_the_planner_window_after_window():
    windows = [hot_loads(1, stage="recompute"), hot_loads(2), hot_loads(3)]
    trial = try_plans([(w,) for w in windows], cluster=CLUSTER, model=MODEL, slots=2)
    wanted = plan_step(windows, cluster=CLUSTER, model=MODEL, slots=2)
    assert [p.digest() for (p,) in trial.plans] == [p.digest() for p in wanted]
    assert trial.seconds == tuple(p.seconds for p in wanted)
    assert trial.replicas == sum(len(p.replica_table) for p in wanted) > 0
    assert trial.displaced == sum(int(p.displaced_LE.sum()) for p in wanted)


def test_skew_before_and_after_are_of_one_stage():
    windows = [hot_loads(1, stage="recompute", rows=50), hot_loads(2)]
    trial = try_plans([(w,) for w in windows], cluster=CLUSTER, model=MODEL, slots=1)
    assert trial.skew_before("update") == skew(windows[1]).dispatched
    assert trial.skew_after("update") == skew(trial.plans[1][0].rank_load_MLR).dispatched
    assert trial.skew_after("update").mean < 0.7 * trial.skew_before("update").mean
    assert list(trial.to_dict()["skew"]) == ["recompute", "update"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_a_trial_never_takes_longer_than_contiguous_experts(seed, slots):
    rng = np.random.default_rng(seed)
    loads = LoadMatrix(rng.integers(0, 10 ** (seed + 1), (2, 2, 4, 64)))
    trial = try_plans([(loads,)], cluster=CLUSTER, model=MODEL, slots=slots)
    assert trial.seconds[0].total <= plan(loads, cluster=CLUSTER, model=MODEL, policy="static").seconds.total


def test_placement_alone_takes_boxes_and_slots_take_two_buffers_each():
    loads = hot_loads(5)
    alone, three = (try_plans([(loads,)], cluster=CLUSTER, model=MODEL, slots=n) for n in (0, 3))
    assert (alone.buffer_bytes, alone.replicas) == (4 * MODEL.expert_bytes, 0)
    assert three.buffer_bytes == (3 * 2 * 2 + 3 * 4) * MODEL.expert_bytes
    # Rows between the two nodes are exchanged, so that there is no page.
    assert three.row_page_bytes == 0
    assert three.replicas > 0


def test_groups_are_planned_apart_and_the_slowest_counts():
    slow, fast = hot_loads(6, rows=9000), hot_loads(7, rows=9)
    trial = try_plans([(fast, slow)], cluster=CLUSTER, model=MODEL, slots=1)
    assert trial.seconds == (plan(slow, cluster=CLUSTER, model=MODEL, slots=1).seconds,)


def test_progress_counts_layers_forward_to_its_total():
    seen = []
    windows = [(hot_loads(1), hot_loads(2)), (hot_loads(3), hot_loads(4))]
    try_plans(windows, cluster=CLUSTER, model=MODEL, slots=1, progress=lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and set(done) == set(range(1, 9))
    assert {total for _, total in seen} == {8} and done[-1] == 8


def test_estimated_rows_are_said():
    loads = hot_loads(8)
    half = LoadMatrix(loads.load_MLRE, coverage_MLR=np.full((2, 2, 4), 0.5))
    assert try_plans([(half,)], cluster=CLUSTER, model=MODEL, slots=1).estimated_share == pytest.approx(0.5)
    assert try_plans([(loads,)], cluster=CLUSTER, model=MODEL, slots=1).estimated_share == 0
