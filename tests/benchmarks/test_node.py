"""The node benchmark at tiny sizes on a CPU; rivals' plans are made executable without changing who computes what."""

import numpy as np
import pytest

import equipoise as eq
from benchmarks import node, node_cases
from equipoise.launch import run_ranks
from tests.layer.cases import cluster_of, model_of, random_routing


@pytest.mark.parametrize("policy", ["eplb-oracle", "lplb"])
@pytest.mark.parametrize("seed", range(3))
def test_an_executable_plan_gives_every_rank_the_rows_of_the_rivals_plan(policy, seed):
    routing = random_routing(seed, ranks=4, experts=16, tokens=60)
    made = eq.plan(routing.loads(), cluster=cluster_of(4), model=model_of(routing), slots=1, policy=policy)
    plan = node_cases.executable(made)
    assert not plan.persistent and plan.itinerary is not None
    assert np.array_equal(plan.rank_load_MLR, made.rank_load_MLR)
    assert np.array_equal(np.sort(plan.home_LE, axis=1)[0], np.repeat(np.arange(4), 4)), "homes are a permutation"


def test_forced_uniform_routes_load_every_expert_alike():
    case = node.smoke_works()[0].case
    loads = case.loads(case.uniform()).total_MLE()
    assert len(np.unique(loads)) == 1
    assert all(len(set(row)) == len(row) for row in case.uniform().reshape(-1, case.model.top_k).tolist())


@pytest.mark.dist(2)
def test_all_policies_run_and_are_summarised():
    works = node.smoke_works()
    found = run_ranks(node.run_works, 2, works, 1, "cpu", show=lambda *words: None)[0]
    rows, limits = node.summarise(found, works)
    assert {row["policy"] for row in rows} >= {
        "static",
        "eplb-oracle",
        "lplb",
        "equipoise, 1 slot",
        "uniform, prepared",
        "mapped",
    }
    assert all(row["window_s"] > 0 for row in rows)
    assert any("mapped over prepared" in limit.name for limit in limits)
