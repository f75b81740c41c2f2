"""Bounds: right on cases counted out by hand or by brute force, and never beaten by a plan."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix
from equipoise.planner import PlanOptions, plan
from equipoise.planner.baselines import split_optimum
from tests.planner.bounds import exact_homes, node_bound_ML, node_bound_rows_ML
from tests.planner.cases import awkward_loads, cluster_of, model_of, skewed_loads

TWO_NODES = Cluster.preset("h200", nodes=2, ranks_per_node=2)


def test_node_bound_is_the_fullest_nodes_mean_over_the_mean():
    load_E = np.array([5, 4, 1, 1, 1, 0, 0, 1])
    loads = LoadMatrix(np.stack([load_E, *[0 * load_E] * 3])[None, None])
    contiguous_LE = np.arange(8)[None] // 2
    # Node 0 has 11 of 13 rows on 2 of 4 ranks.
    assert node_bound_ML(loads, contiguous_LE, TWO_NODES)[0, 0] == pytest.approx(11 / 2 / (13 / 4))
    assert node_bound_rows_ML(loads, contiguous_LE, TWO_NODES)[0, 0] == 6


def test_an_idle_entry_is_level():
    loads = LoadMatrix(np.zeros((1, 1, 4, 8), dtype=np.int64))
    assert node_bound_ML(loads, np.arange(8)[None] // 2, TWO_NODES)[0, 0] == 1.0


@pytest.mark.parametrize("objective", ["skew", "seconds"])
@pytest.mark.parametrize("node_R", [(0,) * 8 + (1,) * 8, (0,) * 5 + (1,) * 11], ids=["even nodes", "uneven nodes"])
def test_no_plan_is_below_the_node_bound_of_its_homes(objective, node_R):
    cluster = Cluster.preset("h200", node_R=node_R)
    for seed in range(4):
        loads = skewed_loads(seed, ranks=16, experts=32, rows=2**14)
        made = plan(loads, cluster=cluster, model=model_of(loads), slots=2, objective=objective)
        assert (made.rank_load_MLR.max(axis=-1) >= node_bound_rows_ML(loads, made.home_LE, cluster)).all()


@pytest.mark.parametrize("name, loads", awkward_loads(), ids=[name for name, _ in awkward_loads()])
def test_no_plan_is_below_the_node_bound_on_awkward_loads(name, loads):
    made = plan(loads, cluster=cluster_of(8, per_node=4), model=model_of(loads), slots=2, objective="skew")
    bound = node_bound_rows_ML(loads, made.home_LE, made.cluster)
    assert (made.rank_load_MLR.max(axis=-1) >= bound).all()


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3]))
@settings(max_examples=25, deadline=None)
def test_the_split_is_the_optimum_for_its_own_replicas_to_the_row(seed, slots):
    loads = skewed_loads(seed, micro_steps=2, layers=1, ranks=8, experts=16, rows=512)
    options = PlanOptions(max_displaced=seed % 2 * 16)
    cluster = cluster_of(8, per_node=4)
    made = plan(loads, cluster=cluster, model=model_of(loads), slots=slots, objective="skew", options=options)
    for m in range(2):
        load_E = loads.load_MLRE[m, 0].sum(axis=0)
        best = split_optimum(load_E, made.home_LE[0], made.replicas(m, 0), ranks=8)
        assert made.rank_load_MLR[m, 0].max() == math.ceil(best.top - 1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_split_optimum_is_the_best_of_all_whole_splits(seed):
    rng = np.random.default_rng(seed)
    load_E, home_E = rng.integers(0, 6, size=4), np.array([0, 0, 1, 2])
    replicas = [(0, 1), (0, 2), (2, 0)]
    every = []
    for rows in itertools.product(range(6), repeat=3):
        if rows[0] + rows[1] > load_E[0] or rows[2] > load_E[2]:
            continue
        load_R = np.bincount(home_E, weights=load_E, minlength=3)
        for (expert, rank), moved in zip(replicas, rows, strict=True):
            load_R[home_E[expert]] -= moved
            load_R[rank] += moved
        every.append(load_R.max())
    assert math.ceil(split_optimum(load_E, home_E, replicas, ranks=3).top - 1e-6) == min(every)


def test_without_replicas_the_split_is_that_of_the_homes():
    assert split_optimum(np.array([3, 4]), np.array([0, 0]), [], ranks=2).top == 7


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_exact_homes_are_the_best_of_all_assignments(seed):
    load_ME = np.random.default_rng(seed).integers(0, 100, size=(2, 6))
    ranks_N = np.array([2, 1])
    found = exact_homes(load_ME, ranks_N, weight_M=np.array([1.0, 3.0]))
    values = []
    for node_0 in itertools.combinations(range(6), 4):
        is_0 = np.isin(np.arange(6), node_0)
        top_M = np.maximum(load_ME[:, is_0].sum(axis=1) / 2, load_ME[:, ~is_0].sum(axis=1))
        values.append(top_M[0] + 3 * top_M[1])
    assert found.value == pytest.approx(min(values))
    assert np.bincount(found.node_E).tolist() == [4, 2]


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(InfeasiblePlanError, match="5 experts do not divide by 4 ranks"):
        exact_homes(np.ones((1, 5)), np.array([2, 2]))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("experts, micro_steps", [(8, 1), (12, 2), (16, 4)])
def test_homes_are_within_half_a_percent_of_the_exact_ones(seed, experts, micro_steps):
    loads = skewed_loads(seed, micro_steps=micro_steps, layers=1, ranks=4, experts=experts, rows=2**14)
    made = plan(loads, cluster=TWO_NODES, model=model_of(loads), slots=2, objective="skew")
    mean_M = loads.load_MLRE.sum(axis=(1, 2, 3)) / 4
    exact = exact_homes(loads.total_MLE()[:, 0], np.array([2, 2]), weight_M=1 / mean_M)
    ours = float(node_bound_ML(loads, made.home_LE, TWO_NODES).sum())
    assert exact.value - 1e-9 <= ours <= exact.value * 1.005
