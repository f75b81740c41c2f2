"""Rows to tokens: the k contributions of a token, each times its gate, added column by column.

Knows index tables and gates. Does not know slots or ranks.

The order of addition is the order of columns: top-k order as routed, or ascending expert id once `order_columns` has
sorted them (Megatron's order). Sums are kept in the wider of the two dtypes: give float32 gates for float32 sums. On a
CUDA device with Triton (`kernels`) they are float32 at least.

Invariants (asserted by the tests):
1. The bits of a token's output and of its gates' gradients depend on its rows alone, not on where they were computed.
2. Columns are added one after the other, first to last.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.runtime.kernels import fused_for

CombineOrder = Literal["top_k", "expert"]


def order_columns(ids_TK: Tensor, gates_TK: Tensor, *, order: CombineOrder) -> tuple[Tensor, Tensor]:
    """Put ids and gates into the order in which a token's contributions are to be added.

    Returns: ids_TK, gates_TK with their columns in that order
    """
    if order == "top_k":
        return ids_TK, gates_TK
    column_TK = torch.argsort(ids_TK, dim=1, stable=True)
    return ids_TK.gather(1, column_TK), gates_TK.gather(1, column_TK)


def combine_rows(rows_ND: Tensor, gates_TK: Tensor, *, index_TK: Tensor) -> Tensor:
    """Add each token's rows, weighted by its gates.

    Args:
        rows_ND: [N, D] experts' outputs, in sending order
        gates_TK: [T, K]
        index_TK: [T, K] place of each row in sending order

    Returns: [T, D] in the dtype of the rows
    """
    return _Combine.apply(rows_ND, gates_TK, index_TK)


def add_columns(rows_ND: Tensor, index_TK: Tensor, gates_TK: Tensor | None = None) -> Tensor:
    """Add `rows_ND[index_TK[:, k]]`, times the gates where given, for k = 0, 1, ... in that order."""
    fused = fused_for(rows_ND) if gates_TK is None else fused_for(rows_ND, gates_TK)
    if fused is not None:
        return fused.add_columns(rows_ND, index_TK, gates_TK)
    dtype = rows_ND.dtype if gates_TK is None else torch.promote_types(rows_ND.dtype, gates_TK.dtype)
    total_TD = rows_ND.new_zeros((index_TK.shape[0], rows_ND.shape[1]), dtype=dtype)
    for column in range(index_TK.shape[1]):
        part_TD = rows_ND.index_select(0, index_TK[:, column])
        total_TD += part_TD if gates_TK is None else part_TD * gates_TK[:, column, None]
    return total_TD.to(rows_ND.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, gates_TK: Tensor, index_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ND, gates_TK, index_TK)
        return add_columns(rows_ND, index_TK, gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_ND, gates_TK, index_TK = ctx.saved_tensors
        fused = fused_for(rows_ND, gates_TK)
        if fused is not None:
            return *fused.combine_backward(grad_TD, rows_ND, gates_TK, index_TK), None
        grad_rows_ND, grad_gates_TK = torch.empty_like(rows_ND), torch.empty_like(gates_TK)
        for column in range(index_TK.shape[1]):
            place_T = index_TK[:, column]
            # Every row belongs to one token and column: each place is written once.
            grad_rows_ND[place_T] = (grad_TD * gates_TK[:, column, None]).to(rows_ND.dtype)
            part_TD = rows_ND.index_select(0, place_T)
            grad_gates_TK[:, column] = (part_TD * grad_TD).sum(dim=1, dtype=gates_TK.dtype)
        return grad_rows_ND, grad_gates_TK, None
