"""The layer and the transfer engine together: owners' gradients bit by bit, and weights after many steps."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from equipoise.layer.experts import LayerOptions
from equipoise.transfer.returns import returns_far
from tests.layer.cases import cluster_of, model_of, random_plan, random_routing, static_plan
from tests.layer.stack import MODES, Run, logical_grads, run_stack
from tests.layer.test_experts import same_bits
from tests.transfer.training import run_window, train

EXACT = LayerOptions(is_deterministic=True)


@functools.cache
def planned(seed, ranks, slots, nodes):
    """Routes, and the planner's plan for them, levelling rows whatever it costs."""
    import equipoise as eq

    routing = random_routing(seed, ranks=ranks)
    given = {"cluster": cluster_of(ranks, nodes=nodes), "model": model_of(routing)}
    return eq.plan(routing.loads(), slots=slots, objective="skew", **given), routing


@functools.cache
def scattered(seed, ranks, slots, nodes):
    """Routes, and a random plan for them with the itinerary that the planner would give it."""
    from equipoise.core.options import PlanOptions
    from equipoise.planner.assemble import build_itinerary

    routing = random_routing(seed, ranks=ranks)
    plan = random_plan(routing, seed, slots=slots, nodes=nodes)
    has_replicas_ML = (np.diff(plan.replica_table.start_ML) > 0).reshape(plan.ns_ML.shape)
    return dataclasses.replace(plan, itinerary=build_itinerary("update", has_replicas_ML, PlanOptions())), routing


@pytest.mark.dist(4)
@pytest.mark.parametrize(("make", "mode"), [(planned, MODES[0]), *((scattered, mode) for mode in MODES)])
@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
def test_the_engine_gives_the_same_bits_as_plain_collectives(pool, make, nodes, mode):
    plan, routing = make(21, 4, 2, nodes)
    assert len(plan.replica_table), "a case without a replica shows nothing"
    check_against_collectives(pool, plan, routing, mode)


def check_against_collectives(pool, plan, routing, mode):
    run = Run(options=EXACT, mode=mode)
    moved = pool.run(run_window, 4, plan, routing, run)
    gathered = pool.run(run_stack, 4, plan, routing, run)
    same_bits(moved, gathered)
    for layer, wanted in enumerate(logical_grads(gathered, plan)):
        # Owners are contiguous, so their gradients in rank order are the logical order.
        got = [torch.cat(parts) for parts in zip(*(o.expert_grads[layer] for o in moved), strict=True)]
        assert all(map(torch.equal, got, wanted))


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", ["plain", "early_stop"])
def test_replicas_in_other_nodes_train_to_the_same_bits(pool, mode):
    import equipoise as eq

    routing = random_routing(23, ranks=4)
    given = {"cluster": cluster_of(4, nodes=2), "model": model_of(routing), "slots": 2, "objective": "skew"}
    plan = eq.plan(routing.loads(), options=eq.PlanOptions(cross_node=True, max_displaced=0), **given)
    assert returns_far(plan), "a case without a gradient from another node shows nothing"
    check_against_collectives(pool, plan, routing, mode)


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", ["plain", "early_stop"])
@pytest.mark.parametrize("path", ["peer", "host"])
def test_an_arena_and_forced_paths_give_the_same_bits(pool, path, mode):
    plan, routing = scattered(21, 4, 2, 1)
    one = Run(options=EXACT, mode=mode, transfer={"buffers": "separate"})
    other = Run(options=EXACT, mode=mode, transfer={"buffers": "arena", "path": path})
    apart, joined = (pool.run(run_window, 4, plan, routing, run) for run in (one, other))
    same_bits(apart, joined)
    for a, b in zip(apart, joined, strict=True):
        pairs = zip(a.expert_grads, b.expert_grads, strict=True)
        assert all(torch.equal(x, y) for p, q in pairs for x, y in zip(p, q, strict=True))


@pytest.mark.dist(4)
def test_weights_after_50_steps_are_those_of_static_training(pool):
    ranks, nodes = 4, 2
    windows = [planned(seed, ranks, 2, nodes) for seed in (31, 32, 33)]
    windows += [scattered(seed, ranks, 2, nodes) for seed in (34, 35)]
    fixed = [(static_plan(routing, nodes=nodes), routing) for _, routing in windows]
    balanced = pool.run(train, ranks, windows, Run(), 50, True)
    static = pool.run(train, ranks, fixed, Run(), 50, False)
    assert sum(pulls for _, pulls in balanced) > 0
    for (got, _), (wanted, _) in zip(balanced, static, strict=True):
        for x, y in zip(got, wanted, strict=True):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max()
