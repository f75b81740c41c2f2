"""Compiled rows between ranks: who sends how many rows to whom in one (micro-step, layer).

The same split as `core.split` makes, added up over experts without keeping it expert by expert.

Integers only. Knows rows, ranks and nodes. Does not know seconds.

Invariants (asserted by the tests):
1. Equal to the sum over experts of the split that `core.split` makes.
"""

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.links import Nodes, fill_shares, nodes_of


@compiled
def rows_between(load_RE: np.ndarray, quota_ER: np.ndarray, node_R: np.ndarray, persistent: bool) -> np.ndarray:
    """[R source, R holder] rows; arguments as in `core.split.split_rows`, in proportion where `persistent`."""
    ranks, experts = load_RE.shape
    rows_RR = np.zeros((ranks, ranks), dtype=np.int64)
    nodes = nodes_of(node_R)
    for e in range(experts):
        left_R, room_R = load_RE[:, e].copy(), quota_ER[e].copy()
        if persistent:
            _in_proportion(rows_RR, left_R, room_R)
        else:
            _local_first(rows_RR, left_R, room_R, nodes)
    return rows_RR


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
    _pair(rows_RR, np.arange(len(left_R)), left_R, room_R)


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
