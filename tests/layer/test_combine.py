"""Spreading and combining: values, gradients, and an order of addition that does not depend on where rows stand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.layer.ops import combine_rows, order_columns, spread_rows


def shuffled(seed, tokens, top_k):
    """A random sending order: token of each row, and place of each (token, column)."""
    order_N = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(seed))
    index_N = torch.argsort(order_N)
    return order_N // top_k, index_N.view(tokens, top_k)


@given(seed=st.integers(0, 10**6), tokens=st.integers(0, 9), top_k=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_no_bit_depends_on_the_sending_order(seed, tokens, top_k):
    make = torch.Generator().manual_seed(seed)
    hidden_TD, gates_TK = torch.randn((tokens, 8), generator=make), torch.rand((tokens, top_k), generator=make)
    scale_TKD, grad_TD = torch.randn((tokens, top_k, 8), generator=make), torch.randn((tokens, 8), generator=make)
    seen = []
    for order in (seed, seed + 1):
        token_N, index_TK = shuffled(order, tokens, top_k)
        leaves = [hidden_TD.clone().requires_grad_(), gates_TK.clone().requires_grad_()]
        rows_ND = spread_rows(leaves[0], token_N=token_N, index_TK=index_TK)
        scale_ND = torch.empty_like(rows_ND)
        scale_ND[index_TK] = scale_TKD
        out_TD = combine_rows(torch.tanh(rows_ND * scale_ND), leaves[1], index_TK=index_TK)
        out_TD.backward(grad_TD)
        seen.append([out_TD, leaves[0].grad, leaves[1].grad])
    assert all(map(torch.equal, *seen))


def test_gradients_by_finite_differences():
    token_N, index_TK = shuffled(3, 4, 3)
    hidden_TD = torch.randn((4, 5), dtype=torch.float64, requires_grad=True)
    gates_TK = torch.rand((4, 3), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h, g: combine_rows(spread_rows(h, token_N=token_N, index_TK=index_TK).sin(), g, index_TK=index_TK),
        (hidden_TD, gates_TK),
    )


def test_columns_are_added_first_to_last():
    # In float32 (2^24 + 1) - 2^24 is 0, (2^24 - 2^24) + 1 is 1.
    rows_ND = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    ones_TK = torch.ones((1, 3))
    assert combine_rows(rows_ND, ones_TK, index_TK=torch.tensor([[0, 1, 2]])).item() == 0.0
    assert combine_rows(rows_ND, ones_TK, index_TK=torch.tensor([[0, 2, 1]])).item() == 1.0


def test_a_tokens_gradient_is_added_first_to_last():
    hidden_TD = torch.zeros((1, 1), requires_grad=True)
    rows_ND = spread_rows(hidden_TD, token_N=torch.zeros(3, dtype=torch.int64), index_TK=torch.tensor([[0, 2, 1]]))
    rows_ND.backward(torch.tensor([[2.0**24], [1.0], [-(2.0**24)]]))
    assert hidden_TD.grad.item() == 1.0


@pytest.mark.parametrize(
    ("order", "ids", "gates"),
    [("top_k", [[3, 1, 2]], [[0.3, 0.1, 0.2]]), ("expert", [[1, 2, 3]], [[0.1, 0.2, 0.3]])],
    ids=["top_k", "expert"],
)
def test_columns_come_in_the_order_asked_for(order, ids, gates):
    given_gates = torch.tensor([[0.3, 0.1, 0.2]])
    ids_TK, gates_TK = order_columns(torch.tensor([[3, 1, 2]]), given_gates, order=order)
    assert ids_TK.tolist() == ids and torch.equal(gates_TK, torch.tensor(gates))


def test_float32_gates_keep_sums_of_half_rows_in_float32():
    rows_ND = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    index_TK, ones_TK = torch.tensor([[0, 1, 2]]), torch.ones((1, 3))
    # In float16 2048 + 1 rounds back to 2048 each time.
    assert combine_rows(rows_ND, ones_TK, index_TK=index_TK).item() == 2050.0
    assert combine_rows(rows_ND, ones_TK.half(), index_TK=index_TK).item() == 2048.0
