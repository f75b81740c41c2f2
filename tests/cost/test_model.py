"""`CostModel`: time never falls with work, nothing is free, other shapes and stages are priced in proportion."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.options import replica_bytes
from equipoise.cost import CostModel, profile_names
from equipoise.cost.model import FAR_ROWS, GLOO_BYTES_PER_S, interpolate

MODEL = ModelShape.preset("qwen3-30b-a3b")
CLUSTER = Cluster.preset("h200", nodes=4, ranks_per_node=8)
UPDATE, RECOMPUTE = (CostModel.of(CLUSTER, MODEL, stage=stage) for stage in ("update", "recompute"))
few = settings(max_examples=80, deadline=None)
rows_and_slots = (st.one_of(st.integers(1, 400_000), st.integers(1, FAR_ROWS)), st.integers(1, 40))


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


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "deepseek-v3", "olmoe"])
def test_more_slots_take_no_less_time_with_any_profile(name, model):
    """Beyond the table, too, where the lines of the H200's slots would cross at twice its rows."""
    for stage in ("update", "recompute"):
        cost = CostModel.of(Cluster.preset(name), ModelShape.preset(model), stage=stage)
        ns_SX = cost.compute_ns_SX(40)
        assert cost.rows_X[-1] == FAR_ROWS and ns_SX.shape == (41, len(cost.rows_X))
        assert (np.diff(ns_SX, axis=0) >= 0).all() and (np.diff(ns_SX[1:], axis=1) > 0).all()


@given(st.integers(1, 40))
@few
def test_no_rows_take_no_time_and_one_row_takes_some(slots):
    assert UPDATE.compute_ns(0, slots) == RECOMPUTE.compute_ns(0, slots) == 0
    assert UPDATE.compute_ns(1, slots) > RECOMPUTE.compute_ns(1, slots) > 0


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-235b-a22b", "glm-4.5-air", "mixtral-8x7b", "olmoe"])
def test_other_shapes_scale_with_their_flops_from_the_two_nearest_measured_ones(name, model):
    shape = ModelShape.preset(model)
    cost = CostModel.of(Cluster.preset(name), shape)
    by_distance = sorted(cost.profile.tables, key=lambda table: distance(table, shape))
    near = [by_distance[0]] if distance(by_distance[0], shape) == 0 else by_distance[:2]
    assert list(cost._nearest) == near
    weights = [1 / max(distance(table, shape), 1e-9) for table in near]
    scaled = [table.update_ns_SX[0, -1] * shape.row_flops / table.row_flops for table in near]
    wanted = sum(w * ns for w, ns in zip(weights, scaled, strict=True)) / sum(weights)
    rows = int(near[0].rows_X[-1])
    ordering = rows * shape.row_bytes / cost.profile.received_update_bytes_per_s * 1e9
    assert cost.compute_ns(rows, 1) == pytest.approx(wanted + ordering, rel=2e-3)


def distance(table, shape):
    """By how much both lengths of an expert differ, together."""
    pairs = ((table.hidden, shape.hidden), (table.expert_width, shape.expert_width))
    return math.prod(max(pair) / min(pair) for pair in pairs) - 1


def test_measured_points_are_returned_as_measured_with_the_ordering_of_their_rows():
    (table,) = UPDATE._nearest
    assert (table.hidden, table.expert_width) == (MODEL.hidden, MODEL.expert_width)
    for s, slots in enumerate(table.slots_S):
        for x, rows in enumerate(table.rows_X):
            ordering = UPDATE.ordering_ns(rows)
            assert ordering == pytest.approx(rows * 4096 / UPDATE.profile.received_update_bytes_per_s * 1e9, rel=1e-2)
            assert UPDATE.compute_ns(int(rows), int(slots)) == table.update_ns_SX[s, x] + ordering


def test_tables_of_different_rows_are_read_at_the_rows_of_the_nearest():
    table = UPDATE.profile.tables[0]
    fewer = replace(table, hidden=1024, rows_X=table.rows_X[::3], update_ns_SX=table.update_ns_SX[:, ::3])
    profile = replace(UPDATE.profile, tables=(table, replace(fewer, forward_ns_SX=fewer.update_ns_SX)))
    cost = CostModel.of(CLUSTER, MODEL.replace(hidden=1536), profile=profile)
    assert [t.hidden for t in cost._nearest] == [2048, 1024]
    for rows in (64, 2048, 100_000):
        halves = [
            CostModel.of(CLUSTER, MODEL.replace(hidden=1536), profile=replace(profile, tables=(one,)))
            for one in profile.tables
        ]
        low, high = sorted(cost.compute_ns(rows, 4) for cost in halves)
        assert low <= cost.compute_ns(rows, 4) <= high


def test_sending_is_priced_by_bytes_and_forward_alone_costs_less():
    assert UPDATE.sending_ns(0) == 0
    wanted = 10**6 * MODEL.row_bytes / UPDATE.profile.sent_update_bytes_per_s * 1e9
    assert UPDATE.sending_ns(10**6) == pytest.approx(wanted, rel=1e-2)
    assert RECOMPUTE.sending_ns(10**6) < UPDATE.sending_ns(10**6)


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


def test_an_edge_goes_at_the_slower_of_link_and_staging():
    slow = replace(UPDATE.profile, weight_bytes_per_s=10**9, gradient_bytes_per_s=2 * 10**9)
    cost = CostModel.of(CLUSTER, MODEL, profile=slow)
    fixed = slow.peer_fixed_ns
    assert cost.edge_ns(inside_experts=2, across_experts=0, edge="publish") == 2 * MODEL.expert_bytes + fixed
    assert cost.edge_ns(inside_experts=1, across_experts=0, edge="collect") == 2 * MODEL.expert_params + fixed


def test_an_edge_slows_compute_as_a_peer_does_inside_a_node_and_as_the_host_does_beyond():
    profile, fixed = UPDATE.profile, UPDATE.profile.peer_fixed_ns
    for edge in ("publish", "collect"):
        near, far = (
            UPDATE.edge_ns(inside_experts=2 * (1 - n), across_experts=2 * n, edge=edge) - fixed for n in (0, 1)
        )
        slow = [UPDATE.edge_slow_ns(inside_experts=n, across_experts=m, edge=edge) for n, m in ((2, 0), (0, 2), (2, 2))]
        assert slow[:2] == [
            near * profile.peer_slowdown_permille // 1000,
            far * profile.host_slowdown_permille // 1000,
        ]
        assert abs(slow[2] - sum(slow[:2])) <= 1, "both links have their own experts"


def test_experts_cross_nodes_at_the_measured_rate_or_at_what_the_transport_is_assumed_to_reach():
    assert UPDATE.relocation_bytes_per_s == CLUSTER.network_bytes_per_s * UPDATE.profile.across_permille // 1000
    gloo = CostModel.of(CLUSTER, MODEL, transport="gloo")
    assert gloo.relocation_bytes_per_s == GLOO_BYTES_PER_S < UPDATE.relocation_bytes_per_s
    slow = CostModel.of(Cluster.preset("h200", network_bytes_per_s=10**9), MODEL, transport="gloo")
    assert slow.relocation_bytes_per_s < 10**9, "no transport is faster than the wire"
    measured = replace(UPDATE.profile, relocation_bytes_per_s=3 * 10**9)
    for transport in ("nccl", "gloo"):
        cost = CostModel.of(CLUSTER, MODEL, profile=measured, transport=transport)
        price = cost.edge_ns(inside_experts=0, across_experts=6, edge="publish")
        assert price == 2 * MODEL.expert_bytes + cost.edge_fixed_ns
    # Rows are not experts: their price stays.
    assert gloo.tables(1).across_ps == UPDATE.tables(1).across_ps


def test_measured_overheads_are_charged_and_others_are_free():
    loads = LoadMatrix(np.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8))
    most = int(loads.load_MLRE[:, :, 3].sum())
    assert (UPDATE.foresight_ns(loads), UPDATE.refresh_ns(5)) == (0, 0)
    assert UPDATE.edge_fixed_ns == UPDATE.profile.peer_fixed_ns
    known = {"edge_fixed_ns": 7_000, "refresh_bytes_per_s": MODEL.expert_bytes * 1000}
    known |= {"counts_fixed_ns": 11, "counts_bytes_per_s": 8 * 10**9, "prepared_rows_per_s": 10**6}
    cost = CostModel.of(CLUSTER, MODEL, profile=replace(UPDATE.profile, **known))
    assert cost.edge_ns(inside_experts=1, across_experts=0, edge="publish") == (
        UPDATE.edge_ns(inside_experts=1, across_experts=0, edge="publish") - UPDATE.profile.peer_fixed_ns + 7_000
    )
    assert cost.edge_ns(inside_experts=0, across_experts=0, edge="publish") == 0, "layers that stay need no agreement"
    assert cost.refresh_ns(5) == 5_000_000
    assert cost.foresight_ns(loads) == 11 + 2 * 3 * 4 * 8 + 1000 * most


def test_gradients_come_home_in_fp32_and_weights_where_there_are_none():
    assert UPDATE.edge_bytes("publish") == MODEL.expert_bytes == 2 * MODEL.expert_params
    assert UPDATE.edge_bytes("collect") == 4 * MODEL.expert_params
    assert RECOMPUTE.edge_bytes("collect") == MODEL.expert_bytes


def test_a_return_is_as_large_as_the_weights_and_an_add_reads_two_and_writes_one():
    tables, profile = UPDATE.tables(1), UPDATE.profile
    assert tables.return_ns == tables.peer_ns
    assert tables.add_ns == 3 * MODEL.expert_bytes * 10**9 // profile.add_bytes_per_s
    assert (replica_bytes(MODEL, "recompute"), replica_bytes(MODEL, "update")) == (
        *(MODEL.expert_bytes, 2 * MODEL.expert_bytes),
    )


def test_recompute_returns_no_gradient():
    tables = RECOMPUTE.tables(4)
    assert (tables.phases, tables.return_ns, tables.add_ns) == (1, 0, 0)
    tables = UPDATE.tables(4)
    assert tables.phases == 2
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
