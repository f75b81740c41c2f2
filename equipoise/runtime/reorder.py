"""Rows in another order, forward beside backward; both are gathers, since an order and its inverse are at hand.

Knows two index tables. Does not know what either order means.

Indexing's own backward scatters, which costs several times as much on a GPU.

Invariant (asserted by the tests): values and gradients equal those of plain indexing, padding included.
"""

from typing import Any

import torch
from torch import Tensor


def reorder_rows(rows_ND: Tensor, *, there_P: Tensor, back_N: Tensor) -> Tensor:
    """Put rows in another order, with rows of zeros where the order has more places than there are rows.

    Args:
        there_P: [P] the row that comes to each place; N, one past the last, for a row of zeros
        back_N: [N] the place each row comes to

    Returns: [P, D]
    """
    return _Reorder.apply(rows_ND, there_P, back_N)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, there_P: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        return _gather(rows_ND, there_P)

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
        (back_N,) = ctx.saved_tensors
        return _gather(grad_PD, back_N), None, None


def _gather(rows_ND: Tensor, index_P: Tensor) -> Tensor:
    # Only padding makes an order longer than its rows.
    if index_P.numel() > rows_ND.shape[0]:
        rows_ND = torch.cat([rows_ND, rows_ND.new_zeros((1, rows_ND.shape[1]))])
    return rows_ND.index_select(0, index_P)
