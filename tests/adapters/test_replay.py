"""Turns, recordings and counters, without any model."""

import pytest
import torch

from equipoise.adapters.protocol import ForwardPass, Recorded, ReplayCounters, check_ids
from equipoise.core import ModelShape, RoutesError

MODEL = ModelShape.preset("qwen3-30b-a3b", experts=8, layers=2, top_k=2)


def test_a_row_whose_id_is_given_gets_it_and_a_token_with_minus_one_routes_itself():
    given = torch.tensor([[0, 1], [2, -1], [5, 4]])
    own = torch.tensor([[1, 0], [6, 7], [5, 3]])
    counters = ReplayCounters()
    turn = ForwardPass(counters=counters, ids_L=(given,))
    ids = turn.choose(0, own)
    assert ids.tolist() == [[0, 1], [6, 7], [5, 4]]
    turn.use(0, ids)
    assert (counters.calls, counters.given_rows, counters.used_rows, counters.differing_rows) == (1, 4, 4, 1)
    assert counters.differing_share == 0.25


def test_rows_that_reach_the_experts_with_other_ids_are_not_counted_as_used():
    counters = ReplayCounters()
    turn = ForwardPass(counters=counters, ids_L=(torch.tensor([[0, 1], [2, 3]]),))
    turn.choose(0, torch.tensor([[0, 1], [2, 3]]))
    turn.use(0, torch.tensor([[0, 1], [3, 2]]))
    assert (counters.given_rows, counters.used_rows) == (4, 2)


def test_rows_of_several_calls_are_kept_in_call_order_and_by_sample():
    recorded = Recorded(2)
    for layer in range(2):
        recorded.add(layer, torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]]) + 10 * layer)  # prompt: 2 samples x 2 tokens
        recorded.add(layer, torch.tensor([[20, 21], [22, 23]]) + 10 * layer)  # one more token of each
    assert recorded.ids_LTK[1].tolist() == [[10, 11], [12, 13], [14, 15], [16, 17], [30, 31], [32, 33]]
    assert recorded.by_sample(2)[1, :, 0].tolist() == [[4, 5], [6, 7], [22, 23]]


def test_a_recording_of_half_a_forward_is_refused():
    recorded = Recorded(2)
    recorded.add(0, torch.tensor([[0, 1]]))
    with pytest.raises(RoutesError, match=r"called \[1, 0\] times by layer"):
        _ = recorded.ids_LTK


def test_what_runs_in_backward_is_neither_recorded_nor_counted():
    counters, recorded = ReplayCounters(), Recorded(1)
    turn = ForwardPass(counters=counters, ids_L=(torch.tensor([[0, 1]]),), recorded=recorded)
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: turn.use(0, turn.choose(0, torch.tensor([[1, 0]]))))
    y.backward()
    assert (counters.calls, counters.given_rows, counters.used_rows, recorded.num_calls) == (0, 0, 0, 0)


def test_ids_may_be_lists_arrays_or_tensors_of_any_integer_kind():
    ids = torch.tensor([[[0, 7]], [[3, -1]]], dtype=torch.int16)
    for given in (ids, ids.numpy(), ids.tolist(), list(ids)):
        checked = check_ids(given, model=MODEL, device="cpu")
        assert [x.tolist() for x in checked] == ids.tolist()
        assert all(x.dtype == torch.int64 for x in checked)


@pytest.mark.parametrize("bad", [8, -2])
def test_an_expert_that_does_not_exist_is_refused(bad):
    with pytest.raises(RoutesError, match=f"MoE layer index 1: expert {bad} does not exist"):
        check_ids([[[0, 1]], [[bad, 1]]], model=MODEL, device="cpu")
