"""The two-level dispatch: a token is sent to each node once, then passed on inside the node.

    level 1   a source sends one copy of a token to each node that computes rows of it: to its relay there
    level 2   the relay makes the rows out of the copies and passes them on inside its node

The relay of a source in a node is the rank with the source's place in that node; in its own node it is the source.
Only tokens are sent in two levels. Outputs, and the gradients of both directions, are sent row by row: a relay that
added them up would add in another order than the direct dispatch does, and change their bits.
All ranks communicate in the same order, whatever their tokens: twice in forward, once in backward. Where a node's ranks
map each other's memory, `mapped` does level 2, and its backward sends a token's gradient and gates in two levels, too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.layer.ops import add_columns, all_to_all

Swap = Callable[[Tensor, list[int], list[int]], Tensor]
"""Sends a tensor's rows to all ranks and returns theirs; given the rows for each rank and those from each rank."""


class Relay(NamedTuple):
    """Tables of one rank's tokens in two levels, and of those that it passes on for others."""

    token_C: Tensor
    """[C] token of each copy, in sending order."""
    copies_R: list[int]
    """Copies sent to each rank."""
    arriving_R: list[int]
    """Copies received from each rank."""
    copy_N: Tensor
    """[rows passed on] the copy, as received, that each row is made of."""
    inner_send_R: list[int]
    """Rows passed on to each rank; those of other nodes get none."""
    inner_receive_R: list[int]
    """Rows received from each rank."""
    order_N: Tensor
    """[received rows] the row, as received, at each place of the direct dispatch's order."""


class NodeRanks(NamedTuple):
    """The ranks of an EP group on their nodes, seen from one of them."""

    node_R: tuple[int, ...]
    rank: int

    def relay(self, source: int, target: int) -> int:
        """The rank that takes the copies of `source` for the node of `target`."""
        mine, theirs = self._members(source), self._members(target)
        return theirs[mine.index(source) % len(theirs)]

    @property
    def relay_R(self) -> list[int]:
        """[R] the rank to which this rank sends the copies for each rank."""
        return [self.relay(self.rank, target) for target in range(len(self.node_R))]

    @property
    def server_R(self) -> list[int]:
        """[R] the rank from which this rank gets the rows of each source."""
        return [self.relay(source, self.rank) for source in range(len(self.node_R))]

    def _members(self, rank: int) -> list[int]:
        return [other for other, node in enumerate(self.node_R) if node == self.node_R[rank]]


def make_relay(
    row_N: Tensor, *, send_R: list[int], receive_R: list[int], nodes: NodeRanks, swap: Swap, columns: int = 1
) -> Relay:
    """Make the two-level tables of rows whose direct dispatch is known. Every rank must call this.

    Args:
        row_N: [N] token * columns + column of each row, in sending order; `Relay.copy_N` has the same form
        send_R: rows for each rank
        receive_R: rows from each rank
        swap: exchanges integers with all ranks; used twice
    """
    ranks, ones_R, device = range(len(send_R)), [1] * len(send_R), row_N.device
    token_C, copies_R, copy_N = _copies(row_N, send_R, nodes, columns)
    header_RX = torch.tensor([[copies_R[r], *_rows_by(r, send_R, nodes)] for r in ranks], device=device)
    # Relays must know how many copies each source sends, how many rows to make for each rank, and of which copy.
    headers_RX = swap(header_RX, ones_R, ones_R).cpu()
    arriving_R, rows_RR = headers_RX[:, 0], headers_RX[:, 1:]
    sent_R = header_RX[:, 1:].sum(dim=1).tolist()
    made_N = swap(copy_N, sent_R, rows_RR.sum(dim=1).tolist())
    return Relay(
        token_C=token_C,
        copies_R=copies_R,
        arriving_R=arriving_R.tolist(),
        copy_N=_by_target(made_N, rows_RR.to(device), columns * arriving_R.to(device)),
        inner_send_R=rows_RR.sum(dim=0).tolist(),
        inner_receive_R=_sums_by(receive_R, nodes.server_R),
        order_N=_direct_order(torch.tensor(receive_R, device=device), torch.tensor(nodes.server_R, device=device)),
    )


def _copies(row_N: Tensor, send_R: list[int], nodes: NodeRanks, columns: int) -> tuple[Tensor, list[int], Tensor]:
    """One copy per token and relay: their tokens and number for each rank, and the copy of each row, by relay.

    A row names its copy by its number among the copies for the same relay.
    """
    device, token_N = row_N.device, row_N // columns
    count_R = torch.tensor(send_R, device=device)
    relay_N = torch.repeat_interleave(torch.tensor(nodes.relay_R, device=device), count_R, output_size=len(token_N))
    stride = int(token_N.max()) + 1 if len(token_N) else 1
    key_C, copy_N = torch.unique(relay_N * stride + token_N, return_inverse=True)
    copies_R = torch.bincount(key_C // stride, minlength=len(send_R))
    copy_N = (copy_N - (copies_R.cumsum(0) - copies_R)[relay_N]) * columns + row_N % columns
    # Rows of one relay keep their order: by target, and for each target as it receives them.
    return key_C % stride, copies_R.tolist(), copy_N[torch.argsort(relay_N, stable=True)]


def _rows_by(relay: int, send_R: list[int], nodes: NodeRanks) -> list[int]:
    """[R] rows that `relay` has to pass on for this rank."""
    return [rows if via == relay else 0 for rows, via in zip(send_R, nodes.relay_R, strict=True)]


def _sums_by(rows_R: list[int], key_R: list[int]) -> list[int]:
    """[R] sum of the rows that have each rank as their key."""
    return [sum(rows for rows, key in zip(rows_R, key_R, strict=True) if key == r) for r in range(len(rows_R))]


def _by_target(made_N: Tensor, rows_RR: Tensor, arriving_R: Tensor) -> Tensor:
    """The copy of each row, target by target and for each source by source, from lists ordered by source.

    Args:
        arriving_R: how far the names of each source's copies reach
    """
    sources, targets = rows_RR.shape
    source_N = torch.repeat_interleave(torch.arange(sources, device=made_N.device), rows_RR.sum(dim=1))
    at_N = made_N + (arriving_R.cumsum(0) - arriving_R)[source_N]
    target_N = torch.repeat_interleave(
        torch.arange(targets, device=made_N.device).repeat(sources), rows_RR.reshape(-1), output_size=len(made_N)
    )
    return at_N[torch.argsort(target_N, stable=True)]


def _direct_order(receive_R: Tensor, server_R: Tensor) -> Tensor:
    """Place, as received from the relays, of each row in source order: relays ascend, and for each its sources."""
    by_server_R = torch.argsort(server_R, stable=True)
    start_R = torch.empty_like(receive_R)
    start_R[by_server_R] = receive_R[by_server_R].cumsum(0) - receive_R[by_server_R]
    before_R = receive_R.cumsum(0) - receive_R
    offset_N = torch.repeat_interleave(start_R - before_R, receive_R)
    return offset_N + torch.arange(len(offset_N), device=receive_R.device)


class DirectDispatch(NamedTuple):
    """The direct dispatch of the same rows, by which their gradients return."""

    index_TK: Tensor
    """[T, K] place of each row in sending order."""
    send_R: list[int]
    receive_R: list[int]


def send_by_relay(hidden_TD: Tensor, relay: Relay, *, direct: DirectDispatch, group: dist.ProcessGroup) -> Tensor:
    """Send tokens to the ranks that compute them; all ranks must call, also without tokens.

    Returns: [sum(direct.receive_R), D] rows from rank 0, then rank 1, ...
    """
    return _SendByRelay.apply(hidden_TD, relay, direct, group)


class _SendByRelay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, relay: Relay, direct: DirectDispatch, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(direct.index_TK)
        ctx.back = (direct.receive_R, direct.send_R, group)
        copies_CD = hidden_TD.index_select(0, relay.token_C)
        arrived_CD = all_to_all(copies_CD, relay.copies_R, relay.arriving_R, group)
        passed_ND = arrived_CD.index_select(0, relay.copy_N)
        received_ND = all_to_all(passed_ND, relay.inner_send_R, relay.inner_receive_R, group)
        return received_ND.index_select(0, relay.order_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (index_TK,) = ctx.saved_tensors
        return add_columns(all_to_all(grad_ND, *ctx.back), index_TK), None, None, None
