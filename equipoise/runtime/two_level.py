"""Tokens to rows at the ranks that compute them, in two levels: across to each node once, then inside the node.

Knows a `Relay` and the direct splits. Does not know slots or experts. What arrives, and in which order, is what
`spread` and `exchange` give: nothing behind them knows which way rows came.

Only this way has two levels. Outputs, and the gradients of both ways, travel row by row: a relay that added them up
would add in another order than the direct dispatch does, and change their bits.

Invariants (asserted by the tests):
1. Received rows, outputs and input gradients have the bits of the direct dispatch, on any nodes, also without tokens.
2. It communicates in the same order on every rank: twice in forward, once in backward.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.runtime.combine import add_columns
from equipoise.runtime.exchange import all_to_all
from equipoise.runtime.relay import Relay


class DirectWay(NamedTuple):
    """The direct dispatch of the same rows, which their gradients take back."""

    index_TK: Tensor
    """[T, K] place of each row in sending order."""
    send_R: list[int]
    receive_R: list[int]


def send_by_relay(hidden_TD: Tensor, relay: Relay, *, direct: DirectWay, group: dist.ProcessGroup) -> Tensor:
    """Bring tokens to the ranks that compute them; all ranks must call, also without tokens.

    Returns: [sum(direct.receive_R), D] rows from rank 0, then rank 1, ...
    """
    return _SendByRelay.apply(hidden_TD, relay, direct, group)


class _SendByRelay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, relay: Relay, direct: DirectWay, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(direct.index_TK)
        ctx.way_back = (direct.receive_R, direct.send_R, group)
        copies_CD = hidden_TD.index_select(0, relay.token_C)
        arrived_CD = all_to_all(copies_CD, relay.copies_R, relay.arriving_R, group)
        passed_ND = arrived_CD.index_select(0, relay.copy_N)
        received_ND = all_to_all(passed_ND, relay.inner_send_R, relay.inner_receive_R, group)
        return received_ND.index_select(0, relay.order_N)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (index_TK,) = ctx.saved_tensors
        return add_columns(all_to_all(grad_ND, *ctx.way_back), index_TK), None, None, None
