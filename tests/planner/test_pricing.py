"""Charges of copies that stay, by hand; slots handed out without a clash; lines equal to the kernel's."""

import numpy as np

from equipoise.core.options import PlanOptions
from equipoise.core.plan import Bytes
from equipoise.cost.kernels import ACROSS, COLUMNS, COMPUTE, EXCHANGE, INSIDE, price
from equipoise.cost.window import edge_links, price_window
from equipoise.planner.assemble import WindowTask
from equipoise.planner.baselines import copy_bytes, copy_edges, count_before, fill_slots
from tests.planner.cases import cluster_of, model_of, skewed_loads


def task_of(loads, *, per_node=4):
    return WindowTask(
        loads=loads,
        cluster=cluster_of(loads.num_ranks, per_node=per_node),
        model=model_of(loads),
        slots=1,
        objective="seconds",
        options=PlanOptions(sends="rows"),
        policy="eplb-oracle",
    )


def copies(*placed):
    """[1, 32, 8] owners' copies, and those placed: (expert, rank)."""
    holds_LER = (np.arange(32) // 4)[None, :, None] == np.arange(8)
    for expert, rank in placed:
        holds_LER[0, expert, rank] = True
    return holds_LER


def test_links_count_copies_away_from_their_owner_inside_and_across_layer_by_layer():
    # Experts 0 and 1 of rank 0 to rank 1 (inside), 2 to rank 5 and 3 to rank 6 (across); then one of rank 7 to rank 0.
    layers = copies((0, 1), (1, 1), (2, 5), (3, 6)), copies((31, 0)), copies()
    found = edge_links(np.concatenate(layers), cluster_of(8, per_node=4).node_array_R)
    assert (found.inside_L.tolist(), found.across_L.tolist()) == ([2, 0, 0], [2, 1, 0])
    assert (found.all_inside, found.all_across) == (2, 3)


def test_copies_on_their_owners_cost_nothing():
    task = task_of(skewed_loads(0, layers=1))
    assert not any(ns.any() for ns in copy_edges(task, copies())) and copy_bytes(task, copies()) == Bytes()


def test_an_update_collects_and_adds_every_copys_gradient():
    task = task_of(skewed_loads(0, layers=1))
    holds = copies((0, 1), (1, 2))
    publish_ns, collect_ns = (
        task.cost.edge_ns(inside_experts=2, across_experts=0, edge=edge) for edge in ("publish", "collect")
    )
    add_ns = task.cost.add_ns(task.cost.edge_bytes("collect"))
    slow_ns = [task.cost.edge_slow_ns(inside_experts=2, across_experts=0, edge=edge) for edge in ("publish", "collect")]
    edges = copy_edges(task, holds)
    assert edges.ns_2L.tolist() == [[publish_ns], [collect_ns + 2 * add_ns]]
    assert edges.slow_2L.tolist() == [[slow_ns[0]], [slow_ns[1]]] and min(slow_ns) > 0
    both_edges = task.cost.edge_bytes("publish") + task.cost.edge_bytes("collect")
    assert copy_bytes(task, holds) == Bytes(edge_inside=2 * both_edges)


def test_recompute_brings_back_only_experts_that_left_their_owner():
    task = task_of(skewed_loads(0, layers=1, stage="recompute"))
    assert copy_edges(task, copies((0, 1))).ns_2L[1] == 0
    moved = copies((0, 1), (0, 2))
    moved[0, 0, 0] = False
    back_ns = task.cost.edge_ns(inside_experts=1, across_experts=0, edge="collect")
    assert copy_edges(task, moved).ns_2L[1] == back_ns


def test_slots_are_handed_out_in_order():
    assert count_before(np.array([[2, 0, 2, 2, 0], [1, 1, 0, 1, 1]])).tolist() == [[0, 0, 1, 2, 1], [0, 1, 0, 2, 3]]


def test_quotas_become_slots_without_the_homes():
    quota_MER = np.array([[[3, 1], [0, 4]], [[0, 4], [2, 2]]])
    expert_MLRS, rows_MLRS = fill_slots(np.array([[0, 1]]), [quota_MER])
    assert expert_MLRS[:, 0].tolist() == [[[-1], [0]], [[1], [0]]]
    assert rows_MLRS[:, 0].tolist() == [[[0], [1]], [[2], [4]]]


def test_lines_are_those_of_the_kernel():
    loads = skewed_loads(7)
    task = task_of(loads)
    home_LE = np.tile(np.random.default_rng(0).permutation(32) // 4, (2, 1))
    rep_expert = np.full((3, 2, 8, 1), -1)
    rep_rows = np.zeros_like(rep_expert)
    rep_expert[1, 1, 0, 0] = hot = int(np.flatnonzero((home_LE[1] != 0) & (loads.total_MLE()[1, 1] > 0))[0])
    rep_rows[1, 1, 0, 0] = 1
    tables, node_R = task.cost.tables(5), task.cluster.node_array_R
    drawn, local = (
        price_window(task.cost, loads, home_LE, rep_expert, rep_rows, in_proportion=p)[1, 1] for p in (True, False)
    )
    keep_N, line = np.full(2, 1000), np.zeros(COLUMNS, dtype=np.int64)
    # A copy, because loads are read-only: for another type of array the kernel would be compiled once more.
    entry = loads.load_MLRE[1, 1].copy(), home_LE[1], node_R, rep_expert[1, 1], rep_rows[1, 1], keep_N, tables
    price(*entry, True, line)
    assert hot >= 0 and drawn.tolist() == line.tolist()
    # Local first, the kernel also prices pulls, which copies that stay do not need.
    price(*entry, False, line)
    kept = [COMPUTE, EXCHANGE, INSIDE, ACROSS]
    assert local[kept].tolist() == line[kept].tolist() and local.sum() == local[kept].sum()
