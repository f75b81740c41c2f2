"""The experts' products: grouped against the loop, backward against autograd, bits against the group's size."""

import os
import subprocess
import sys

import pytest
import torch

from equipoise.core.errors import TopologyError
from equipoise.core.plan import Visit
from equipoise.layer.dispatch import Groups
from equipoise.layer.expert_block import BlockOptions, activate, activate_backward, apply_experts, expert_block
from equipoise.layer.experts import check_row_bits
from equipoise.transfer.node import ExpertWeights
from tests.layer.reference import expert_output

HIDDEN, WIDTH = 16, 8
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

    def collect_returns(self, micro_step, layer, gradients):
        raise AssertionError("the block itself collects nothing")


class JoinedBank(OneBank):
    """The same replicas behind the home weights, in one tensor each."""

    def __init__(self, home, replicas):
        super().__init__(replicas)
        pairs = zip(home, replicas, strict=True)
        self.both = ExpertWeights(*(None if a is None else torch.cat([a.detach(), b]) for a, b in pairs))

    def weights(self, visit):
        raise AssertionError("asked for apart from the homes")

    def joined(self, visit):
        return self.both


def weights_of(slots, *, seed, dtype=torch.float32, has_bias=True):
    make = torch.Generator().manual_seed(seed)
    shapes = [(2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)] + ([(2 * WIDTH,), (HIDDEN,)] if has_bias else [])
    return ExpertWeights(*(torch.randn((slots, *shape), generator=make, dtype=dtype) for shape in shapes))


def groups_of(home, replica):
    ends = [torch.tensor(lengths, dtype=torch.int64).cumsum(0).to(torch.int32) for lengths in (home, replica)]
    return Groups(
        home_end_S=ends[0],
        replica_end_S=ends[1],
        num_home_rows=sum(home),
        num_replica_rows=sum(replica),
        num_replicas=max((i + 1 for i, n in enumerate(replica) if n), default=0),
    )


LENGTHS = {
    "both parts": ([3, 0, 5], [2, 4]),
    "an unused replica slot": ([3, 1, 5], [2, 0]),
    "no replica rows": ([1, 2, 0], [0, 0]),
    "no home rows": ([0, 0, 0], [3, 1]),
    "no rows": ([0, 0, 0], [0, 0]),
    "one row": ([0, 1, 0], [0, 0]),
}


def run_block(lengths, *, products, activation, has_bias=True, dtype=torch.float32, held=None, first="joined"):
    """Output and every gradient of a block with random rows."""
    groups = groups_of(*lengths)
    held = len(lengths[1]) if held is None else held
    bank = OneBank(weights_of(held, seed=2, dtype=dtype, has_bias=has_bias))
    home = ExpertWeights(
        *(t if t is None else t.requires_grad_() for t in weights_of(3, seed=1, dtype=dtype, has_bias=has_bias))
    )
    rows_ND = torch.randn((groups.num_rows, HIDDEN), generator=torch.Generator().manual_seed(3), dtype=dtype)
    rows_ND.requires_grad_()
    options = BlockOptions(activation=activation, products=products, first=first)
    out_ND = expert_block(rows_ND, home, groups=groups, transfers=bank, visit=VISIT, options=options)
    (out_ND * torch.arange(1.0, HIDDEN + 1, dtype=dtype)).sum().backward()
    grads = [rows_ND.grad, *(t.grad for t in home.tensors()), *bank.returned.tensors()]
    return rows_ND, home, bank, [out_ND, *grads]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_grouped_products_equal_the_loop_forward_and_every_gradient(lengths, activation, has_bias):
    given = {"activation": activation, "has_bias": has_bias}
    *_, grouped = run_block(lengths, products="grouped", **given)
    *_, looped = run_block(lengths, products="loop", **given)
    assert len(grouped) == (10 if has_bias else 6)
    for a, b in zip(grouped, looped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("activation", "first"), [("swiglu", "joined"), ("gpt_oss", "joined"), ("swiglu", "apart")])
def test_backward_equals_autograd_through_the_dense_reference(lengths, activation, first):
    given = {"activation": activation, "first": first}
    rows_ND, home, bank, got = run_block(lengths, products="loop", dtype=torch.float64, **given)
    leaves = [rows_ND, *home.tensors(), *bank.replicas.tensors()]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    parts = []
    for weights, slots, start in ((leaves[1:5], lengths[0], 0), (leaves[5:9], lengths[1], sum(lengths[0]))):
        for slot, length in enumerate(slots):
            rows = leaves[0][start : start + length]
            parts.append(expert_output(rows, ExpertWeights(*weights), slot, activation=activation))
            start += length
    out_ND = torch.cat(parts)
    (out_ND * torch.arange(1.0, HIDDEN + 1, dtype=torch.float64)).sum().backward()
    for a, b in zip(got, [out_ND, *(leaf.grad for leaf in leaves)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gate_and_up_apart_have_the_bits_of_autograd_through_two_products():
    make, ends_S = torch.Generator().manual_seed(0), torch.tensor([5, 5, 24], dtype=torch.int32)
    sizes = ((24, 64), (3, 32, 64), (3, 32, 64), (3, 64, 32), (24, 64))
    rows_ND, gate, up, down, grad_ND = (torch.randn(size, generator=make).bfloat16() for size in sizes)
    leaves = [t.clone().requires_grad_() for t in (rows_ND, gate, up, down)]
    pre, high = (torch.nn.functional.grouped_mm(leaves[0], t.transpose(1, 2), offs=ends_S) for t in leaves[1:3])
    act_NF = torch.nn.functional.silu(pre) * high
    wanted_ND = torch.nn.functional.grouped_mm(act_NF, leaves[3].transpose(1, 2), offs=ends_S)
    wanted_ND.backward(grad_ND)
    home = ExpertWeights(torch.cat([gate, up], dim=1).requires_grad_(), down.clone().requires_grad_())
    bank = OneBank(home.map(lambda tensor: tensor.detach()[:1]))
    rows_ND.requires_grad_()
    options = BlockOptions(first="apart")
    got_ND = expert_block(
        rows_ND, home, groups=groups_of([5, 0, 19], [0]), transfers=bank, visit=VISIT, options=options
    )
    got_ND.backward(grad_ND)
    assert torch.equal(got_ND, wanted_ND) and torch.equal(rows_ND.grad, leaves[0].grad)
    assert torch.equal(home.gate_up_SFD.grad, torch.cat([leaves[1].grad, leaves[2].grad], dim=1))
    assert torch.equal(home.down_SDF.grad, leaves[3].grad)


def test_gate_and_up_that_alternate_are_not_halved():
    with pytest.raises(TopologyError, match="first='apart' halves gate_up, which activation='gpt_oss' interleaves"):
        BlockOptions(activation="gpt_oss", first="apart")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_one_call_over_joined_weights_equals_two_calls(lengths, has_bias):
    groups, seen = groups_of(*lengths), []
    for is_joined in (False, True):
        home = ExpertWeights(
            *(None if t is None else t.requires_grad_() for t in weights_of(3, seed=1, has_bias=has_bias))
        )
        replicas = weights_of(2, seed=2, has_bias=has_bias)
        bank = JoinedBank(home, replicas) if is_joined else OneBank(replicas)
        rows_ND = torch.randn((groups.num_rows, HIDDEN), generator=torch.Generator().manual_seed(3)).requires_grad_()
        out_ND = expert_block(rows_ND, home, groups=groups, transfers=bank, visit=VISIT, options=BlockOptions())
        (out_ND * torch.arange(HIDDEN)).sum().backward()
        seen.append([out_ND, rows_ND.grad, *(t.grad for t in home.tensors()), *bank.returned.tensors()])
        # A gradient of all slots in one would keep the replicas' memory with the parameters' gradient.
        assert home.gate_up_SFD.grad.untyped_storage().nbytes() == home.gate_up_SFD.nbytes
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_bank_with_fewer_replicas_than_slots_is_enough():
    *_, two = run_block(([3, 0, 5], [2]), products="grouped", activation="swiglu", held=1)
    *_, one = run_block(([3, 0, 5], [2, 0]), products="grouped", activation="swiglu", held=1)
    assert all(map(torch.equal, two, one))


@pytest.mark.parametrize("activation", ["swiglu", "gpt_oss"])
def test_gradients_of_activations(activation):
    # 6 times a normal value: clamps at 7 bind for some entries.
    pre_NF = torch.randn((6, 2 * WIDTH), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 6
    pre_NF.requires_grad_()
    act_NF = activate(pre_NF, activation)
    grad_NF = torch.randn_like(act_NF)
    (wanted,) = torch.autograd.grad(act_NF, pre_NF, grad_NF)
    torch.testing.assert_close(activate_backward(grad_NF, pre_NF.detach(), activation), wanted, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: activate(x, activation), pre_NF)


def test_gpt_oss_by_hand():
    # gate 8 is clamped to 7, up -9 to -7: (-7 + 1) * 7 * sigmoid(11.914); gate -1 and up 2 stay.
    pre_NF = torch.tensor([[8.0, -9.0, -1.0, 2.0]], dtype=torch.float64)
    wanted = [-42 / (1 + 2.718281828459045 ** (-11.914)), -3 / (1 + 2.718281828459045**1.702)]
    assert activate(pre_NF, "gpt_oss")[0].tolist() == pytest.approx(wanted, rel=1e-12)


def test_frozen_experts_hand_nothing_in():
    groups, bank = groups_of([3, 1], [2]), OneBank(weights_of(1, seed=2))
    rows_ND = torch.randn((6, HIDDEN)).requires_grad_()
    options = BlockOptions()
    expert_block(
        rows_ND, weights_of(2, seed=1), groups=groups, transfers=bank, visit=VISIT, options=options
    ).sum().backward()
    assert bank.returned is None and rows_ND.grad.abs().sum() > 0


TRY_SHAPES = """
import torch
from equipoise.transfer.node import ExpertWeights
from equipoise.layer.expert_block import BlockOptions
from equipoise.layer.experts import DETERMINISTIC_PAD
from equipoise.layer.experts import check_row_bits

torch.set_num_threads(1)
for hidden, width in ((8, 8), (16, 24), (40, 20), (64, 32), (256, 128), (512, 256), (1024, 512)):
    weights = ExpertWeights(torch.randn(1, 2 * width, hidden), torch.randn(1, hidden, width))
    check_row_bits(weights, pad=DETERMINISTIC_PAD, options=BlockOptions())
print("kept")
"""


@pytest.mark.parametrize("instructions", ["", "AVX2"], ids=["this machine's", "AVX2"])
def test_the_deterministic_padding_holds_for_narrow_and_wide_experts(instructions):
    # MKL, which makes these products, can be held to what older machines have; other libraries ignore the wish.
    env = os.environ | ({"MKL_ENABLE_INSTRUCTIONS": instructions} if instructions else {})
    done = subprocess.run([sys.executable, "-c", TRY_SHAPES], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "kept", done.stderr


def test_a_backend_whose_bits_depend_on_the_group_is_refused(monkeypatch):
    def shaky(rows_ND, weights, end_S, options):
        out_ND, pre_NF = apply_experts(rows_ND, weights, end_S, options)
        return out_ND + 1e-3 * (end_S[0] < 20), pre_NF

    monkeypatch.setattr("equipoise.layer.experts.apply_experts", shaky)
    with pytest.raises(TopologyError, match=r"for hidden 16 and expert width 8: 1120 of 1120 rows"):
        check_row_bits(weights_of(2, seed=4), pad=16, options=BlockOptions())


def test_rows_for_replicas_that_do_not_exist_are_our_own_bug():
    bank = OneBank(weights_of(0, seed=2))
    with pytest.raises(AssertionError, match="rows for replicas that were not pulled"):
        expert_block(
            torch.zeros((2, HIDDEN)),
            weights_of(1, seed=1),
            groups=groups_of([1], [1]),
            transfers=bank,
            visit=VISIT,
            options=BlockOptions(),
        )
