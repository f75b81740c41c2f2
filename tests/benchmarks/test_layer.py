"""The layer benchmarks' own logic on a CPU: variants compute the same, replicas take rows, pulls come in order."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks import layer as bench_layer
from benchmarks.decoder_stack import LAYERS, HeldByLayer
from benchmarks.layer import limits_of, move_to_replicas, prepare_with_replicas
from benchmarks.plain_layer import HeldBank, Inputs, fused_moe, plain_moe, smoke_shape
from benchmarks.pulls import Case, measure_case
from benchmarks.pulls import limits_of as pull_limits_of
from benchmarks.transfer import measure_memory, measure_shape
from benchmarks.turns import added_pct, run_in_turn
from equipoise.calibrate.bench import Bench
from equipoise.core.plan import Visit
from tests.layer.reference import dense_experts

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
    names = ["plain", "plain, parallel", "fused", "fused, parallel", "sorted", "prepared"]
    names += ["1 replica", "1 replica, arena", "2 replicas", "2 replicas, arena"]
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
    dispatch = prepare_with_replicas(moved_TK, homes=SHAPE.homes, replicas=replicas)
    ends = dispatch.groups.replica_end_S.tolist()
    for replica, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert end - start == int((ids_TK[::2] == replica).sum()) > 0
    assert dispatch.groups.num_rows == ids_TK.numel()


@pytest.mark.parametrize("path", ["host", "peer"])
def test_the_pullers_replicas_are_the_layers_first_experts(path):
    with bench_layer.group_of_one("cpu"):
        case = Case(SHAPE, 8, 2, bench=BENCH, path=path)
        bank = case.pulled(2, has_backward=True)
        for _ in range(2):
            bank.begin()
            visits = [("forward", layer) for layer in range(LAYERS)]
            visits += [("backward", layer) for layer in reversed(range(LAYERS))]
            for phase, layer in visits:
                got, homes = bank.weights(Visit(0, phase, layer)), case.stack.experts[layer].home
                assert all(torch.equal(a, b[:2]) for a, b in zip(got.tensors(), homes.tensors(), strict=True))
        bank.close()
        counters = case.rank.node.counters
        # Two buffers: the last two layers' replicas are still there when their backward comes.
        assert counters.on_demand == 0 and counters.pulls == 2 * 2 * (2 * LAYERS - 2)
        case.close()


def test_a_stack_with_pulls_is_the_stack_without(monkeypatch):
    with bench_layer.group_of_one("cpu"):
        case = Case(SHAPE, 8, 1, bench=BENCH, path="host")
        case.check()
        held = HeldByLayer.weights
        monkeypatch.setattr(HeldByLayer, "weights", lambda bank, visit: held(bank, visit._replace(layer=0)))
        with pytest.raises(RuntimeError, match="do not give the outputs"):
            case.check()
        case.close()


def test_pulls_are_timed_beside_held_runs_and_held_to_the_limit():
    with bench_layer.group_of_one("cpu"):
        row = measure_case(SHAPE, 8, 1, bench=BENCH, path="host")
    assert row["forward_held_ms"] > 0 and row["update_pulled_ms"] > 0
    limits = pull_limits_of([{**row, "forward_added_pct": 2.1, "update_added_pct": 1.9}])
    assert [limit.holds for limit in limits] == [False, True]


def test_rates_and_memory_have_a_row_for_every_case():
    with bench_layer.group_of_one("cpu") as group:
        rates, ways = measure_shape(SHAPE, bench=BENCH, group=group)
        memory = measure_memory(SHAPE, 2, bench=BENCH, group=group)
    assert [(row["path"], row["replicas"]) for row in rates] == [("peer", 1), ("peer", 2), ("host", 1), ("host", 2)]
    assert [row["replicas"] for row in ways] == [1, 2]
    assert all(len({tuple(row) for row in rows}) == 1 for rows in (rates, ways)), "a table needs the same columns"
    assert [row["buffers"] for row in memory] == ["separate", "arena"]
    assert all(row["buffers_MB"] == row["mailboxes_MB"] for row in memory), "fp32 weights and gradients, as many boxes"


def test_works_are_timed_in_turn_and_compared_run_by_run():
    calls = []
    works = {name: lambda run, name=name: calls.append((name, run)) for name in ("a", "b")}
    times = run_in_turn(works, Bench.on("cpu", runs=4))
    assert len(times["a"]) == len(times["b"]) == 4
    assert sorted(calls) == sorted((name, run) for name in works for run in range(7))
    added, low, high = added_pct(2 * times["a"], times["a"])
    assert added == low == high == 100.0
