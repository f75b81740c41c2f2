"""Experts of other nodes on their way to this node's host store, where a recompute window pulls them.

In recompute no gradient returns, so a replica may stand in another node than its expert's home (`Plan.cross_node`). It
is pulled from the host store of its own node. Homes of that node cannot write it there, so once a layer's homes hold a
version, each needed expert is sent once per node, from its home to a rank of the node, which writes it to the store;
the ranks take turns, so that all of the node's links bring experts.

Knows plans, nodes and the store. Does not know pulls: they wait for the expert's version like any other.

Invariants (asserted by the tests):
1. Exactly the experts that a node's ranks pull from another node are brought to it, each once per version, and no rank
   of the node receives more than one of a layer's above another; as many as the planner charges it for.
2. A replica of another node is refused by name in an update window, and where it is not pulled by the host path.
"""

from collections.abc import Collection, Sequence
from itertools import cycle, groupby
from typing import NamedTuple

import numpy as np

from equipoise.core.errors import TransferError
from equipoise.core.itinerary import PATHS
from equipoise.core.plan import Plan
from equipoise.runtime.connection import Message
from equipoise.runtime.host_store import HostStore
from equipoise.runtime.node import NodeMemory
from equipoise.runtime.watchdog import Transfer


class Crossing(NamedTuple):
    """An expert that a node needs from another."""

    layer: int
    expert: int
    source: int
    """Home rank."""
    source_slot: int
    target: int
    """The rank of the node that needs it whose turn it is."""


def crossings(plan: Plan) -> list[Crossing]:
    """What every node needs from others under this plan, in layer order; the same on all ranks."""
    layer_P, expert_P, far_P = _far(plan)
    node_R = np.array(plan.cluster.node_R)
    node_P = node_R[plan.replica_table.rank_P]
    needed = np.unique(np.stack([layer_P, expert_P, node_P], axis=1)[far_P], axis=0).tolist()
    ranks_N = [np.flatnonzero(node_R == node).tolist() for node in range(node_R.max() + 1)]
    turns = {(layer, node): cycle(ranks_N[node]) for layer, _, node in needed}
    return [
        Crossing(
            layer,
            expert,
            int(plan.home_LE[layer, expert]),
            int(plan.home_slot_LE[layer, expert]),
            next(turns[layer, node]),
        )
        for layer, expert, node in needed
    ]


def crossings_by_layer(plan: Plan) -> dict[int, list[Crossing]]:
    """The same, layer by layer."""
    return {layer: list(ways) for layer, ways in groupby(crossings(plan), key=lambda way: way.layer)}


def bring_far(node: NodeMemory, store: HostStore, ways: Sequence[Crossing], *, version: int) -> None:
    """Bring experts of other nodes, of one layer, to the store. Every rank of the group must call this.

    Args:
        version: of their weights
    """
    messages: list[Message] = []
    transfers: list[Transfer] = []
    coming = [way for way in ways if way.target == node.rank]
    for way in coming:
        store.withdraw(way.layer, way.expert)
    # Both sides go through the ways in the same order.
    for way in ways:
        if node.rank not in (way.source, way.target):
            continue
        is_leaving = way.source == node.rank
        peer = way.target if is_leaving else way.source
        experts = node.home(node.rank, way.layer) if is_leaving else store.experts(way.layer)
        for tensor in experts.tensors():
            row = tensor.detach()[way.source_slot if is_leaving else way.expert]
            row = row.contiguous().cpu() if is_leaving else row
            messages.append(Message(row, peer, is_leaving))
            transfers.append(Transfer("refresh", way.layer, way.expert, "p2p", peer))
            node.counters.arrive("p2p", 0 if is_leaving else int(row.nbytes))
    if messages:
        node.finish(messages, transfers)
    for way in coming:
        store.announce(way.layer, way.expert, version)


def check_far(plan: Plan, *, rank: int, host_paths: Collection[str]) -> None:
    """Refuse replicas of this rank that come from another node where they cannot.

    Args:
        host_paths: the plan's names of paths that lead to the host store
    """
    layer_P, expert_P, far_P = _far(plan)
    for p in np.flatnonzero(far_P & (plan.replica_table.rank_P == rank)).tolist():
        expert, layer = int(expert_P[p]), int(layer_P[p])
        words = (
            f"rank {rank}: the replica of expert {expert} in layer index {layer} has its home on rank "
            f"{int(plan.home_LE[layer, expert])}, in another node"
        )
        if plan.loads.stage != "recompute":
            raise TransferError(
                f"{words}, where an {plan.loads.stage} window's gradient cannot return; only recompute windows may "
                "cross nodes: plan this one without cross-node replicas"
            )
        path = PATHS[int(plan.replica_table.path_P2[p, 0])]
        if path not in host_paths:
            raise TransferError(
                f"{words}, where path {path!r} does not reach; only the host store does: plan the pull by 'host', and "
                "do not force path='peer'"
            )


def _far(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[P] layer and expert of every replica, and whether it stands in another node than its home."""
    table, node_R = plan.replica_table, np.array(plan.cluster.node_R)
    layer_P = table.entry_P % plan.home_LE.shape[0]
    home_P = plan.home_LE[layer_P, table.expert_P]
    return layer_P, table.expert_P, node_R[home_P] != node_R[table.rank_P]
