"""Compiled rows between ranks: who sends how many rows to whom in one (micro-step, layer).

The same split as `core.split` makes, added up over experts without keeping it expert by expert. `tokens_between` is the
way that tokens take where they cross once per node.

Integers only. Knows rows, ranks and nodes. Does not know seconds.

Invariants (asserted by the tests):
1. Equal to the sum over experts of the split that `core.split` makes.
2. Tokens between nodes are those of `exchange.busiest` where no pairs were counted.
"""

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.exchange import tokens_to
from equipoise.cost.links import Nodes, fill_levels, fill_shares, nodes_of


@compiled
def rows_between(load_RE: np.ndarray, quota_ER: np.ndarray, node_R: np.ndarray, persistent: bool) -> np.ndarray:
    """[R source, R holder] rows; arguments as in `core.split.split_rows`, in proportion where `persistent`."""
    ranks, experts = load_RE.shape
    rows_RR = np.zeros((ranks, ranks), dtype=np.int64)
    if persistent:
        for e in range(experts):
            _in_proportion(rows_RR, load_RE[:, e], quota_ER[e].copy())
        return rows_RR
    nodes = nodes_of(node_R)
    for e in range(experts):
        _local_first(rows_RR, load_RE[:, e].copy(), quota_ER[e].copy(), nodes)
    received_R = _from_afar(rows_RR, node_R)
    if received_R.max() <= _from_afar(rows_RR.T, node_R).max():
        return rows_RR
    for e in range(experts):
        node = _common_node(quota_ER[e], node_R)
        if node >= 0:
            local_RR = np.zeros_like(rows_RR)
            _local_first(local_RR, load_RE[:, e].copy(), quota_ER[e].copy(), nodes)
            rows_RR -= local_RR
            received_R -= _from_afar(local_RR, node_R)
            received_R += _evened(rows_RR, load_RE[:, e], quota_ER[e], received_R, node, nodes)
    return rows_RR


@compiled
def tokens_between(rows_RR: np.ndarray, node_R: np.ndarray, top_k: int) -> np.ndarray:
    """[R, R] tokens from rank to rank, given rows from source to holder.

    A token goes once to each rank of its own node that computes rows of it; to another node once, to the rank with its
    source's place, which hands it on likewise.
    """
    _, by_node_R, start_N = nodes_of(node_R)
    moved_RR = np.zeros_like(rows_RR)
    for home in range(len(start_N) - 1):
        for place in range(start_N[home + 1] - start_N[home]):
            source = by_node_R[start_N[home] + place]
            sent = rows_RR[source].sum()
            for node in range(len(start_N) - 1):
                here = by_node_R[start_N[node] : start_N[node + 1]]
                relay = source if node == home else here[place % len(here)]
                if node != home:
                    moved_RR[source, relay] += tokens_to(rows_RR[source][here].sum(), sent, top_k)
                for r in here:
                    if r != relay:
                        moved_RR[relay, r] += tokens_to(rows_RR[source, r], sent, top_k)
    return moved_RR


@compiled
def _common_node(quota_R: np.ndarray, node_R: np.ndarray) -> int:
    """The node of all holders, where there are several; -1 where there is none such."""
    holders = np.flatnonzero(quota_R)
    node_X = node_R[holders]
    return node_X[0] if len(holders) > 1 and (node_X == node_X[0]).all() else -1


@compiled
def _from_afar(rows_RR: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[R] rows that each holder gets from other nodes."""
    far_R = np.zeros(len(node_R), dtype=np.int64)
    for s in range(len(node_R)):
        for r in range(len(node_R)):
            if node_R[s] != node_R[r]:
                far_R[r] += rows_RR[s, r]
    return far_R


@compiled
def _evened(
    rows_RR: np.ndarray, load_R: np.ndarray, quota_R: np.ndarray, received_R: np.ndarray, node: int, nodes: Nodes
) -> np.ndarray:
    """Add one expert's rows, those from other nodes dealt to level what holders receive; [R] how many each got.

    `node` is the holders'.
    """
    far_R, is_near_R = np.zeros_like(quota_R), nodes.node_R == node
    fill_levels(load_R[~is_near_R].sum(), quota_R, received_R.copy(), far_R, len(quota_R))
    near_R = np.where(is_near_R, load_R, 0)
    own_R = np.minimum(near_R, quota_R - far_R)
    for r in range(len(own_R)):
        rows_RR[r, r] += own_R[r]
    _pair_by_node(rows_RR, load_R - near_R, far_R, nodes)
    _pair(rows_RR, np.arange(len(far_R)), near_R - own_R, quota_R - far_R - own_R)
    return far_R


@compiled
def _in_proportion(rows_RR: np.ndarray, load_R: np.ndarray, room_R: np.ndarray) -> None:
    share_R = np.zeros_like(room_R)
    for s in range(len(load_R)):
        fill_shares(load_R[s], room_R, share_R, len(room_R))
        rows_RR[s] += share_R
        room_R -= share_R


@compiled
def _local_first(rows_RR: np.ndarray, left_R: np.ndarray, room_R: np.ndarray, nodes: Nodes) -> None:
    own_R = np.minimum(left_R, room_R)
    left_R -= own_R
    room_R -= own_R
    for r in range(len(own_R)):
        rows_RR[r, r] += own_R[r]
    for node in range(len(nodes.start_N) - 1):
        here = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        rows = min(left_R[here].sum(), room_R[here].sum())
        sent_X, taken_X = np.zeros(len(here), dtype=np.int64), np.zeros(len(here), dtype=np.int64)
        fill_shares(rows, left_R[here], sent_X, len(here))
        fill_shares(rows, room_R[here], taken_X, len(here))
        left_R[here] -= sent_X
        room_R[here] -= taken_X
        _pair(rows_RR, here, sent_X, taken_X)
    _pair_by_node(rows_RR, left_R, room_R, nodes)


@compiled
def _pair_by_node(rows_RR: np.ndarray, sent_R: np.ndarray, taken_R: np.ndarray, nodes: Nodes) -> None:
    """Pair the rows of each node in proportion to what holders have left."""
    all_R, room_R, share_R = np.arange(len(sent_R)), taken_R.copy(), np.zeros_like(taken_R)
    for node in range(len(nodes.start_N) - 1):
        here_R = np.where(nodes.node_R == node, sent_R, 0)
        rows = here_R.sum()
        if rows > 0:
            fill_shares(rows, room_R, share_R, len(room_R))
            _pair(rows_RR, all_R, here_R, share_R)
            room_R -= share_R


@compiled
def _pair(rows_RR: np.ndarray, rank_X: np.ndarray, sent_X: np.ndarray, taken_X: np.ndarray) -> None:
    """Lay rows end to end on both sides, in rank order, and pair them where they overlap."""
    i, j = 0, 0
    sent, taken = sent_X.copy(), taken_X.copy()
    while i < len(rank_X) and j < len(rank_X):
        rows = min(sent[i], taken[j])
        rows_RR[rank_X[i], rank_X[j]] += rows
        sent[i] -= rows
        taken[j] -= rows
        if sent[i] == 0:
            i += 1
        elif taken[j] == 0:
            j += 1
