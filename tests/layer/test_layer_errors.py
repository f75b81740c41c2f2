"""What a balanced layer refuses, and in which words. One process is enough."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from equipoise.core.errors import InfeasiblePlanError, RoutesError, TopologyError
from equipoise.core.plan import Visit
from equipoise.layer.experts import BalancedExperts, LayerOptions, Window
from equipoise.transfer.node import ExpertWeights
from tests.layer.cases import random_routing, static_plan
from tests.layer.stack import Run, build_layers, token_inputs
from tests.transfer.windows import no_transfers


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def case(group):
    """A layer at work, its window and its inputs: ids, hidden states, gates."""
    routing = random_routing(14, ranks=1)
    plan = static_plan(routing)
    layer = build_layers(group, plan, Run())[0]
    layer.begin(Window(plan, rank=0, transfers=no_transfers(plan, layer.home)))
    hidden_TD, gates, _ = token_inputs(routing, 0, 0, run=Run())
    return layer, (hidden_TD, torch.from_numpy(routing.ids[0][0][0]), gates[0])


def test_routes_other_than_prepared_are_counted_and_stop_the_optimizer(case):
    layer, (hidden_TD, ids_TK, gates_TK) = case
    prepared = layer.prepare(ids_TK, 0)
    layer(hidden_TD, ids_TK, gates_TK, Visit(0, "forward", 0), prepared=prepared)
    layer.check_matched()
    other_TK = ids_TK.clone()
    other_TK[:2, 0] = (ids_TK[:2, 0] + 1) % 8
    layer(hidden_TD, other_TK, gates_TK, Visit(0, "forward", 0), prepared=prepared)
    with pytest.raises(RoutesError, match="layer index 0: 2 rows were routed otherwise than prepared"):
        layer.check_matched()
    layer.check_matched()


def test_a_dispatch_prepared_for_other_tokens_is_refused(case):
    layer, (hidden_TD, ids_TK, gates_TK) = case
    prepared = layer.prepare(ids_TK, 0)
    with pytest.raises(RoutesError, match="prepare it for this micro-step's tokens"):
        layer(hidden_TD[1:], ids_TK[1:], gates_TK[1:], Visit(0, "forward", 0), prepared=prepared)


def test_ids_that_were_not_counted_cannot_be_prepared(case):
    layer, (_, ids_TK, _) = case
    with pytest.raises(RoutesError, match=r"slot \d of rank 0 gets \d+ rows from these ids, but the plan says \d+"):
        layer.prepare(ids_TK[1:], 0)


def test_the_checked_mode_refuses_a_prepared_dispatch_of_another_order(group):
    routing = random_routing(14, ranks=1)
    layer = build_layers(group, static_plan(routing), Run(options=LayerOptions(is_checked=True)))[0]
    layer.begin(Window(static_plan(routing), rank=0, transfers=no_transfers(static_plan(routing), layer.home)))
    hidden_TD, gates, _ = token_inputs(routing, 0, 0, run=Run())
    ids_TK = torch.from_numpy(routing.ids[0][0][0])
    prepared = layer.prepare(ids_TK, 0)
    inputs = (hidden_TD, ids_TK, gates[0], Visit(0, "forward", 0))
    layer(*inputs, prepared=prepared)
    flipped = dataclasses.replace(prepared, index_TK=prepared.index_TK.flip(0))
    with pytest.raises(RoutesError, match="not the one that exchanged counts give"):
        layer(*inputs, prepared=flipped)


def test_the_visit_of_another_layer_is_refused(case):
    layer, inputs = case
    with pytest.raises(InfeasiblePlanError, match="layer index 0 was given the visit of layer index 1"):
        layer(*inputs, Visit(0, "forward", 1))


def test_a_micro_step_outside_the_plan_is_refused(case):
    layer, inputs = case
    with pytest.raises(InfeasiblePlanError, match=r"micro-steps 0\.\.1"):
        layer(*inputs, Visit(2, "forward", 0))


def test_a_layer_without_a_plan_says_so(case):
    layer, inputs = case
    layer.window = None
    with pytest.raises(InfeasiblePlanError, match=r"no plan yet; call begin\(window\)"):
        layer(*inputs, Visit(0, "forward", 0))


def test_a_plan_for_another_number_of_experts_is_refused(case):
    layer, _ = case
    routing = random_routing(1, ranks=1, experts=16)
    plan = static_plan(routing)
    with pytest.raises(InfeasiblePlanError, match="8 home experts, but the plan has 16 home slots"):
        layer.begin(Window(plan, rank=0, transfers=no_transfers(plan, layer.home)))


def test_widths_that_grouped_products_cannot_take_are_refused_and_the_loop_takes_them(group):
    home = ExpertWeights(torch.zeros(2, 12, 8), torch.zeros(2, 8, 6))
    with pytest.raises(TopologyError, match=r"multiples of 4 for torch.float32, got 8 and 6; use products='loop'"):
        BalancedExperts(home, layer=0, group=group)
    assert BalancedExperts(home, layer=0, group=group, options=LayerOptions(products="loop")).gate_up.shape[1] == 12


def test_replicas_and_counters_are_not_in_the_state_dict(case):
    layer, _ = case
    assert sorted(layer.state_dict()) == ["down", "gate_up"]
