"""The node through which home weights enter: what returns add to, and what they must leave alone."""

import runpy

import pytest
import torch

from equipoise.core.plan import Visit
from equipoise.layer.ops import count_alone, enter_home
from equipoise.transfer.node import ExpertWeights

VISIT = Visit(0, "forward", 0)


class AddingBank:
    """Returns a gradient of ones for every home expert."""

    def collect_returns(self, micro_step, layer, gradients):
        for tensor in gradients.tensors():
            tensor.add_(1.0)


def entered():
    weights = [torch.randn(2, 6, 4).requires_grad_(), torch.randn(2, 4, 3).requires_grad_()]
    return weights, enter_home(ExpertWeights(*weights), AddingBank(), VISIT)


def product(home, rows_ND):
    return (torch.einsum("nd,sfd->sf", rows_ND, home.gate_up_SFD).sum() + (2 * home.down_SDF).sum()) * 3


def test_returns_are_added_to_the_gradients_that_parameters_get():
    rows_ND, (weights, home) = torch.randn(5, 4), entered()
    product(home, rows_ND).backward()
    wanted = 3 * rows_ND.sum(0).expand(2, 6, 4) + 1
    torch.testing.assert_close(weights[0].grad, wanted)
    torch.testing.assert_close(weights[1].grad, torch.full((2, 4, 3), 7.0))


def test_a_gradient_that_is_handed_out_elsewhere_is_left_alone():
    rows_ND, (weights, home) = torch.randn(5, 4), entered()
    inner, outer = torch.autograd.grad(product(home, rows_ND), [home.gate_up_SFD, weights[0]])
    torch.testing.assert_close(inner, 3 * rows_ND.sum(0).expand(2, 6, 4))
    torch.testing.assert_close(outer, inner + 1)


def test_a_gradient_that_overlaps_itself_is_copied_first():
    # The gradient of a plain sum is one number, seen everywhere.
    weights, home = entered()
    (home.gate_up_SFD.sum() + home.down_SDF.sum()).backward()
    torch.testing.assert_close(weights[0].grad, torch.full((2, 6, 4), 2.0))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_holders_are_counted_in_every_mode(mode):
    wanted = count_alone()
    count_alone.cache_clear()
    with mode():
        assert count_alone() == wanted > 0


def test_no_backward_runs_at_import(monkeypatch):
    # With a GPU it would start threads, and ranks that are forked later could run none.
    def refuse(*_):
        raise AssertionError("a backward at import")

    monkeypatch.setattr(torch.Tensor, "backward", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)
    assert "count_alone" in runpy.run_module("equipoise.layer.ops")
