"""Triton kernels that read rows where another rank of the node has them, through memory mapped by `mapped_rows`.

Each reads and writes every row once. `mapped` holds the plain versions and chooses. A kernel finds a rank's page by its
address in a table; parts of a page are at the same offset on all ranks.

Sums are made exactly as in `triton_ops`: in float32, first column to last, rounded once. So outputs and gradients have
the same bits as where rows are exchanged by a collective.
"""

import torch
import triton  # type: ignore[import-not-found]  # comes with CUDA builds of torch only
import triton.language as tl  # type: ignore[import-not-found]  # as above
from torch import Tensor

from equipoise.transfer.mapped_rows import MappedRows

# Triton evaluates annotations of kernels as kernel code, so their arguments have none.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

BLOCK = 1024


def fetch_rows(mapped: MappedRows, sent_P: Tensor, *, stride: int, top_k: int) -> Tensor:
    """[P, D] the token of each place, read from its source's page; zeros at places of padding."""
    tokens_TD, offsets = mapped.own.tokens_TD, mapped.offsets
    rows_PD = tokens_TD.new_empty((len(sent_P), tokens_TD.shape[1]))
    if len(sent_P):
        grid = (len(sent_P), triton.cdiv(rows_PD.shape[1], BLOCK))
        sizes = (offsets.tokens, offsets.order, stride, rows_PD.shape[1], top_k)
        _fetch_rows[grid](mapped.bases_R, sent_P, rows_PD, *sizes, BLOCK)
    return rows_PD


def add_columns(mapped: MappedRows, place_TK: Tensor, gates_TK: Tensor | None, *, stride: int) -> Tensor:
    """[T, D] sum over k of the row at `place_TK[:, k]`, times the gates where given."""
    tokens, top_k = place_TK.shape
    rows_PD = mapped.own.rows_PD
    out_TD = rows_PD.new_empty((tokens, rows_PD.shape[1]))
    if tokens:
        gates = out_TD if gates_TK is None else gates_TK.contiguous()
        grid = (tokens, triton.cdiv(out_TD.shape[1], BLOCK))
        sizes = (mapped.offsets.rows, stride, out_TD.shape[1])
        _add_columns[grid](mapped.bases_R, place_TK, gates, out_TD, *sizes, top_k, gates_TK is not None, BLOCK)
    return out_TD


def combine_backward(
    mapped: MappedRows, out_PD: Tensor, dots_P: Tensor, sent_P: Tensor, *, stride: int, top_k: int
) -> Tensor:
    """[P, D] gradient of each row of experts' output; writes the gradient of its gate to `dots_P`."""
    grad_PD = torch.empty_like(out_PD, memory_format=torch.contiguous_format)
    if len(sent_P):
        offsets, width = mapped.offsets, out_PD.shape[1]
        sizes = (offsets.tokens, offsets.order, offsets.gates, stride, width, top_k)
        block = triton.next_power_of_2(width)
        given = (mapped.bases_R, sent_P, out_PD.contiguous(), grad_PD, dots_P)
        _combine_backward[(len(sent_P),)](*given, *sizes, block, num_warps=8)
    return grad_PD


def fetch_dots(mapped: MappedRows, place_TK: Tensor, dots_P: Tensor, *, stride: int) -> Tensor:
    """[T, K] the gradient of each gate, from the page of the rank that computed its row."""
    out_TK = dots_P.new_empty(place_TK.shape)
    count = place_TK.numel()
    if count:
        _fetch_dots[(triton.cdiv(count, BLOCK),)](
            mapped.bases_R, place_TK, out_TK, mapped.offsets.dots, stride, count, BLOCK
        )
    return out_TK


@triton.jit(do_not_specialize=["stride"])
def _fetch_rows(bases, sent, out, tokens_at, order_at, stride, width, TOP_K: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    key = tl.load(sent + place)
    row = tl.zeros((SIZE,), out.dtype.element_ty)
    if key >= 0:
        base = tl.load(bases + key // stride)
        order = (base + order_at).to(tl.pointer_type(tl.int32))
        token = (tl.load(order + key % stride) // TOP_K).to(tl.int64)
        tokens = (base + tokens_at).to(tl.pointer_type(out.dtype.element_ty))
        row = tl.load(tokens + token * width + column, mask=inside, other=0.0)
    tl.store(out + place * width + column, row, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _add_columns(
    bases,
    places,
    gates,
    out,
    rows_at,
    stride,
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
        key = tl.load(places + token * TOP_K + k)
        rows = (tl.load(bases + key // stride) + rows_at).to(tl.pointer_type(out.dtype.element_ty))
        place = (key % stride).to(tl.int64)
        part = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATES:
            part = part * tl.load(gates + token * TOP_K + k).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _combine_backward(
    bases,
    sent,
    rows,
    grad_rows,
    dots,
    tokens_at,
    order_at,
    gates_at,
    stride,
    width,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < width
    key = tl.load(sent + place)
    grad_D = tl.zeros((SIZE,), tl.float32)
    gate = 0.0
    if key >= 0:
        base = tl.load(bases + key // stride)
        at = tl.load((base + order_at).to(tl.pointer_type(tl.int32)) + key % stride).to(tl.int64)
        gate = tl.load((base + gates_at).to(tl.pointer_type(dots.dtype.element_ty)) + at).to(tl.float32)
        grads = (base + tokens_at).to(tl.pointer_type(rows.dtype.element_ty))
        grad_D = tl.load(grads + (at // TOP_K) * width + column, mask=inside, other=0.0).to(tl.float32)
        row_D = tl.load(rows + place * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dots + place, tl.sum(row_D * grad_D, axis=0))
    tl.store(grad_rows + place * width + column, grad_D * gate, mask=inside)


@triton.jit(do_not_specialize=["stride", "count"])
def _fetch_dots(bases, places, out, dots_at, stride, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    key = tl.load(places + at, mask=inside, other=0)
    dots = (tl.load(bases + key // stride) + dots_at).to(tl.pointer_type(out.dtype.element_ty))
    tl.store(out + at, tl.load(dots + key % stride, mask=inside), mask=inside)
