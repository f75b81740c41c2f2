"""`CostModel`: time never falls with work, nothing is free, other shapes and stages are priced in proportion."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, ModelShape
from equipoise.cost import CostModel, profile_names
from equipoise.cost.model import interpolate

MODEL = ModelShape.preset("qwen3-30b-a3b")
CLUSTER = Cluster.preset("h200", nodes=4, ranks_per_node=8)
UPDATE, RECOMPUTE = (CostModel.of(CLUSTER, MODEL, stage=stage) for stage in ("update", "recompute"))
few = settings(max_examples=80, deadline=None)
rows_and_slots = (st.integers(1, 400_000), st.integers(1, 40))


@given(*rows_and_slots, st.integers(0, 5000))
@few
def test_time_never_falls_with_more_rows(rows, slots, more):
    for cost in (UPDATE, RECOMPUTE):
        assert cost.compute_ns(rows, slots) <= cost.compute_ns(rows + more, slots)


@given(*rows_and_slots)
@few
def test_time_never_falls_with_more_non_empty_slots(rows, slots):
    for cost in (UPDATE, RECOMPUTE):
        assert cost.compute_ns(rows, slots) <= cost.compute_ns(rows, slots + 1)


@given(st.integers(1, 40))
@few
def test_no_rows_take_no_time_and_one_row_takes_some(slots):
    assert UPDATE.compute_ns(0, slots) == RECOMPUTE.compute_ns(0, slots) == 0
    assert UPDATE.compute_ns(1, slots) > RECOMPUTE.compute_ns(1, slots) > 0


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "olmoe"])
def test_other_shapes_scale_with_their_flops_from_the_nearest_measured_one(name, model):
    shape = ModelShape.preset(model)
    cost = CostModel.of(Cluster.preset(name), shape)
    table = cost._nearest
    factors = [max(t.row_flops / shape.row_flops, shape.row_flops / t.row_flops) for t in cost.profile.tables]
    assert min(factors) == max(table.row_flops / shape.row_flops, shape.row_flops / table.row_flops)
    measured = table.update_ns_SX[0, -1]
    assert cost.compute_ns(int(table.rows_X[-1]), 1) == measured * shape.row_flops // table.row_flops


def test_measured_points_are_returned_as_measured():
    table = UPDATE._nearest
    assert table.row_flops == MODEL.row_flops
    for s, slots in enumerate(table.slots_S):
        for x, rows in enumerate(table.rows_X):
            assert UPDATE.compute_ns(int(rows), int(slots)) == table.update_ns_SX[s, x]


def test_interpolation_is_straight_between_points_flat_below_and_sloped_beyond():
    rows_X, ns_X = np.array([0, 10, 20, 40]), np.array([0, 100, 200, 600])
    assert [interpolate(rows_X, ns_X, n) for n in (-1, 0, 1, 10, 15, 20, 30, 40, 50)] == [
        *(0, 0, 100, 100, 150, 200, 400, 600, 800)
    ]


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
@few
def test_exchanges_take_the_busiest_link_and_never_fall(inside, across, more):
    now = UPDATE.exchange_ns(inside, across)
    assert now == max(UPDATE.exchange_ns(inside, 0), UPDATE.exchange_ns(0, across))
    assert now <= UPDATE.exchange_ns(inside + more, across)
    assert now <= UPDATE.exchange_ns(inside, across + more)


def test_an_update_exchanges_four_times_and_a_recompute_twice():
    assert UPDATE.exchange_ns(1000, 0) == 2 * RECOMPUTE.exchange_ns(1000, 0)


def test_the_network_is_slower_than_nvlink():
    assert UPDATE.exchange_ns(0, 10**5) > UPDATE.exchange_ns(10**5, 0)


def test_an_edge_without_displaced_experts_is_free_and_more_never_cost_less():
    for edge in ("publish", "collect"):
        prices = [UPDATE.edge_ns(inside_experts=n, across_experts=0, edge=edge) for n in range(5)]
        assert prices[0] == 0
        assert prices == sorted(set(prices))
        assert UPDATE.edge_ns(inside_experts=0, across_experts=1, edge=edge) > prices[1]


def test_gradients_come_home_in_fp32_and_weights_where_there_are_none():
    assert UPDATE.edge_bytes("publish") == MODEL.expert_bytes == 2 * MODEL.expert_params
    assert UPDATE.edge_bytes("collect") == 4 * MODEL.expert_params
    assert RECOMPUTE.edge_bytes("collect") == MODEL.expert_bytes


def test_recompute_returns_no_gradient_and_prefers_the_host_path():
    tables = RECOMPUTE.tables(4)
    assert (tables.phases, tables.return_ns, tables.add_ns, tables.prefers_host) == (1, 0, 0, 1)
    tables = UPDATE.tables(4)
    assert (tables.phases, tables.prefers_host) == (2, 0)
    assert min(tables.return_ns, tables.add_ns) > 0


def test_deeper_look_ahead_widens_the_window_and_nothing_else():
    deep = CostModel.of(CLUSTER, MODEL, depth=3).tables(4)
    flat = UPDATE.tables(4)
    assert deep.depth == 3 * flat.depth
    changed = [n for n in flat._fields if not np.array_equal(getattr(deep, n), getattr(flat, n))]
    assert changed == ["depth"]


def test_slower_links_of_a_cluster_are_seen():
    slow = Cluster.preset("h200", nodes=4, ranks_per_node=8, network_bytes_per_s=CLUSTER.network_bytes_per_s // 2)
    cost = CostModel.of(slow, MODEL)
    assert cost.tables(1).across_ps >= 2 * UPDATE.tables(1).across_ps - 1
    assert cost.edge_ns(inside_experts=0, across_experts=3, edge="publish") > UPDATE.edge_ns(
        inside_experts=0, across_experts=3, edge="publish"
    )
