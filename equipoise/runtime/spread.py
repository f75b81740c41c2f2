"""Tokens to rows: each token once for each of its experts, in sending order. The mirror of `combine`.

Knows index tables. Does not know why the rows stand in that order.

Invariant (asserted by the tests): a token's gradient is the sum of its rows' gradients in column order, so its bits do
not depend on the sending order. Indexing's own backward would add them as they come.
"""

from typing import Any

import torch
from torch import Tensor

from equipoise.runtime.combine import add_columns


def spread_rows(hidden_TD: Tensor, *, token_N: Tensor, index_TK: Tensor) -> Tensor:
    """Copy tokens into rows.

    Args:
        token_N: [N] token of each row, in sending order
        index_TK: [T, K] place of each row in sending order

    Returns: [N, D]
    """
    return _Spread.apply(hidden_TD, token_N, index_TK)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, token_N: Tensor, index_TK: Tensor) -> Tensor:
        ctx.save_for_backward(index_TK)
        return hidden_TD.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (index_TK,) = ctx.saved_tensors
        return add_columns(grad_ND, index_TK), None, None
