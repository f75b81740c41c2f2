"""The mapped way of a layer's rows: ranks of a node read them where they are, instead of exchanging them.

    fetch      a rank fills the places of its slots straight from the tokens of their sources
    combine    a token's rank reads its K outputs where they were computed, and adds them in the same pass
Backward is the mirror image: the gradients of outputs are fetched, those of tokens added. There is no buffer to send
from, no all-to-all and no reordering. It needs a dispatch that was prepared (`make_tables`), since only a plan knows
where the rows of other ranks lie.

In a group of several nodes, what crosses them is exchanged by the group's collectives, and arrives in pages: tokens
from other nodes behind a rank's own tokens, outputs behind the rows that it computed. From there on they are read like
all others, by the same kernels. Tokens arrive at the ranks that compute them, or, in two levels, once at a relay
(`relay`), from whose page its whole node fetches them.

Every rank runs the same steps, whatever its rows. Outputs and gradients have the same bits as with collectives.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.core.errors import TransferError
from equipoise.layer.ops import all_to_all, fused_for
from equipoise.layer.relay import NodeRanks, Swap, make_relay
from equipoise.transfer.mapped_rows import MappedRows, Part, typed


class FarRows(NamedTuple):
    """What one rank exchanges with other nodes."""

    row_C: Tensor
    """[C] token * K + column of each token sent, in sending order; column 0 of those sent to a relay."""
    copies_R: list[int]
    """Tokens sent to each rank."""
    arriving_R: list[int]
    """Tokens received from each rank; they follow the rank's own in its page."""
    place_F: Tensor
    """[F] places of the computed rows whose tokens are in other nodes, source by source."""
    outputs_R: list[int]
    """Those of each rank's tokens."""
    returning_R: list[int]
    """Outputs received from each rank; they follow the rank's own in its page."""
    passed_R: list[int]
    """Rows that each rank of the node fetches here as from a relay; empty where tokens are sent directly."""


class MappedTables(NamedTuple):
    """Where the rows of one rank are, as keys `rank * stride + number`."""

    order_N: Tensor
    """[N] token * K + column of each row in this rank's page, for the ranks that fetch it: its own rows in sending
    order, then those that came from other nodes, as tokens behind its own."""
    sent_P: Tensor
    """[buffer rows] rank in whose page the token of each place is, and its number in that rank's order; -1: padding."""
    place_TK: Tensor
    """[T, K] rank in whose page the output of each row is, and its place there."""
    sent_stride: int
    place_stride: int
    far: FarRows | None = None
    """None where the group is one node."""


def make_tables(
    index_TK: Tensor, count_RRS: Tensor, source_P: Tensor, *, nodes: NodeRanks, pad: int, swap: Swap | None = None
) -> MappedTables:
    """Make the tables of one rank; without communication if there is no `swap`, else every rank must call this.

    Args:
        index_TK: [T, K] place of each row in sending order
        count_RRS: [R source, R target, S] rows that every source sends to every slot
        source_P: [buffer rows] the received row at each place, one past the last for padding
        swap: exchanges integers with all ranks, for tokens that cross nodes in two levels
    """
    rank, ranks_R, sent_RR = nodes.rank, torch.arange(len(count_RRS)), count_RRS.sum(dim=2)
    is_far_R = torch.tensor(nodes.node_R) != nodes.node_R[rank]
    row_N = torch.arange(index_TK.numel())
    order_N = torch.empty_like(row_N)
    order_N[index_TK.reshape(-1)] = row_N
    # Step 1: whose page has the tokens of each source, and from which number on: in a page of the node they are in
    # sending order, which is by target and slot; from other nodes they are in this rank's page or in a relay's.
    via_R = torch.full_like(ranks_R, rank) if swap is None else torch.tensor(nodes.server_R)
    page_R = torch.where(is_far_R, via_R, ranks_R)
    number_R = (sent_RR.cumsum(1) - sent_RR)[:, rank]
    if bool(is_far_R.any()):
        far_R = _first_far(sent_RR, via_R, is_far_R, rank=rank, is_relayed=swap is not None)
        number_R = torch.where(is_far_R, far_R, number_R)
    receive_R = sent_RR[:, rank]
    sent_stride = max(int((number_R + receive_R).max()), 1)
    # Step 2: the key of each received row, and with it that of each place.
    offset_R = page_R * sent_stride + number_R - (receive_R.cumsum(0) - receive_R)
    key_N = torch.repeat_interleave(offset_R, receive_R) + torch.arange(int(receive_R.sum()))
    sent_P = torch.cat([key_N, key_N.new_full((1,), -1)])[source_P]
    # Step 3: where the slots of every target begin, and this rank's rows in them: behind those of lower ranks.
    # Outputs of other nodes come back in sending order, behind this rank's places.
    length_RS = (count_RRS.sum(dim=0) + pad - 1) // pad * pad
    start_C = (length_RS.cumsum(1) - length_RS + count_RRS[:rank].sum(dim=0)).reshape(-1)
    count_C = count_RRS[rank].reshape(-1)
    place_N = torch.repeat_interleave(start_C - (count_C.cumsum(0) - count_C), count_C) + row_N
    target_N = torch.repeat_interleave(ranks_R, sent_RR[rank])
    is_far_N = is_far_R[target_N]
    place_N = torch.where(is_far_N, len(source_P) + is_far_N.cumsum(0) - 1, place_N)
    place_stride = max(int(length_RS.sum(dim=1).max()), len(source_P) + int(is_far_N.sum()), 1)
    place_N += torch.where(is_far_N, rank, target_N) * place_stride
    # Step 4: what is exchanged with other nodes, and the rows that arrive with it.
    far = None
    if bool(is_far_R.any()):
        place_X = torch.empty(int(receive_R.sum()) + 1, dtype=torch.int64)
        place_X[source_P] = torch.arange(len(source_P))
        place_F = place_X[:-1][torch.repeat_interleave(is_far_R, receive_R)]
        send_R, back_R = ((rows_R * is_far_R).tolist() for rows_R in (sent_RR[rank], receive_R))
        tokens, top_k = index_TK.shape
        far = FarRows(order_N[is_far_N], send_R, back_R, place_F, back_R, send_R, [])
        arrived_N = torch.arange(sum(back_R)) * top_k
        if swap is not None:
            far, arrived_N = _by_relay(far, nodes=nodes, swap=swap, top_k=top_k)
        order_N = torch.cat([order_N, tokens * top_k + arrived_N])
    return MappedTables(order_N, sent_P, place_N[index_TK], sent_stride, place_stride, far)


def _by_relay(direct: FarRows, *, nodes: NodeRanks, swap: Swap, top_k: int) -> tuple[FarRows, Tensor]:
    """Send tokens in two levels instead; also the rows of a relay's node, as arrived token * K + column."""
    counts = {"send_R": direct.copies_R, "receive_R": direct.arriving_R}
    relay = make_relay(direct.row_C, **counts, nodes=nodes, swap=swap, columns=top_k)
    sent = {"row_C": relay.token_C * top_k, "copies_R": relay.copies_R, "arriving_R": relay.arriving_R}
    return direct._replace(**sent, passed_R=relay.inner_send_R), relay.copy_N


def _first_far(sent_RR: Tensor, via_R: Tensor, is_far_R: Tensor, *, rank: int, is_relayed: bool) -> Tensor:
    """[R] number of each far source's first row for `rank` in the order of the page that has its tokens, `via_R`.

    There, behind what that rank sends itself, rows are by target and for each target by source. Only a relay has rows
    for others than itself.
    """
    is_same_RR = (via_R[:, None] == via_R) & is_far_R
    is_before_R = ~is_far_R & (torch.arange(len(via_R)) < rank) & is_relayed
    before_R = (is_same_RR * (sent_RR * is_before_R).sum(dim=1)).sum(dim=1)
    before_R += (is_same_RR.tril(-1) * sent_RR[:, rank]).sum(dim=1)
    first_R: Tensor = sent_RR.sum(dim=1)[via_R] + before_R
    return first_R


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
        _show_tokens(mapped, tables, hidden_TD, None, layer)
        return _fetch_rows(mapped, tables)

    @staticmethod
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None, None]:
        mapped, tables = ctx.mapped, ctx.tables
        _show_rows(mapped, tables, grad_PD, ctx.layer, part="rows")
        return _add_columns(mapped, tables, None), None, None, None


def combine_mapped(
    out_PD: Tensor, gates_TK: Tensor | None, tables: MappedTables, mapped: MappedRows, *, layer: int
) -> Tensor:
    """Add each token's rows, weighted by its gates, column by column; all ranks must call, also without tokens.

    Args:
        out_PD: [buffer rows, D] what this rank's experts computed
        gates_TK: None where gates have been applied already

    Returns: [T, D] in the dtype of the rows
    """
    if gates_TK is None:
        return _SumMapped.apply(out_PD, tables, mapped, layer)
    return _CombineMapped.apply(out_PD, gates_TK, tables, mapped, layer)


class _SumMapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_PD: Tensor, tables: MappedTables, mapped: MappedRows, layer: int) -> Tensor:
        ctx.tables, ctx.mapped, ctx.layer = tables, mapped, layer
        _show_rows(mapped, tables, out_PD, layer, part="rows")
        return _add_columns(mapped, tables, None)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        _show_tokens(ctx.mapped, ctx.tables, grad_TD, None, ctx.layer)
        return _fetch_rows(ctx.mapped, ctx.tables), None, None, None


class _CombineMapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out_PD: Tensor, gates_TK: Tensor, tables: MappedTables, mapped: MappedRows, layer: int
    ) -> Tensor:
        ctx.save_for_backward(out_PD, gates_TK)
        ctx.tables, ctx.mapped, ctx.layer = tables, mapped, layer
        _show_rows(mapped, tables, out_PD, layer, part="rows")
        return _add_columns(mapped, tables, gates_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        out_PD, gates_TK = ctx.saved_tensors
        mapped, tables, layer = ctx.mapped, ctx.tables, ctx.layer
        # Step 1: the ranks that computed rows fetch the gradients of their tokens, and their gates.
        _show_tokens(mapped, tables, grad_TD, gates_TK, layer)
        dots_P = torch.empty(len(out_PD), dtype=gates_TK.dtype, device=out_PD.device)
        grad_PD = _combine_backward(mapped, tables, out_PD, dots_P)
        if not ctx.needs_input_grad[1]:
            return grad_PD, None, None, None, None
        # Step 2: gradients of gates go back to the tokens' ranks.
        _show_rows(mapped, tables, dots_P, layer, part="dots")
        return grad_PD, _fetch_dots(mapped, tables, dots_P), None, None, None


def _show_tokens(
    mapped: MappedRows, tables: MappedTables, tokens_TD: Tensor, gates_TK: Tensor | None, layer: int
) -> None:
    """Put this rank's tokens, and those that arrive from other nodes, into its page; so do all ranks."""
    page, far, top_k = mapped.begin("tokens", layer=layer), tables.far, tables.place_TK.shape[1]
    own, whole = len(tokens_TD), len(tokens_TD) + sum(far.arriving_R if far else ())
    page.tokens_TD[:own] = tokens_TD
    page.order_N[: len(tables.order_N)] = tables.order_N
    if far is not None:
        sent_CD = tokens_TD.index_select(0, far.row_C // top_k)
        all_to_all(sent_CD, far.copies_R, far.arriving_R, mapped.group, page.tokens_TD[own:whole])
    if gates_TK is not None:
        page_TK = typed(page.gates_X, whole * top_k, gates_TK.dtype).view(whole, top_k)
        page_TK[:own] = gates_TK
        if far is not None:
            # A token that is sent for one row needs one gate, which is the first of the arrived token's.
            each = top_k if far.passed_R else 1
            sent_CX = gates_TK.reshape(-1)[far.row_C[:, None] + torch.arange(each, device=far.row_C.device)]
            page_TK[own:, :each] = all_to_all(sent_CX, far.copies_R, far.arriving_R, mapped.group)
    mapped.end(layer=layer)


def _show_rows(mapped: MappedRows, tables: MappedTables, rows_P: Tensor, layer: int, *, part: Part) -> None:
    """Put this rank's computed rows, or one number of each, into a part of its page; so do all ranks.

    What ranks of other nodes computed for this one's tokens comes behind them.
    """
    page, far = mapped.begin(part, layer=layer), tables.far
    page_P = page.rows_PD if part == "rows" else typed(page.dots_X, len(page.rows_PD), rows_P.dtype)
    page_P[: len(rows_P)] = rows_P
    if far is not None:
        returned_P = page_P[len(rows_P) : len(rows_P) + sum(far.returning_R)]
        all_to_all(rows_P.index_select(0, far.place_F), far.outputs_R, far.returning_R, mapped.group, returned_P)
    mapped.end(layer=layer)


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
        # Copies whole rows, which an index copies number by number on CPUs.
        rows_PD.index_copy_(0, at, views.tokens_TD.index_select(0, token))
    return rows_PD


def _add_columns(mapped: MappedRows, tables: MappedTables, gates_TK: Tensor | None) -> Tensor:
    own, place_TK, stride = mapped.own, tables.place_TK, tables.place_stride
    fused = fused_for(own.rows_PD, *(() if gates_TK is None else (gates_TK,)), kernels="triton_rows")
    if fused is not None:
        return fused.add_columns(mapped, place_TK, gates_TK, stride=stride)
    dtype = torch.promote_types(own.rows_PD.dtype, torch.float32 if gates_TK is None else gates_TK.dtype)
    total_TD = own.rows_PD.new_zeros((place_TK.shape[0], own.rows_PD.shape[1]), dtype=dtype)
    for column, place_T in enumerate(place_TK.unbind(1)):
        part_TD = own.rows_PD.new_empty(total_TD.shape)
        for rank, views in mapped.views.items():
            at = (place_T // stride == rank).nonzero().flatten()
            part_TD.index_copy_(0, at, views.rows_PD.index_select(0, place_T[at] % stride))
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
        grads = views.tokens_TD.index_select(0, order // top_k)
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
