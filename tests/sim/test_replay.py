"""Work made of plans: the planner's own compute per entry, and cuts that keep what belongs to them."""

import numpy as np
import pytest

from equipoise.cost.work import replica_slots
from equipoise.planner import plan
from equipoise.sim.replay import cut, plan_work
from tests.cost.works import random_work
from tests.sim.steps import MODEL, cluster_of, skewed_loads


@pytest.fixture(scope="module")
def made():
    return plan(skewed_loads(6), cluster=cluster_of(), model=MODEL, slots=2)


def test_rows_of_every_rank_are_the_plans(made):
    work = plan_work(made)
    assert np.array_equal(work.rows_MLR, made.rank_load_MLR)
    closed = plan(skewed_loads(6), cluster=cluster_of(), model=MODEL, policy="static")
    both_ML = (plan_work(closed).forward_MLR + plan_work(closed).backward_MLR).max(axis=2)
    assert np.array_equal(both_ML + 4 * plan_work(closed).exchange_ML, closed.ns_ML)


def test_replica_slots_hold_the_replica_table(made):
    expert_MLRS, rows_MLRS = replica_slots(made.replica_table, made.rank_load_MLR.shape)
    assert len(made.replica_table) > 0
    assert (expert_MLRS >= 0).sum() == len(made.replica_table)
    for m, layer in np.ndindex(made.ns_ML.shape):
        held = {(int(e), r) for r in range(8) for e in expert_MLRS[m, layer, r] if e >= 0}
        assert held == {tuple(replica) for replica in made.replicas(m, layer)}
    assert rows_MLRS.sum() == made.replica_table.rows_P.sum()


def test_transfers_go_from_home_to_replica_and_back(made):
    work, table = plan_work(made), made.replica_table
    transfers = work.transfers
    assert work.itinerary == made.itinerary and work.itinerary.pulls_V.any()
    assert np.array_equal(transfers.rank_P, table.rank_P)
    assert np.array_equal(transfers.home_P, made.home_LE[table.entry_P % MODEL.layers, table.expert_P])
    reactive = plan(skewed_loads(6), cluster=cluster_of(), model=MODEL, policy="reactive")
    assert not plan_work(reactive).itinerary.pulls_V.any()
    assert len(plan_work(reactive).transfers.rank_P) == len(reactive.replica_table)
    copies = plan(skewed_loads(6), cluster=cluster_of(), model=MODEL, policy="eplb-oracle")
    assert len(plan_work(copies).transfers.rank_P) == 0


def test_a_cut_of_everything_is_the_work_itself():
    work = random_work(np.random.default_rng(1), micro_steps=3, layers=4)
    assert cut(work, micro_steps=slice(0, 3), layers=slice(0, 4)) == work


def test_a_cut_is_published_and_collected_where_the_window_is():
    edge_ns_2L = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    given = {"edge_ns_2L": edge_ns_2L, "edge_slow_2L": 10 * edge_ns_2L}
    work = random_work(np.random.default_rng(1), micro_steps=3, layers=4, **given)
    cuts = {(0, 2): [[1, 2], [0, 0]], (1, 2): [[0, 0], [0, 0]], (1, 3): [[0, 0], [5, 6]], (0, 3): [[1, 2], [5, 6]]}
    for micro_steps, wanted in cuts.items():
        part = cut(work, micro_steps=slice(*micro_steps), layers=slice(0, 2))
        assert part.edge_ns_2L.tolist() == wanted and (part.edge_slow_2L == 10 * part.edge_ns_2L).all()


def test_edges_are_the_plans_own():
    made = plan(skewed_loads(6, tokens=65_536), cluster=cluster_of(), model=MODEL, policy="eplb-oracle")
    work = plan_work(made)
    assert work.edge_ns_2L.all() and np.array_equal(work.edge_ns_2L, made.edge_ns_2L)
    assert work.edge_slow_2L.all() and np.array_equal(work.edge_slow_2L, made.edge_slow_2L)


def test_a_cut_keeps_the_transfers_of_its_entries():
    work = random_work(np.random.default_rng(2), micro_steps=3, layers=4, replicas=4)
    part = cut(work, micro_steps=slice(1, 3), layers=slice(0, 2))
    assert part.shape == (2, 2, 4)
    for m, layer in np.ndindex(2, 2):
        own = slice(*part.transfers.start_ML[m * 2 + layer : m * 2 + layer + 2])
        entry = (m + 1) * 4 + layer
        whole = slice(*work.transfers.start_ML[entry : entry + 2])
        assert np.array_equal(part.transfers.rank_P[own], work.transfers.rank_P[whole])
        assert np.array_equal(part.transfers.path_P2[own], work.transfers.path_P2[whole])
