"""ReLibra: its annealing against a plain one, its objective by definition, its replicas against a plain greedy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, LoadMatrix
from equipoise.planner import PlanOptions, plan, relibra
from equipoise.planner.assemble import WindowTask
from equipoise.planner.baselines import pack
from equipoise.planner.layer import layer_problem, node_prices, owners
from tests.planner.cases import awkward_loads, cluster_of, model_of, skewed_loads

HEAVY = 2**18


def problem_of(loads, cluster, *, objective="seconds", sends="rows", top_k=8):
    options = PlanOptions(sends=sends)
    task = WindowTask(
        loads=loads,
        cluster=cluster,
        model=model_of(loads, top_k=top_k),
        slots=2,
        objective=objective,
        options=options,
        policy="relibra",
    )
    return layer_problem(task, budget=loads.num_experts)


def plain_burden(load_MRE, node_E, problem):
    """Every micro-step's log-sum-exp of the nodes' rows and of the rows on their links, counted afresh."""
    node_R, value = problem.node_R, 0.0
    nodes = range(node_R.max() + 1)
    for load_RE in load_MRE:
        mean = max(1.0, load_RE.sum() / len(node_R))
        full, links = [], []
        for n in nodes:
            ranks, here_R, here_E = int((node_R == n).sum()), node_R == n, node_E == n
            full.append(load_RE[:, here_E].sum() / ranks)
            links.append(load_RE[~here_R][:, here_E].sum() / ranks)
            links.append(load_RE[here_R][:, ~here_E].sum() / ranks)
        for weight, rows in ((problem.row_weight, full), (problem.link_weight * (1 - problem.by_skew), links)):
            scale = relibra.SHARPNESS / mean
            value += weight * math.log(sum(math.exp(scale * x) for x in rows)) / scale
    cost_EN = node_prices(owners(len(node_E), len(node_R)), problem)
    return value + sum(cost_EN[e, n] for e, n in enumerate(node_E))


@pytest.mark.parametrize("objective", ["seconds", "skew"])
@pytest.mark.parametrize("node_R", [(0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 2, 0)], ids=str)
def test_the_objective_is_the_sum_of_log_sum_exps(node_R, objective):
    loads = skewed_loads(0, ranks=4, experts=16)
    problem = problem_of(loads, Cluster.preset("h200", node_R=node_R), objective=objective)
    load_MRE = np.array(loads.load_MLRE[:, 0])
    rng = np.random.default_rng(0)
    for _ in range(5):
        node_E = problem.node_R[rng.permutation(owners(16, 4))]
        found = relibra.burden(relibra.node_loads(load_MRE, problem), node_E)
        assert found == pytest.approx(plain_burden(load_MRE, node_E, problem), rel=1e-9)


@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.sampled_from(["seconds", "skew"]), st.floats(0, 0.01))
@settings(max_examples=20, deadline=None)
def test_the_walk_is_the_plain_one(seed, per_node, objective, heat):
    loads = skewed_loads(seed, ranks=8, experts=16, layers=1)
    problem = problem_of(loads, cluster_of(8, per_node=per_node), objective=objective)
    load_MRE = np.array(loads.load_MLRE[:, 0])
    node_loads = relibra.node_loads(load_MRE, problem)
    rng = np.random.default_rng(seed)
    start_E = problem.node_R[owners(16, 8)]
    pair_X2 = rng.integers(0, 16, size=(60, 2))
    allowed_X = rng.exponential(size=60) * heat * relibra.burden(node_loads, start_E)
    # The plain one: swap, count everything again, take it back if it costs too much.
    node_E, now = start_E.copy(), plain_burden(load_MRE, start_E, problem)
    best = now
    for (e, f), allowed in zip(pair_X2, allowed_X, strict=True):
        node_E[e], node_E[f] = node_E[f], node_E[e]
        value = plain_burden(load_MRE, node_E, problem)
        if value - now > allowed:
            node_E[e], node_E[f] = node_E[f], node_E[e]
        else:
            now = value
            best = min(best, now)
    found_E = relibra.walk(node_loads, start_E, pair_X2, allowed_X)
    assert plain_burden(load_MRE, found_E, problem) == pytest.approx(best, rel=1e-9)


@given(st.integers(0, 10**6), st.sampled_from(["rows", "tokens"]), st.sampled_from(["seconds", "skew"]))
@settings(max_examples=15, deadline=None)
def test_annealing_is_never_worse_than_lpt_or_the_owners_on_its_own_objective(seed, sends, objective):
    loads = skewed_loads(seed, ranks=8, experts=32, layers=1, rows=HEAVY)
    problem = problem_of(loads, cluster_of(8, per_node=2), sends=sends, objective=objective)
    load_MRE, node_R = np.array(loads.load_MLRE[:, 0]), problem.node_R
    node_loads = relibra.node_loads(load_MRE, problem)
    packed_E = node_R[pack(load_MRE.sum(axis=(0, 1)), 8, node_R=node_R)]
    found_E = relibra.reordered(load_MRE, problem)
    assert np.bincount(found_E).tolist() == [8, 8, 8, 8], "as many experts in a node as it owns"
    others = [relibra.burden(node_loads, start_E) for start_E in (packed_E, node_R[owners(32, 8)])]
    assert relibra.burden(node_loads, found_E) <= min(others)
    assert np.array_equal(found_E, relibra.reordered(load_MRE, problem)), "seeded"


def test_annealing_levels_what_lpt_over_the_window_cannot():
    # Experts 0 and 1 have as many rows over the window, but in different micro-steps, as do 2 and 3.
    load_MRE = np.zeros((2, 2, 4), dtype=np.int64)
    load_MRE[0, :, [0, 2]], load_MRE[1, :, [1, 3]] = 1000, 1000
    loads = LoadMatrix(load_MRE[:, None])
    problem = problem_of(loads, Cluster.preset("h200", node_R=(0, 1)), objective="skew", top_k=2)
    node_E = relibra.reordered(load_MRE, problem)
    assert node_E[0] != node_E[2] and node_E[1] != node_E[3]


def greedy_top(load_E, home_E, node_R, slots):
    """The busiest rank after an incremental greedy, as the paper's is described: one replica and its rows at a time."""
    ranks = len(node_R)
    quota_ER = np.where(home_E[:, None] == np.arange(ranks), load_E[:, None], 0)
    free_R = np.full(ranks, slots)
    stuck = set()
    while len(stuck) < ranks:
        load_R = quota_ER.sum(axis=0)
        busiest = max((r for r in range(ranks) if r not in stuck), key=lambda r: load_R[r])
        members = [r for r in np.flatnonzero(node_R == node_R[busiest]) if r != busiest and free_R[r] > 0]
        if not members:
            stuck.add(busiest)
            continue
        # Hottest expert of the busiest rank, to the lightest rank of its node, as many rows as level the two.
        target, expert = min(members, key=lambda r: load_R[r]), int(quota_ER[:, busiest].argmax())
        rows = min(quota_ER[expert, busiest], (load_R[busiest] - load_R[target]) // 2)
        if rows <= 0 or quota_ER[expert, target] > 0:
            stuck.add(busiest)
            continue
        quota_ER[expert, busiest] -= rows
        quota_ER[expert, target] += rows
        free_R[target] -= 1
    return int(quota_ER.sum(axis=0).max())


@pytest.mark.parametrize("seed", range(6))
def test_its_replicas_level_at_least_as_far_as_an_incremental_greedy(seed):
    loads = skewed_loads(seed, ranks=16, experts=64, rows=HEAVY)
    cluster = cluster_of(16)
    made = plan(loads, cluster=cluster, model=model_of(loads), slots=2, policy="relibra", objective="skew")
    for m, layer in np.ndindex(3, 2):
        load_E = loads.load_MLRE[m, layer].sum(axis=0)
        top = greedy_top(load_E, made.home_LE[layer], cluster.node_array_R, 2)
        assert made.rank_load_MLR[m, layer].max() <= top


@pytest.mark.parametrize("stage", ["update", "recompute"])
def test_homes_move_between_nodes_and_replicas_stay_inside(stage):
    loads = skewed_loads(5, ranks=16, rows=HEAVY, stage=stage)
    given_to = {"cluster": cluster_of(16, per_node=4), "model": model_of(loads), "slots": 2}
    made = plan(loads, policy="relibra", **given_to)
    node_R = made.cluster.node_array_R
    assert (node_R[made.home_LE] != node_R[owners(32, 16)]).any()
    assert len(made.replica_table) > 0 and not made.cross_node and not made.persistent
    assert made.seconds.total < plan(loads, policy="lpt", **given_to).seconds.total
    assert made.seconds.total < made.static_seconds
    assert plan(loads, policy="relibra", warm=made, **given_to) == made, "a window does not depend on the one before"


@pytest.mark.parametrize("per_node", [2, 8])
@pytest.mark.parametrize("name, loads", awkward_loads(), ids=[name for name, _ in awkward_loads()])
def test_awkward_windows_never_lose_to_static(name, loads, per_node):
    made = plan(loads, cluster=cluster_of(8, per_node=per_node), model=model_of(loads), slots=1, policy="relibra")
    assert (made.rank_load_MLR.sum(axis=-1) == loads.load_MLRE.sum(axis=(2, 3))).all()
    assert made.seconds.total <= made.static_seconds


def test_a_node_with_many_times_the_mean_is_still_a_number():
    load_MRE = np.zeros((1, 64, 64), dtype=np.int64)
    load_MRE[..., 0] = 10**6
    problem = problem_of(LoadMatrix(load_MRE[:, None]), cluster_of(64, per_node=1))
    node_loads = relibra.node_loads(load_MRE, problem)
    assert math.isfinite(relibra.burden(node_loads, problem.node_R[owners(64, 64)]))
    assert np.bincount(relibra.reordered(load_MRE, problem)).tolist() == [1] * 64
