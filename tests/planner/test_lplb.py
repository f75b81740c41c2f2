"""LPLB: its graphs edge by edge, its replicas by hand, its split against the linear programme."""

import numpy as np
import pytest

from equipoise.core import Cluster
from equipoise.cost.work import LPLB_PLAN_NS
from equipoise.planner import plan
from equipoise.planner.baselines import choose_replicas, link_ranks, split, split_optimum
from tests.planner.cases import cluster_of, model_of, skewed_loads


def test_two_slots_in_a_node_of_eight_make_the_cube_with_its_diagonals():
    source_RS = link_ranks(cluster_of(8), 2)
    edges = {frozenset((r, int(s))) for r in range(8) for s in source_RS[r]}
    cube = {frozenset((r, r ^ mask)) for r in range(8) for mask in (1, 2, 4, 7)}
    assert edges == cube and len(edges) == 16


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("torus", [False, True], ids=["inside nodes", "torus"])
@pytest.mark.parametrize("per_node", [4, 8])
def test_every_rank_gives_as_often_as_it_takes_and_never_to_itself(slots, torus, per_node):
    cluster = cluster_of(16, per_node=per_node)
    source_RS = link_ranks(cluster, slots, torus=torus)
    assert np.bincount(source_RS.ravel(), minlength=16).tolist() == [slots] * 16
    assert (source_RS != np.arange(16)[:, None]).all()
    is_inside = cluster.node_array_R[source_RS] == cluster.node_array_R[:, None]
    assert is_inside[:, : slots - torus].all() and not (torus and is_inside[:, -1].any())


def test_a_rank_alone_in_its_node_has_no_edge():
    assert link_ranks(Cluster.preset("h200", node_R=(0, 0, 1)), 1).tolist() == [[1], [0], [-1]]


def test_each_edge_takes_the_heaviest_expert_without_a_replica():
    load_E, home_E = np.array([1, 9, 5, 7]), np.array([0, 0, 1, 1])
    assert choose_replicas(load_E, home_E, np.array([[1, 1], [0, 0]])) == [(3, 0), (1, 1), (2, 0), (0, 1)]
    # Rank 1 has two experts only: the third edge to it stays empty.
    assert len(choose_replicas(load_E, home_E, np.array([[1, 1, 1], [-1, -1, -1]]))) == 2


@pytest.mark.parametrize("seed", range(5))
def test_rounding_loses_no_row_and_little_balance(seed):
    load_E = np.random.default_rng(seed).integers(0, 300, size=16)
    home_E = np.arange(16) // 2
    replicas = choose_replicas(load_E, home_E, link_ranks(cluster_of(8), 2))
    quota_ER = split(load_E, home_E, replicas, 8)
    assert (quota_ER >= 0).all() and (quota_ER.sum(axis=1) == load_E).all()
    best = split_optimum(load_E, home_E, replicas, ranks=8).top
    # Every rank meets four edges, each off by at most half a row.
    assert best - 1e-6 <= quota_ER.sum(axis=0).max() <= best + 2


def test_a_window_is_charged_for_its_linear_programmes():
    loads = skewed_loads(0)
    made = plan(loads, cluster=cluster_of(8), model=model_of(loads), slots=1, policy="lplb")
    assert made.seconds.planning == pytest.approx(LPLB_PLAN_NS * 1e-9 * 3 * 2)


def test_the_replicas_are_the_same_in_every_micro_step():
    loads = skewed_loads(3, rows=2**16)
    made = plan(loads, cluster=cluster_of(8), model=model_of(loads), slots=2, policy="lplb")
    source_RS = link_ranks(made.cluster, 2)
    for layer in range(2):
        chosen = set(choose_replicas(loads.total_MLE()[:, layer].sum(axis=0), made.home_LE[layer], source_RS))
        used = [set(made.replicas(m, layer)) for m in range(3)]
        assert all(u and u <= chosen for u in used)
