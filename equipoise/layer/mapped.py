"""The mapped way of a layer's rows: ranks of a node read them where they are, instead of exchanging them.

    fetch      a rank fills the places of its slots straight from the tokens of their sources
    combine    a token's rank reads its K outputs where they were computed, and adds them in the same pass
Backward is the mirror image: the gradients of outputs are fetched, those of tokens added. There is no buffer to send
from, no all-to-all and no reordering. It needs a dispatch that was prepared (`make_tables`), since only a plan knows
where the rows of other ranks lie.

Every rank runs the same steps, whatever its rows. Outputs and gradients have the same bits as with collectives.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.core.errors import TransferError
from equipoise.layer.ops import fused_for
from equipoise.transfer.mapped_rows import MappedRows, typed


class MappedTables(NamedTuple):
    """Where the rows of one rank are, as keys `rank * stride + number`."""

    order_N: Tensor
    """[N] token * K + column of each row, in sending order; for the ranks that fetch it."""
    sent_P: Tensor
    """[buffer rows] source of each place, and number of the row in the source's sending order; -1 for padding."""
    place_TK: Tensor
    """[T, K] rank that computes each row, and its place there."""
    sent_stride: int
    place_stride: int


def make_tables(index_TK: Tensor, count_RRS: Tensor, source_P: Tensor, *, rank: int, pad: int) -> MappedTables:
    """Make the tables of one rank, without communication.

    Args:
        index_TK: [T, K] place of each row in sending order
        count_RRS: [R source, R target, S] rows that every source sends to every slot
        source_P: [buffer rows] the received row at each place, one past the last for padding
    """
    # Step 1: where a source's rows for this rank begin in its sending order, which is by target and slot.
    sent_RR = count_RRS.sum(dim=2)
    sent_stride = max(int(sent_RR.sum(dim=1).max()), 1)
    begin_R = (sent_RR.cumsum(1) - sent_RR)[:, rank]
    receive_R = sent_RR[:, rank]
    # Step 2: the key of each received row, and with it that of each place.
    ranks_R = torch.arange(len(receive_R))
    offset_R = ranks_R * sent_stride + begin_R - (receive_R.cumsum(0) - receive_R)
    key_N = torch.repeat_interleave(offset_R, receive_R) + torch.arange(int(receive_R.sum()))
    sent_P = torch.cat([key_N, key_N.new_full((1,), -1)])[source_P]
    # Step 3: where the slots of every target begin, and this rank's rows in them: behind those of lower ranks.
    length_RS = (count_RRS.sum(dim=0) + pad - 1) // pad * pad
    place_stride = max(int(length_RS.sum(dim=1).max()), 1)
    start_RS = length_RS.cumsum(1) - length_RS + count_RRS[:rank].sum(dim=0)
    start_C, count_C = (start_RS + ranks_R[:, None] * place_stride).reshape(-1), count_RRS[rank].reshape(-1)
    first_C = count_C.cumsum(0) - count_C
    row_N = torch.arange(index_TK.numel())
    place_N = torch.repeat_interleave(start_C - first_C, count_C) + row_N
    order_N = torch.empty_like(row_N)
    order_N[index_TK.reshape(-1)] = row_N
    return MappedTables(order_N, sent_P, place_N[index_TK], sent_stride, place_stride)


def fetch_rows(hidden_TD: Tensor, tables: MappedTables, mapped: MappedRows, *, layer: int) -> Tensor:
    """Fill this rank's places with the tokens of all ranks; all ranks must call, also without tokens.

    Returns: [buffer rows, D]
    """
    return _Fetch.apply(hidden_TD, tables, mapped, layer)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, tables: MappedTables, mapped: MappedRows, layer: int) -> Tensor:
        ctx.tables, ctx.mapped, ctx.layer = tables, mapped, layer
        if hidden_TD.dtype != mapped.own.tokens_TD.dtype:
            raise TransferError(
                f"hidden states are {hidden_TD.dtype}, the experts {mapped.own.tokens_TD.dtype}; cast the hidden "
                "states, or exchange rows by collectives (rows='collective')"
            )
        page = mapped.begin("tokens", layer=layer)
        page.tokens_TD[: len(hidden_TD)] = hidden_TD
        page.order_N[: len(tables.order_N)] = tables.order_N
        mapped.end(layer=layer)
        return _fetch_rows(mapped, tables)

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None, None]:
        mapped, tables = ctx.mapped, ctx.tables
        mapped.begin("rows", layer=ctx.layer).rows_PD[: len(grad_PD)] = grad_PD
        mapped.end(layer=ctx.layer)
        return _add_columns(mapped, tables, None), None, None, None


def combine_mapped(out_PD: Tensor, gates_TK: Tensor, tables: MappedTables, mapped: MappedRows, *, layer: int) -> Tensor:
    """Add each token's rows, weighted by its gates, column by column; all ranks must call, also without tokens.

    Args:
        out_PD: [buffer rows, D] what this rank's experts computed

    Returns: [T, D] in the dtype of the rows
    """
    return _CombineMapped.apply(out_PD, gates_TK, tables, mapped, layer)


class _CombineMapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out_PD: Tensor, gates_TK: Tensor, tables: MappedTables, mapped: MappedRows, layer: int
    ) -> Tensor:
        ctx.save_for_backward(out_PD, gates_TK)
        ctx.tables, ctx.mapped, ctx.layer = tables, mapped, layer
        mapped.begin("rows", layer=layer).rows_PD[: len(out_PD)] = out_PD
        mapped.end(layer=layer)
        return _add_columns(mapped, tables, gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        out_PD, gates_TK = ctx.saved_tensors
        mapped, tables, layer = ctx.mapped, ctx.tables, ctx.layer
        # Step 1: the ranks that computed rows fetch the gradients of their tokens, and their gates.
        page = mapped.begin("tokens", layer=layer)
        page.tokens_TD[: len(grad_TD)] = grad_TD
        page.order_N[: len(tables.order_N)] = tables.order_N
        typed(page.gates_X, gates_TK.numel(), gates_TK.dtype)[:] = gates_TK.reshape(-1)
        mapped.end(layer=layer)
        dots_P = torch.empty(len(out_PD), dtype=gates_TK.dtype, device=out_PD.device)
        grad_PD = _combine_backward(mapped, tables, out_PD, dots_P)
        if not ctx.needs_input_grad[1]:
            return grad_PD, None, None, None, None
        # Step 2: gradients of gates go back to the tokens' ranks.
        typed(mapped.begin("dots", layer=layer).dots_X, len(dots_P), dots_P.dtype)[:] = dots_P
        mapped.end(layer=layer)
        return grad_PD, _fetch_dots(mapped, tables, dots_P), None, None, None


# Plain versions below are the definition, and run on the CPU.


def _fetch_rows(mapped: MappedRows, tables: MappedTables) -> Tensor:
    own, top_k = mapped.own, tables.place_TK.shape[1]
    fused = fused_for(own.tokens_TD, kernels="triton_rows")
    if fused is not None:
        return fused.fetch_rows(mapped, tables.sent_P, stride=tables.sent_stride, top_k=top_k)
    rows_PD = own.tokens_TD.new_zeros((len(tables.sent_P), own.tokens_TD.shape[1]))
    for rank, views in mapped.views.items():
        at = (tables.sent_P.div(tables.sent_stride, rounding_mode="floor") == rank).nonzero().flatten()
        token = views.order_N[tables.sent_P[at] % tables.sent_stride] // top_k
        rows_PD[at] = views.tokens_TD[token]
    return rows_PD


def _add_columns(mapped: MappedRows, tables: MappedTables, gates_TK: Tensor | None) -> Tensor:
    own, place_TK, stride = mapped.own, tables.place_TK, tables.place_stride
    fused = fused_for(own.rows_PD, *(() if gates_TK is None else (gates_TK,)), kernels="triton_rows")
    if fused is not None:
        return fused.add_columns(mapped, place_TK, gates_TK, stride=stride)
    dtype = own.rows_PD.dtype if gates_TK is None else torch.promote_types(own.rows_PD.dtype, gates_TK.dtype)
    total_TD = own.rows_PD.new_zeros((place_TK.shape[0], own.rows_PD.shape[1]), dtype=dtype)
    for column, place_T in enumerate(place_TK.unbind(1)):
        part_TD = own.rows_PD.new_empty(total_TD.shape)
        for rank, views in mapped.views.items():
            at = (place_T // stride == rank).nonzero().flatten()
            part_TD[at] = views.rows_PD[place_T[at] % stride]
        total_TD += part_TD if gates_TK is None else part_TD * gates_TK[:, column, None]
    return total_TD.to(own.rows_PD.dtype)


def _combine_backward(mapped: MappedRows, tables: MappedTables, out_PD: Tensor, dots_P: Tensor) -> Tensor:
    """[P, D] gradients of the experts' outputs; writes those of the gates to `dots_P`."""
    sent_P, stride, top_k = tables.sent_P, tables.sent_stride, tables.place_TK.shape[1]
    fused = fused_for(out_PD, dots_P, kernels="triton_rows")
    if fused is not None:
        return fused.combine_backward(mapped, out_PD, dots_P, sent_P, stride=stride, top_k=top_k)
    grad_PD = torch.zeros_like(out_PD)
    for rank, views in mapped.views.items():
        at = (sent_P.div(stride, rounding_mode="floor") == rank).nonzero().flatten()
        order = views.order_N[sent_P[at] % stride].long()
        grads = views.tokens_TD[order // top_k]
        gates = typed(views.gates_X, views.tokens_TD.shape[0] * top_k, dots_P.dtype)[order]
        grad_PD[at] = (grads * gates[:, None]).to(out_PD.dtype)
        dots_P[at] = (out_PD[at] * grads).sum(dim=1, dtype=dots_P.dtype)
    return grad_PD


def _fetch_dots(mapped: MappedRows, tables: MappedTables, dots_P: Tensor) -> Tensor:
    place_TK, stride = tables.place_TK, tables.place_stride
    fused = fused_for(dots_P, kernels="triton_rows")
    if fused is not None:
        return fused.fetch_dots(mapped, place_TK, dots_P, stride=stride)
    grad_TK = dots_P.new_empty(place_TK.shape)
    for rank, views in mapped.views.items():
        at = place_TK // stride == rank
        dots = typed(views.dots_X, views.rows_PD.shape[0], dots_P.dtype)
        grad_TK[at] = dots[place_TK[at] % stride]
    return grad_TK
