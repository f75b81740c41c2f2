"""Gates that multiply activations, as in Megatron, and tokens with fewer than K experts."""

import dataclasses

import pytest
import torch

from equipoise.core.errors import RoutesError, TopologyError
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups, prepare_dispatch
from equipoise.layer.expert_block import BlockOptions, expert_block
from equipoise.layer.experts import BalancedExperts, LayerOptions
from equipoise.transfer.node import SlotTensors
from tests.layer.cases import random_plan, random_routing, static_plan, with_gaps
from tests.layer.stack import Run, logical_grads, run_stack
from tests.layer.test_expert_block import JoinedBank, OneBank, weights_of
from tests.layer.test_experts import near_reference, same_bits, tensors_of

AS_MEGATRON = LayerOptions(gates="activation", combine_order="expert", products="loop", has_gaps=True)
LENGTHS = (5, 0, 7, 3)
"""Rows of two home slots and two replicas; one slot has none."""


def megatron_experts(rows_ND, gates_N, weights):
    """What Megatron's `SequentialMLP` computes, expert by expert, by autograd alone."""
    outputs = []
    for slot, (rows, gates) in enumerate(zip(rows_ND.split(LENGTHS), gates_N.split(LENGTHS), strict=True)):
        gate, up = torch.chunk(rows @ weights[0][slot].t(), 2, dim=-1)
        act = torch.nn.functional.silu(gate) * up
        outputs.append((act * gates.unsqueeze(-1)).to(act.dtype) @ weights[1][slot].t())
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", ["apart", "joined", "one tensor per slot"])
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=["fp32 gates", "bf16 gates"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_output_and_every_gradient_have_the_bits_of_autograd(dtype, gate_dtype, kind):
    both = [t for t in weights_of(4, seed=3, dtype=dtype, has_bias=False) if t is not None]
    make = torch.Generator().manual_seed(0)
    rows_ND = torch.randn((sum(LENGTHS), both[1].shape[1]), generator=make).to(dtype)
    gates_N = torch.rand(sum(LENGTHS), generator=make).to(gate_dtype)
    grad_ND = torch.randn(rows_ND.shape, generator=make).to(dtype)
    wanted_in = [t.clone().requires_grad_() for t in (rows_ND, gates_N, *both)]
    wanted_ND = megatron_experts(wanted_in[0], wanted_in[1], wanted_in[2:])
    wanted_ND.backward(grad_ND)

    home = weights_of(4, seed=3, dtype=dtype, has_bias=False).map(lambda t: t[:2].clone().requires_grad_())
    replicas = weights_of(4, seed=3, dtype=dtype, has_bias=False).map(lambda t: t[2:].clone())
    bank = JoinedBank(home, replicas) if kind == "joined" else OneBank(replicas)
    if kind == "one tensor per slot":
        home = home.map(lambda t: SlotTensors(one.detach().clone().requires_grad_() for one in t))
    ends = torch.tensor(LENGTHS).view(2, 2).cumsum(1).to(torch.int32)
    groups = Groups(home_end_S=ends[0], replica_end_S=ends[1], num_home_rows=5, num_replica_rows=10, num_replicas=2)
    rows_ND.requires_grad_()
    gates_N.requires_grad_()
    out_ND = expert_block(
        rows_ND,
        home,
        groups=groups,
        transfers=bank,
        visit=Visit(0, "forward", 0),
        options=BlockOptions(products="loop"),
        gates_N=gates_N,
    )
    out_ND.backward(grad_ND)
    assert torch.equal(out_ND, wanted_ND)
    assert torch.equal(rows_ND.grad, wanted_in[0].grad)
    assert torch.equal(gates_N.grad, wanted_in[1].grad)
    for own, back, wanted in zip(home.tensors(), bank.returned.tensors(), wanted_in[2:], strict=True):
        own_grad = torch.stack([t.grad for t in own]) if isinstance(own, SlotTensors) else own.grad
        assert torch.equal(torch.cat([own_grad, back]), wanted.grad)


@pytest.mark.dist(4)
@pytest.mark.parametrize("gates", ["activation", "combine"])
def test_placement_keeps_bits_and_replicas_stay_close_with_gates_inside_and_gaps(pool, gates):
    routing = with_gaps(random_routing(4, ranks=4), seed=1)
    run = Run(options=dataclasses.replace(AS_MEGATRON, gates=gates))
    static = pool.run(run_stack, 4, static_plan(routing), routing, run)
    near_reference(static, static_plan(routing), routing, run)
    displaced = random_plan(routing, 5, slots=0)
    again = dataclasses.replace(run, mode="reentrant", is_prepared=True)
    outcomes = pool.run(run_stack, 4, displaced, routing, again)
    same_bits(outcomes, static)
    wanted = logical_grads(static, static_plan(routing))
    assert all(map(torch.equal, tensors_of(logical_grads(outcomes, displaced)), tensors_of(wanted)))
    replicated = random_plan(routing, 6, slots=1, nodes=2)
    in_two_levels = dataclasses.replace(run, options=dataclasses.replace(run.options, dispatch="two_level"))
    near_reference(pool.run(run_stack, 4, replicated, routing, in_two_levels), replicated, routing, run)


def test_gaps_are_refused_where_rows_are_mapped_or_gaps_were_not_announced():
    routing = with_gaps(random_routing(4, ranks=2), seed=1)
    plan, ids_TK = static_plan(routing), torch.from_numpy(routing.ids[0][0][0])
    with pytest.raises(RoutesError, match="mapped rows do not carry these: use rows='collective'"):
        prepare_dispatch(ids_TK, plan, (0, 0), rank=0, is_mapped=True, has_gaps=True)
    with pytest.raises(RoutesError, match=r"expert -1; ids are 0\.\.7"):
        prepare_dispatch(ids_TK, plan, (0, 0), rank=0)


def test_experts_kept_one_by_one_are_computed_one_by_one():
    apart = weights_of(2, seed=0, has_bias=False).map(SlotTensors)
    with pytest.raises(TopologyError, match="one tensor per slot are computed one by one"):
        BalancedExperts(apart, layer=0, group=None)
    assert list(BalancedExperts(apart, layer=0, group=None, options=AS_MEGATRON).parameters()) == []


def test_a_bias_behind_the_gates_is_refused():
    with pytest.raises(TopologyError, match="gates='activation' with a bias"):
        BalancedExperts(weights_of(2, seed=0), layer=0, group=None, options=AS_MEGATRON)
