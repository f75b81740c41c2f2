"""Parity of the balanced layer: against static expert parallelism bit by bit, against float64 in one process closely.

Every comparison covers outputs, gradients of hidden states, gates and experts, over two layers and two micro-steps.
"""

import dataclasses
import functools
import itertools

import pytest
import torch

from equipoise.core.plan import Visit
from equipoise.layer.experts import LayerOptions
from tests.layer.cases import cluster_of, model_of, random_plan, random_routing, static_plan
from tests.layer.stack import MODES, Run, logical_grads, run_dense, run_forward_only, run_stack

EXACT = LayerOptions(is_deterministic=True)
EVERYTHING = ("outputs", "hidden_grads", "gate_grads", "attention_grads", "expert_grads")


@functools.cache
def dense_of(routing, run):
    """The float64 outcome, which no option but the activation changes."""
    return run_dense(routing, run)


@functools.cache
def routing_of(seed, ranks):
    return random_routing(seed, ranks=ranks)


@functools.cache
def planner_plan(seed, ranks, slots, nodes):
    """What the planner makes of the case, levelling rows whatever it costs."""
    import equipoise as eq

    routing = routing_of(seed, ranks)
    return eq.plan(
        routing.loads(), cluster=cluster_of(ranks, nodes=nodes), model=model_of(routing), slots=slots, objective="skew"
    )


def same_bits(got, wanted, *, names=("outputs", "hidden_grads", "gate_grads")):
    for rank, (a, b) in enumerate(zip(got, wanted, strict=True)):
        for name in names:
            for x, y in zip(tensors_of(getattr(a, name)), tensors_of(getattr(b, name)), strict=True):
                assert torch.equal(x, y), f"rank {rank}: {name} differ by {(x - y).abs().max()}"


def tensors_of(nested):
    return [nested] if isinstance(nested, torch.Tensor) else [t for part in nested for t in tensors_of(part)]


def near(got, wanted, tolerance=2e-5):
    for x, y in zip(tensors_of(got), tensors_of(wanted), strict=True):
        scale = y.abs().max().item() if y.numel() else 0.0
        assert x.shape == y.shape and not x.isnan().any()
        assert (x.double() - y).abs().max().item() <= tolerance * scale if x.numel() else True


def rms_error(grads, wanted):
    errors = [(x.double() - y).reshape(-1) for x, y in zip(tensors_of(grads), tensors_of(wanted), strict=True)]
    return torch.cat(errors).pow(2).mean().sqrt().item()


def near_reference(outcomes, plan, routing, run):
    dense = dense_of(routing, dataclasses.replace(run, mode="plain", in_flight=1))
    for got, wanted in zip(outcomes, dense, strict=True):
        near(got.outputs, wanted.outputs)
        near(got.hidden_grads, wanted.hidden_grads)
        near(got.gate_grads, wanted.gate_grads)
    near(logical_grads(outcomes, plan), dense[0].expert_grads)
    total = [sum(parts) for parts in zip(*(o.attention_grads for o in outcomes), strict=True)]
    near(total, dense[0].attention_grads)


@pytest.mark.dist(8)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, EXACT), (2, LayerOptions()), (4, LayerOptions()), (4, EXACT), (8, EXACT)],
    ids=["EP1", "EP2, plain", "EP4, plain", "EP4", "EP8"],
)
def test_placement_alone_is_bit_equal_to_static_ep(pool, ranks, options):
    routing, run = routing_of(ranks, ranks), Run(options=options)
    static = pool.run(run_stack, ranks, static_plan(routing), routing, run)
    near_reference(static, static_plan(routing), routing, run)
    for seed in range(2):
        plan = random_plan(routing, seed, slots=0)
        displaced = pool.run(run_stack, ranks, plan, routing, run)
        same_bits(displaced, static)
        wanted = logical_grads(static, static_plan(routing))
        assert all(map(torch.equal, tensors_of(logical_grads(displaced, plan)), tensors_of(wanted)))


@pytest.mark.dist(8)
@pytest.mark.parametrize(
    ("ranks", "nodes", "slots"),
    [(2, 1, 2), (4, 1, 1), (4, 2, 2), (8, 2, 1)],
    ids=["EP2", "EP4", "EP4 on 2 nodes", "EP8 on 2 nodes"],
)
def test_replicas_are_bit_equal_in_outputs_and_close_in_every_gradient(pool, ranks, nodes, slots):
    routing, run = routing_of(10 + ranks, ranks), Run(options=EXACT)
    static = pool.run(run_stack, ranks, static_plan(routing), routing, run)
    dense = dense_of(routing, run)[0].expert_grads
    plans = [random_plan(routing, seed, slots=slots, nodes=nodes) for seed in range(3)]
    plans.append(planner_plan(10 + ranks, ranks, slots, nodes))
    errors = []
    for plan in plans:
        assert len(plan.replica_table), "a case without a replica shows nothing"
        outcomes = pool.run(run_stack, ranks, plan, routing, run)
        same_bits(outcomes, static)
        near_reference(outcomes, plan, routing, run)
        errors.append(rms_error(logical_grads(outcomes, plan), dense))
    limit = 1.1 * rms_error(logical_grads(static, static_plan(routing)), dense)
    assert max(errors) <= limit, f"weight gradients err by {max(errors):.3e}, static EP's limit is {limit:.3e}"


def crossed_case(name):
    """Routing and plan of one awkward case on 4 ranks; experts 2 and 3 have their home on rank 1."""
    if name == "zero rows received":
        routing = random_routing(5, ranks=4, avoid=(2, 3))
        plan = static_plan(routing, slots=1)
        assert plan.rank_load_MLR[:, :, 1].sum() == 0
        return routing, plan
    silent = {"zero tokens at a source": (1, 3), "zero tokens anywhere": (0, 1, 2, 3), "zero replicas": ()}[name]
    routing = random_routing(5, ranks=4, silent=silent)
    return routing, random_plan(routing, 1, slots=0 if name == "zero replicas" else 1, is_displaced=False)


@pytest.mark.dist(4)
@pytest.mark.parametrize(
    "name", ["zero tokens at a source", "zero rows received", "zero replicas", "zero tokens anywhere"]
)
def test_no_mode_of_checkpointing_hangs_or_differs(pool, name):
    routing, plan = crossed_case(name)
    plain, *others = [pool.run(run_stack, 4, plan, routing, Run(options=EXACT, mode=mode)) for mode in MODES]
    near_reference(plain, plan, routing, Run(options=EXACT))
    for outcome in others:
        same_bits(outcome, plain, names=EVERYTHING)


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_checkpointing_agree_with_replicas_and_idle_ranks(pool, mode):
    routing = random_routing(6, ranks=4, silent=(2,), avoid=(6, 7))
    plan = random_plan(routing, 2, slots=2, is_displaced=False)
    held = [sum(rank == r for _, rank in plan.replicas(0, 0)) for r in range(4)]
    assert 0 in held or len(set(held)) > 1, "ranks should differ in their replicas"
    plain = pool.run(run_stack, 4, plan, routing, Run(options=EXACT))
    outcome = pool.run(run_stack, 4, plan, routing, Run(options=EXACT, mode=mode))
    same_bits(outcome, plain, names=EVERYTHING)
    near_reference(outcome, plan, routing, Run(options=EXACT))


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", MODES)
def test_returns_are_collected_after_the_attentions_backward(pool, mode):
    routing = routing_of(7, 4)
    for outcome in pool.run(run_stack, 4, random_plan(routing, 3, slots=1), routing, Run(mode=mode)):
        log = [entry for entry in outcome.log if entry[0] != "weights"]
        wanted = [
            entry
            for micro_step in range(2)
            for layer in (1, 0)
            for entry in (("hand_in", micro_step, layer), ("attention", layer), ("collect", micro_step, layer))
        ]
        assert log == wanted


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", MODES)
def test_recomputation_asks_for_the_backward_visit(pool, mode):
    routing = routing_of(7, 4)
    (outcome, *_) = pool.run(run_stack, 4, random_plan(routing, 3, slots=1), routing, Run(mode=mode))
    asked = [entry[1:] for entry in outcome.log if entry[0] == "weights" and entry[1] == 0]
    again = 1 if mode == "plain" else 2
    backward = [[Visit(0, "backward", layer)] * again for layer in (1, 0)]
    assert asked == [Visit(0, "forward", 0), Visit(0, "forward", 1), *itertools.chain(*backward)]


@pytest.mark.dist(4)
@pytest.mark.parametrize("mode", MODES)
def test_several_micro_steps_in_flight_find_their_own_entries(pool, mode):
    routing = random_routing(15, ranks=4, micro_steps=3)
    plan = random_plan(routing, 9, slots=2)
    one_by_one = pool.run(run_stack, 4, plan, routing, Run(mode=mode))
    in_flight = pool.run(run_stack, 4, plan, routing, Run(mode=mode, in_flight=2))
    same_bits(in_flight, one_by_one, names=EVERYTHING)


@pytest.mark.dist(4)
def test_two_runs_are_bit_identical(pool):
    routing = routing_of(8, 4)
    plan = random_plan(routing, 4, slots=2)
    first, second = [pool.run(run_stack, 4, plan, routing, Run()) for _ in range(2)]
    same_bits(first, second, names=EVERYTHING)


@pytest.mark.dist(4)
def test_a_plan_for_other_routes_costs_no_row_and_no_bit(pool):
    planned, actual = routing_of(9, 4), routing_of(99, 4)
    plan = random_plan(planned, 5, slots=2)
    outcomes = pool.run(run_stack, 4, plan, actual, Run(options=EXACT))
    same_bits(outcomes, pool.run(run_stack, 4, static_plan(actual), actual, Run(options=EXACT)))
    near_reference(outcomes, plan, actual, Run(options=EXACT))


@pytest.mark.dist(4)
def test_a_prepared_dispatch_gives_the_same_bits(pool):
    routing = routing_of(11, 4)
    plan = random_plan(routing, 6, slots=2)
    exchanged = pool.run(run_stack, 4, plan, routing, Run())
    same_bits(pool.run(run_stack, 4, plan, routing, Run(is_prepared=True)), exchanged, names=EVERYTHING)


@pytest.mark.dist(4)
def test_no_grad_gives_the_same_outputs(pool):
    routing = routing_of(12, 4)
    plan = random_plan(routing, 7, slots=1)
    outputs = pool.run(run_forward_only, 4, plan, routing, Run())
    trained = pool.run(run_stack, 4, plan, routing, Run())
    assert all(map(torch.equal, tensors_of(outputs), tensors_of([o.outputs for o in trained])))


@pytest.mark.dist(4)
@pytest.mark.parametrize("order", ["top_k", "expert"])
def test_biases_and_the_gpt_oss_activation(pool, order):
    options = LayerOptions(activation="gpt_oss", combine_order=order, is_deterministic=True)
    routing, run = routing_of(13, 4), Run(options=options, has_bias=True)
    plan = random_plan(routing, 8, slots=2)
    outcomes = pool.run(run_stack, 4, plan, routing, run)
    same_bits(outcomes, pool.run(run_stack, 4, static_plan(routing), routing, run))
    near_reference(outcomes, plan, routing, run)
