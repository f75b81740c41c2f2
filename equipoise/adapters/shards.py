"""Experts cut to their owners and put together again: contiguous shares of the first axis, rank by rank.

Knows tensors with an expert axis and the ranks of a group. Does not know modules or frameworks.

Invariants (asserted by the tests):
1. Gathering what was cut gives the same bytes, in any dtype.
2. A parameter that lends its experts stays the same object; it holds no memory until it gets them back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def cut(full: Tensor, group: Any) -> Tensor:
    """Return a copy of the experts this rank owns, [E / R, ...]."""
    owned = full.shape[0] // dist.get_world_size(group)
    return full.detach()[dist.get_rank(group) * owned :][:owned].clone()


def gather(shard: Tensor, group: Any, *, to: int | None = None) -> Tensor | None:
    """Put the owners' experts together, [E, ...]. Every rank of `group` must call this.

    Args:
        shard: [E / R, ...] experts this rank owns, or anything else kept per owned expert
        to: the only rank of the group that gets the result; None: every rank does

    Returns: [E, ...] on the shard's device, or None on a rank that gets nothing
    """
    # As bytes and on the host: gloo moves neither every dtype nor every device.
    mine = shard.detach().contiguous().cpu().flatten().view(torch.uint8)
    is_target = to in (None, dist.get_rank(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))] if is_target else None
    if to is None:
        dist.all_gather(parts, mine, group=group)
    else:
        dist.gather(mine, parts, dst=dist.get_global_rank(group, to), group=group)
    if parts is None:
        return None
    full = torch.cat(parts).view(shard.dtype)
    return full.view(-1, *shard.shape[1:]).to(shard.device)


def lend(parameter: Tensor) -> None:
    """Free the memory of a parameter whose experts live at their owners meanwhile."""
    parameter.data = parameter.data.new_empty(0)


def give_back(parameter: Tensor, full: Tensor) -> None:
    """Fill a parameter that was lent."""
    parameter.data = full
