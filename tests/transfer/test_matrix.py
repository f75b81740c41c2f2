"""Parity of layer and engine together over the whole matrix: ranks, nodes, slots, checkpointing, ways, empty ranks."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.layer.experts import LayerOptions
from tests.layer.cases import random_plan, random_routing, static_plan
from tests.layer.stack import MODES, Run, run_stack
from tests.layer.test_experts import EVERYTHING, near, same_bits, tensors_of
from tests.transfer.training import run_window


def with_itinerary(plan):
    """The plan with the order of visits that the planner would give it."""
    from equipoise.core.options import PlanOptions
    from equipoise.planner.assemble import build_itinerary

    has_replicas_ML = (np.diff(plan.replica_table.start_ML) > 0).reshape(plan.ns_ML.shape)
    return dataclasses.replace(plan, itinerary=build_itinerary("update", has_replicas_ML, PlanOptions()))


def run_of(mode="plain", dispatch="direct"):
    return Run(options=LayerOptions(is_deterministic=True, dispatch=dispatch), mode=mode)


def owned_grads(outcomes):
    """Experts' gradients in logical order: owners are contiguous, so it is the order of ranks."""
    layers = zip(*(outcome.expert_grads for outcome in outcomes), strict=True)
    return [[torch.cat(parts) for parts in zip(*layer, strict=True)] for layer in layers]


@functools.cache
def crossed(name, nodes):
    """Routing and plan of one awkward case on 4 ranks; experts 2 and 3 have their home on rank 1."""
    if name == "zero rows received":
        routing = random_routing(5, ranks=4, avoid=(2, 3))
        plan = static_plan(routing, slots=1, nodes=nodes)
        assert plan.rank_load_MLR[:, :, 1].sum() == 0
        return routing, with_itinerary(plan)
    routing = random_routing(5, ranks=4, silent=(1, 3) if name == "zero tokens at a source" else ())
    return routing, with_itinerary(random_plan(routing, 1, slots=0 if name == "zero replicas" else 1, nodes=nodes))


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    ("name", "nodes"),
    [("zero tokens at a source", 1), ("zero tokens at a source", 2), ("zero rows received", 2), ("zero replicas", 2)],
)
def test_no_mode_of_checkpointing_hangs_or_differs_under_the_engine(pool, name, nodes):
    routing, plan = crossed(name, nodes)
    static = pool.run(run_stack, 4, static_plan(routing), routing, run_of())
    plain, *others = [pool.run(run_window, 4, plan, routing, run_of(mode)) for mode in MODES]
    same_bits(plain, static)
    near(owned_grads(plain), owned_grads(static))
    for outcome in others:
        same_bits(outcome, plain, names=EVERYTHING)
    if name == "zero replicas":
        assert all(map(torch.equal, tensors_of(owned_grads(plain)), tensors_of(owned_grads(static))))


@pytest.mark.dist(8)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 2, 4, 4, 8]),
    nodes=st.integers(1, 2),
    slots=st.integers(0, 2),
    mode=st.sampled_from(MODES),
    dispatch=st.sampled_from(["direct", "two_level"]),
    silent=st.sets(st.integers(0, 7), max_size=3),
)
@settings(max_examples=16, deadline=None)
def test_random_plans_are_exact(pool, seed, ranks, nodes, slots, mode, dispatch, silent):
    routing = random_routing(seed, ranks=ranks, silent=tuple(silent), tokens=10)
    plan = with_itinerary(random_plan(routing, seed, slots=slots, nodes=min(nodes, ranks)))
    static = pool.run(run_stack, ranks, static_plan(routing), routing, run_of())
    balanced = pool.run(run_window, ranks, plan, routing, run_of(mode, dispatch))
    same_bits(balanced, static)
    near(owned_grads(balanced), owned_grads(static))
    if not len(plan.replica_table):
        assert all(map(torch.equal, tensors_of(owned_grads(balanced)), tensors_of(owned_grads(static))))
