"""The layer benchmarks' own logic on a CPU: variants compute the same, replicas take rows, pulls come in order."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks import layer as bench_layer
from benchmarks.layer import limits_of, move_to_replicas, prepare_with_replicas
from benchmarks.plain_layer import HeldBank, Inputs, fused_moe, plain_moe, smoke_shape
from benchmarks.pulls import HeldByLayer, PulledByVisit, build_stack, check_pulled, store_replicas
from equipoise.calibrate.bench import Bench
from equipoise.core.itinerary import Visit
from equipoise.runtime.reference import dense_experts

BENCH = Bench.on("cpu", runs=1)
SHAPE = smoke_shape()


@pytest.mark.parametrize("is_parallel", [False, True], ids=["alone", "parallel"])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_the_baselines_are_a_moe_layer(kind, is_parallel):
    given, home = Inputs.random(SHAPE, 9, BENCH), SHAPE.weights(SHAPE.homes, BENCH)
    wanted_TD = dense_experts(given.hidden_TD, given.ids_TK, given.gates_TK, home)
    if kind == "plain":
        got_TD = plain_moe(given, home, is_parallel=is_parallel)
    else:
        got_TD = fused_moe(given, home, HeldBank(SHAPE.weights(0, BENCH)), is_parallel=is_parallel)
    assert_close(got_TD, wanted_TD)


def test_all_variants_are_checked_and_timed():
    rows = bench_layer.measure_layers([SHAPE], (8,), BENCH)
    names = ["plain", "plain, parallel", "fused", "fused, parallel", "sorted", "prepared", "1 replica", "2 replicas"]
    assert [row["variant"] for row in rows] == names
    assert rows[0]["forward_over_plain_pct"] == rows[5]["update_over_prepared_pct"] == 0
    assert all(row["forward_ms"] > 0 and row["update_ms"] > 0 for row in rows)


def test_a_wrong_variant_is_refused():
    given = Inputs.random(SHAPE, 8, BENCH)
    variants = {"plain": lambda: given.hidden_TD * 1.0, "sorted": lambda: given.hidden_TD * 1.1}
    with pytest.raises(RuntimeError, match="sorted: relative errors"):
        bench_layer.check_variants(variants, (given.hidden_TD,), given)


def test_only_the_prepared_layer_is_held_to_the_limit():
    row = {"model": "m", "tokens": 1, "forward_over_plain_pct": 3.1, "update_over_plain_pct": -2.0}
    limits = limits_of([{**row, "variant": "plain"}, {**row, "variant": "prepared"}])
    assert [limit.holds for limit in limits] == [False, True]


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_take_half_of_an_experts_rows(replicas):
    ids_TK = Inputs.random(SHAPE, 40, BENCH).ids_TK
    moved_TK = move_to_replicas(ids_TK, homes=SHAPE.homes, replicas=replicas)
    dispatch = prepare_with_replicas(moved_TK, homes=SHAPE.homes, replicas=replicas).dispatch
    ends = dispatch.groups.replica_end_S.tolist()
    for replica, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert end - start == int((ids_TK[::2] == replica).sum()) > 0
    assert dispatch.groups.num_rows == ids_TK.numel()


def test_pulled_replicas_are_the_stored_ones_in_the_order_of_visits():
    stored = store_replicas(SHAPE, replicas=2, bench=BENCH)
    bank = PulledByVisit(stored, BENCH.device, has_backward=True)
    for phase, layer in bank.visits * 2:
        got = bank.weights(Visit(0, phase, layer))
        assert torch.equal(got.gate_up_SFD, stored[layer].gate_up_SFD)
        assert torch.equal(got.down_SDF, stored[layer].down_SDF)
    with pytest.raises(AssertionError, match="out of order"):
        bank.weights(Visit(0, "backward", 0))


def test_a_stack_with_pulls_is_the_stack_without(monkeypatch):
    stored = store_replicas(SHAPE, replicas=1, bench=BENCH)
    with bench_layer.group_of_one("cpu") as group:
        stack = build_stack(SHAPE, 8, replicas=1, group=group, bench=BENCH)
        check_pulled(stack, stored, BENCH.device)
        held = HeldByLayer.weights
        monkeypatch.setattr(HeldByLayer, "weights", lambda bank, visit: held(bank, visit._replace(layer=0)))
        with pytest.raises(RuntimeError, match="do not give the outputs"):
            check_pulled(stack, stored, BENCH.device)
