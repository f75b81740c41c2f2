"""`Layout`: who this process is among the training ranks, and the groups it belongs to.

Ranks are laid out EP group after EP group: ranks 0..ep-1 are the first group. Ranks with the same place in their group
own the same experts and add up their gradients (expert data parallel).

Knows torch.distributed. Does not know models.

Invariants (asserted by the tests):
1. Every rank is in one EP group and in one group of equal owners; their sizes multiply to the number of ranks.
2. Sums over ranks do not depend on when a rank arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.core import Cluster, ModelShape, TopologyError
from equipoise.rl.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's place."""

    rank: int
    ranks: int
    world: Any
    """The group of all ranks."""
    ep_group: Any
    """The ranks that share one set of experts."""
    owner_group: Any
    """The ranks that own the same experts; None where this rank is the only one."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0


def build_layout(config: TrainConfig, world: Any = None) -> Layout:
    """Make the groups of all ranks. Every rank of the process group must call this.

    Args:
        world: the group of the training ranks; the default group if not given
    """
    world = world or dist.group.WORLD
    ranks, ep = dist.get_world_size(world), config.group_ranks
    if ranks != config.ranks:
        raise TopologyError(f"setting ranks is {config.ranks}, but {ranks} ranks were started; make them equal")
    limit = timedelta(seconds=config.timeout_s)
    if ep == ranks:
        return Layout(rank=dist.get_rank(world), ranks=ranks, world=world, ep_group=world, owner_group=None)
    of = [dist.get_global_rank(world, r) for r in range(ranks)]
    groups = [dist.new_group(of[at : at + ep], timeout=limit) for at in range(0, ranks, ep)]
    owners = [dist.new_group(of[at::ep], timeout=limit) for at in range(ep)]
    rank = dist.get_rank(world)
    return Layout(rank=rank, ranks=ranks, world=world, ep_group=groups[rank // ep], owner_group=owners[rank % ep])


def build_cluster(config: TrainConfig, model: ModelShape) -> Cluster:
    """The declared cluster of one EP group, refused where the experts do not divide."""
    ep, per_node = config.group_ranks, min(config.node_ranks, config.group_ranks)
    cluster = Cluster.preset(config.balance.cluster, nodes=-(-ep // per_node), ranks_per_node=per_node, ep=ep)
    cluster.home_slots(model)
    return cluster


def sum_over(tensors: Sequence[Tensor], group: Any) -> None:
    """Add up tensors of all ranks of `group`, in place, in one message. Every rank must call this."""
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


def gather_objects(value: Any, layout: Layout) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Every rank must call this."""
    found: list[Any] = [None] * layout.ranks
    dist.all_gather_object(found, value, group=layout.world)
    return found
