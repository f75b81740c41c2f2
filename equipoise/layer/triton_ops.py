"""Triton kernels for what the layer does between its products on a CUDA device: each reads and writes rows once.

`ops` and `expert_block` hold the plain torch versions and choose. The plain versions take one kernel per column or
factor, and memory traffic is what such work costs.

Products and sums are in float32 whatever the dtype of the rows, and rounded once.

Invariants (asserted by the tests on a GPU):
1. Each function equals its plain version up to the rounding of the rows' dtype.
2. An output's bits depend on its own rows alone; columns are added first to last; nothing is added by atomics.
"""

import torch
import triton  # type: ignore[import-not-found]  # comes with CUDA builds of torch only
import triton.language as tl  # type: ignore[import-not-found]  # as above
from torch import Tensor

# Triton evaluates annotations of kernels as kernel code, so their arguments have none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


BLOCK = 1024
TILE = 2048
"""Entries one program of an activation computes: 16 for each of 128 threads."""


def add_columns(rows_ND: Tensor, index_TK: Tensor, gates_TK: Tensor | None) -> Tensor:
    """[T, D] sum over k of `rows_ND[index_TK[:, k]]`, times the gates where given."""
    (tokens, top_k), width = index_TK.shape, rows_ND.shape[1]
    out_TD = rows_ND.new_empty((tokens, width))
    if tokens:
        gates = rows_ND if gates_TK is None else gates_TK.contiguous()
        grid = (tokens, triton.cdiv(width, BLOCK))
        _add_columns[grid](
            rows_ND.contiguous(), index_TK.contiguous(), gates, out_TD, width, top_k, gates_TK is not None, BLOCK
        )
    return out_TD


def combine_backward(grad_TD: Tensor, rows_ND: Tensor, gates_TK: Tensor, index_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the weighted sum in its rows [N, D] and gates [T, K]."""
    (tokens, top_k), width = index_TK.shape, rows_ND.shape[1]
    grad_rows_ND = torch.empty_like(rows_ND, memory_format=torch.contiguous_format)
    grad_gates_TK = torch.empty_like(gates_TK, memory_format=torch.contiguous_format)
    if tokens:
        given = (grad_TD.contiguous(), rows_ND.contiguous(), index_TK.contiguous(), gates_TK.contiguous())
        block = triton.next_power_of_2(width)
        _combine_backward[(tokens,)](*given, grad_rows_ND, grad_gates_TK, width, top_k, block, num_warps=8)
    return grad_rows_ND, grad_gates_TK


def swiglu(pre_NF: Tensor) -> Tensor:
    """[N, F] silu of the first half of `pre_NF` [N, 2F] times the second."""
    rows, width = pre_NF.shape[0], pre_NF.shape[1] // 2
    out_NF = pre_NF.new_empty((rows, width))
    if rows:
        grid, tile = _tiles(rows, width)
        _swiglu[grid](pre_NF.contiguous(), out_NF, rows, width, *tile)
    return out_NF


def swiglu_backward(grad_NF: Tensor, pre_NF: Tensor) -> Tensor:
    """[N, 2F] gradient of `swiglu` in its input."""
    rows, width = grad_NF.shape
    out_NF = torch.empty_like(pre_NF, memory_format=torch.contiguous_format)
    if rows:
        grid, tile = _tiles(rows, width)
        _swiglu_backward[grid](grad_NF.contiguous(), pre_NF.contiguous(), out_NF, rows, width, *tile)
    return out_NF


def _tiles(rows: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and tile [rows, columns] such that columns divide the width where a power of two up to 1024 does."""
    columns = min(max(width & -width, 64), BLOCK)
    tile = (TILE // columns, columns)
    return (triton.cdiv(rows, tile[0]), triton.cdiv(width, columns)), tile


@triton.jit
def _add_columns(
    rows,
    index,
    gates,
    out,
    width,
    TOP_K: tl.constexpr,
    HAS_GATES: tl.constexpr,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    total = tl.zeros((SIZE,), tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(index + token * TOP_K + k)
        part = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATES:
            part = part * tl.load(gates + token * TOP_K + k).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total, mask=inside)


@triton.jit
def _combine_backward(
    grad,
    rows,
    index,
    gates,
    grad_rows,
    grad_gates,
    width,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < width
    grad_D = tl.load(grad + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        place = tl.load(index + token * TOP_K + k)
        gate = tl.load(gates + token * TOP_K + k).to(tl.float32)
        row_D = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_rows + place * width + column, grad_D * gate, mask=inside)
        tl.store(grad_gates + token * TOP_K + k, tl.sum(row_D * grad_D, axis=0))


@triton.jit
def _swiglu(pre, out, rows, width, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * SIZE + tl.arange(0, SIZE))[None, :]
    inside = (row < rows) & (column < width)
    gate = tl.load(pre + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pre + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(grad, pre, out, rows, width, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * SIZE + tl.arange(0, SIZE))[None, :]
    inside = (row < rows) & (column < width)
    at = row * 2 * width + column
    gate = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pre + at + width, mask=inside, other=0.0).to(tl.float32)
    grad_N = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(out + at, grad_N * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(out + at + width, grad_N * gate * sigmoid, mask=inside)
