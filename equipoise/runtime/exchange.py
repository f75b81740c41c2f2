"""All-to-all of rows as an autograd op: uneven splits, zero rows included; backward is the way back.

Knows splits and a process group. Does not know slots, tokens or experts. In a group of one, rows stay where they are.

Invariants (asserted by the tests):
1. Rows come by source, and each row's gradient returns to it.
2. A rank that is gone ends the others with a `TransferError`, not a hang.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core.errors import TransferError


def exchange_rows(rows_ND: Tensor, *, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to the ranks of `group` and receive theirs; all ranks must call, also with zero rows.

    Args:
        rows_ND: [sum(send_R), D] rows for rank 0, then rank 1, ...
        send_R: rows for each rank
        receive_R: rows from each rank

    Returns: [sum(receive_R), D] rows from rank 0, then rank 1, ...
    """
    # A group of one has no one to send to, and a copy of all rows is not free.
    if group.size() == 1:
        return rows_ND
    return _Exchange.apply(rows_ND, send_R, receive_R, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = (receive_R, send_R, group)
        return all_to_all(rows_ND, send_R, receive_R, group)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad_ND, *ctx.way_back), None, None, None


def all_to_all(rows_ND: Tensor, send_R: list[int], receive_R: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange the rows of a tensor outside autograd; all ranks of `group` must call."""
    received_ND = rows_ND.new_empty((sum(receive_R), *rows_ND.shape[1:]))
    try:
        dist.all_to_all_single(received_ND, rows_ND.contiguous(), receive_R, send_R, group=group)
    except RuntimeError as error:
        raise TransferError(
            f"rank {group.rank()}: rows could not be exchanged with the other {group.size() - 1} ranks; look for a "
            f"rank that ended or raised before this one: {error}"
        ) from error
    return received_ND
