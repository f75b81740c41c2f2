"""Shares of layers give the plan of the whole, bit for bit, and no layer is planned twice."""

import pickle

import numpy as np
import pytest

import equipoise as eq
from equipoise.core import LoadMatrix
from equipoise.core.options import BalancerOptions
from equipoise.planning.server import PlanServer
from tests.layer.cases import cluster_of, model_of, random_routing

RANKS, LAYERS = 4, 5


def window(seed, *, coverage=None):
    routing = random_routing(seed, ranks=RANKS, layers=LAYERS, experts=16)
    loads = routing.loads()
    if coverage is None:
        return loads, model_of(routing)
    shape = loads.load_MLRE.shape[:3]
    return LoadMatrix(loads.load_MLRE, coverage_MLR=np.full(shape, coverage)), model_of(routing)


def servers(model, options):
    return [PlanServer(cluster_of(RANKS, nodes=2), model, options) for _ in range(RANKS)]


@pytest.mark.parametrize("objective", ["skew", "seconds"])
@pytest.mark.parametrize("limit", [None, 2], ids=["any number displaced", "at most 2 displaced"])
def test_shares_give_the_plans_of_the_planner_window_by_window(objective, limit):
    options = BalancerOptions(slots=1, objective=objective, max_displaced=limit)
    _, model = window(0)
    ranks, warm = servers(model, options), None
    for seed in (1, 2, 3):
        loads, _ = window(seed)
        shares = [server.share(loads, range(rank, LAYERS, RANKS)) for rank, server in enumerate(ranks)]
        plans = [server.whole(loads, shares) for server in ranks]
        warm = eq.plan(
            loads,
            cluster=cluster_of(RANKS, nodes=2),
            model=model,
            slots=1,
            objective=objective,
            options=eq.PlanOptions(max_displaced=limit),
            warm=warm,
        )
        assert {plan.digest() for plan in plans} == {warm.digest()}


def test_no_layer_is_planned_twice():
    loads, model = window(4)
    ranks = servers(model, BalancerOptions(objective="skew"))
    shares = [server.share(loads, range(rank, LAYERS, RANKS)) for rank, server in enumerate(ranks)]
    for server in ranks:
        server.whole(loads, shares)
    assert sum(server.num_planned for server in ranks) == LAYERS


def test_partly_known_loads_are_shared_out_too():
    loads, model = window(5, coverage=0.5)
    server = PlanServer(cluster_of(RANKS, nodes=2), model, BalancerOptions(objective="skew"))
    plan = server.whole(loads, [server.share(loads, range(LAYERS))])
    assert server.num_planned == LAYERS
    assert plan.estimated_share > 0.4


@pytest.mark.parametrize("given", ["none", "of other loads"])
def test_a_layer_that_nobody_planned_is_planned_and_never_guessed(given):
    loads, model = window(6)
    other, _ = window(7)
    server = PlanServer(cluster_of(RANKS, nodes=2), model, BalancerOptions(objective="skew"))
    share = pickle.dumps({}) if given == "none" else server.share(other, range(LAYERS))
    plan = server.whole(loads, [share])
    wanted = eq.plan(loads, cluster=cluster_of(RANKS, nodes=2), model=model, slots=1, objective="skew")
    assert plan.digest() == wanted.digest()
