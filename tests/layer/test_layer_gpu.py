"""The layer's own kernels on a CUDA device, in bf16: what CPU tests cannot show. One process."""

import pytest
import torch
import torch.distributed as dist

from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups, SourceSplit, assign_slots
from equipoise.layer.expert_block import BlockOptions, expert_block
from equipoise.layer.experts import BalancedExperts, LayerOptions, Window, check_row_bits
from equipoise.transfer.node import ExpertWeights
from tests.layer.cases import random_plan, random_routing, static_plan
from tests.layer.reference import assign_slots_by_hand, dense_experts
from tests.transfer.windows import no_transfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, WIDTH = 64, 32


VISIT = Visit(0, "forward", 0)


class OneBank:
    """Always the same replicas; keeps what is handed in."""

    def __init__(self, replicas):
        self.replicas, self.returned = replicas, None

    def wait_for(self, visit):
        assert visit.layer == 0

    def joined(self, visit):
        return None

    def weights(self, visit):
        return self.replicas

    def hand_in(self, micro_step, layer, gradients):
        self.returned = gradients


def weights_of(slots, *, seed, has_bias=True):
    make = torch.Generator().manual_seed(seed)
    shapes = [(2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)] + ([(2 * WIDTH,), (HIDDEN,)] if has_bias else [])
    tensors = (torch.randn((slots, *shape), generator=make) * 0.2 for shape in shapes)
    return ExpertWeights(*(tensor.to("cuda", torch.bfloat16) for tensor in tensors))


def ends_of(lengths):
    return torch.tensor(lengths, device="cuda").cumsum(0).to(torch.int32)


@pytest.mark.parametrize(
    ("home", "replica"),
    [([3, 0, 50], [17, 4]), ([3, 1, 5], [2, 0]), ([1, 2, 0], [0, 0]), ([0, 0, 0], [3, 1]), ([0, 0, 0], [0, 0])],
    ids=["both parts", "an unused slot", "no replica rows", "no home rows", "no rows"],
)
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_grouped_products_equal_the_loop(home, replica, activation):
    groups = Groups(
        home_end_S=ends_of(home),
        replica_end_S=ends_of(replica),
        num_home_rows=sum(home),
        num_replica_rows=sum(replica),
        num_replicas=2,
    )
    seen = []
    for products in ("grouped", "loop"):
        bank = OneBank(weights_of(2, seed=2))
        weights = ExpertWeights(*(t.requires_grad_() for t in weights_of(3, seed=1)))
        rows_ND = torch.randn((groups.num_rows, HIDDEN), generator=torch.Generator().manual_seed(3))
        rows_ND = rows_ND.to("cuda", torch.bfloat16).requires_grad_()
        options = BlockOptions(activation=activation, products=products)
        out_ND = expert_block(
            rows_ND, weights, groups=groups, transfers=bank, visit=Visit(0, "forward", 0), options=options
        )
        out_ND.sum().backward()
        seen.append([out_ND, rows_ND.grad, *(t.grad for t in weights.tensors()), *bank.returned.tensors()])
    for a, b in zip(*seen, strict=True):
        # Both round to bf16; they may differ in the last of its 8 bits.
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_rows_bits_do_not_depend_on_its_group():
    check_row_bits(weights_of(2, seed=4), pad=1, options=BlockOptions())


def test_slots_are_assigned_as_by_hand():
    routing = random_routing(5, ranks=4, tokens=200)
    plan = random_plan(routing, 5, slots=2)
    for source in range(4):
        ids_TK = torch.from_numpy(routing.ids[0][0][source])
        got_TK = assign_slots(ids_TK.cuda(), SourceSplit.of(plan, 0, 0, source=source, device="cuda"))
        assert torch.equal(got_TK.cpu(), assign_slots_by_hand(ids_TK, SourceSplit.of(plan, 0, 0, source=source)))


@pytest.mark.parametrize("is_prepared", [False, True], ids=["exchanged", "prepared"])
def test_one_rank_against_the_dense_reference(is_prepared):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        routing = random_routing(6, ranks=1, tokens=40)
        plan, home = static_plan(routing), weights_of(8, seed=7, has_bias=False)
        layer = BalancedExperts(home, layer=0, group=dist.group.WORLD, options=LayerOptions()).cuda()
        layer.begin(Window(plan, rank=0, transfers=no_transfers(plan, layer.home)))
        ids_TK = torch.from_numpy(routing.ids[0][0][0]).cuda()
        hidden_TD = torch.randn((len(ids_TK), HIDDEN), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gates_TK = torch.rand(ids_TK.shape, device="cuda")
        prepared = layer.prepare(ids_TK.cpu(), 0).packed().unpack("cuda") if is_prepared else None
        out_TD = layer(hidden_TD, ids_TK, gates_TK, Visit(0, "forward", 0), prepared=prepared)
        out_TD.sum().backward()
        layer.check_matched()
        leaves = [t.detach().double().requires_grad_() for t in (hidden_TD, *home.tensors())]
        wanted_TD = dense_experts(leaves[0], ids_TK, gates_TK.double(), ExpertWeights(*leaves[1:]))
        wanted_TD.sum().backward()
        pairs = [
            (out_TD, wanted_TD),
            *zip((hidden_TD.grad, layer.gate_up.grad, layer.down.grad), (x.grad for x in leaves), strict=True),
        ]
        for got, wanted in pairs:
            error = (got.double() - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
            assert error < 1e-2
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_a_prepared_layer_never_waits_for_the_device(has_bias):
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        routing = random_routing(6, ranks=1, tokens=40)
        plan, home = static_plan(routing), weights_of(8, seed=7, has_bias=has_bias)
        layer = BalancedExperts(home, layer=0, group=dist.group.WORLD, options=LayerOptions()).cuda()
        layer.begin(Window(plan, rank=0, transfers=no_transfers(plan, layer.home)))
        ids_TK = torch.from_numpy(routing.ids[0][0][0]).cuda()
        hidden_TD = torch.randn((len(ids_TK), HIDDEN), device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gates_TK = torch.rand(ids_TK.shape, device="cuda", requires_grad=True)
        prepared = layer.prepare(ids_TK.cpu(), 0).packed().unpack("cuda")
        for mode in ("default", "error"):
            # The first pass sets up the communicator, which may wait.
            torch.cuda.set_sync_debug_mode(mode)
            layer(hidden_TD, ids_TK, gates_TK, Visit(0, "forward", 0), prepared=prepared).sum().backward()
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            layer(hidden_TD, ids_TK, gates_TK, Visit(0, "forward", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()
