"""How an expert's rows split over its holders, by source rank: the one rule that plans, prices and replays share.
And how a rank's rows are cut into waves (`cut_rows`).

Plans are dispatched local first, whoever made them. The policies in `BLIND` draw a copy for each token without asking
where the token is: every source splits its rows over the holders in proportion to their quotas.

Steps of splitting local first, for each expert:
1. A holder takes its own rank's rows, up to its quota.
2. Rows left over go to holders of the same node, in proportion to what they have left, so that no holder takes all
   rows from its own node and another all from other nodes.
3. What is left goes to whatever quota is left, node by node in proportion: libraries send what a node has for the n-th
   rank of other nodes over one link (NCCL's PXN, by default), so no node may have all of its rows for one holder.
Then, if some rank receives more rows from other nodes than any rank sends there:
4. Where several holders of an expert share one node, rows from other nodes go to the holder that receives least of them
   so far, again node by node in proportion. The holders' own ranks' rows come next, then the rest of the node's.

Integers only. Written in loops that numba compiles as they are: `cost.links` has compiled copies.
Training ranks, which never import numba, run the same source.
"""

from typing import NamedTuple

import numpy as np

BLIND = ("eplb-oracle-blind", "lplb-blind", "balanced")
"""Policies that split in proportion."""


class Nodes(NamedTuple):
    """Which rank is where."""

    node_R: np.ndarray
    by_node_R: np.ndarray
    """[R] ranks sorted by node."""
    start_N: np.ndarray
    """[N + 1] where each node's ranks begin there."""


def split_rows(
    load_RE: np.ndarray, quota_ER: np.ndarray, *, node_R: np.ndarray, in_proportion: bool = False
) -> np.ndarray:
    """Split rows over holders.

    Args:
        load_RE: [R, E] rows at each source for each expert
        quota_ER: [E, R] rows each holder takes; sums over ranks to the expert's load
        node_R: [R] node of each rank
        in_proportion: split every source's rows as the quotas are, not local first

    Returns: [R source, E, R holder] int64 rows
    """
    wrong = np.flatnonzero(load_RE.sum(axis=0) != quota_ER.sum(axis=1))
    assert not len(wrong), f"expert {wrong[0]}: quota does not sum to its load"
    ranks, experts = load_RE.shape
    split_RER = np.zeros((ranks, experts, ranks), dtype=np.int64)
    add_split(split_RER, load_RE, quota_ER, nodes_of(node_R), in_proportion)
    return split_RER


class Cuts(NamedTuple):
    """Where the waves of some ranks begin, all but the first. A cut may divide the rows of a slot."""

    slot_XW: np.ndarray
    """[X, waves - 1] slot in which each wave begins."""
    before_XW: np.ndarray
    """[X, waves - 1] rows of this slot that belong to the waves before. Example: slot 3, before 10 of rows 14: the wave
    has the last 4 rows of slot 3, and further slots."""
    rows_XW: np.ndarray
    """[X, waves - 1] rows of this slot."""


def cut_rows(rows_XS: np.ndarray, waves: int) -> Cuts:
    """Cut the rows of every slot, in slot order, into waves of as many rows, rounded down."""
    end_XS = np.cumsum(rows_XS, axis=1)
    begin_XW = np.arange(1, waves) * end_XS[:, -1:] // waves
    # The first slot that ends behind the cut. Where there are no rows, it is the last slot.
    slot_XW = (end_XS[:, None, :] <= begin_XW[:, :, None]).sum(axis=2).clip(max=rows_XS.shape[1] - 1)
    cut_XW = np.take_along_axis(rows_XS, slot_XW, axis=1)
    return Cuts(slot_XW, begin_XW - np.take_along_axis(end_XS, slot_XW, axis=1) + cut_XW, cut_XW)


def rows_between(load_RE: np.ndarray, quota_ER: np.ndarray, node_R: np.ndarray, in_proportion: bool) -> np.ndarray:
    """[R source, R holder] rows of all experts together; arguments as in `split_rows`."""
    ranks = len(node_R)
    sum_R1R = np.zeros((ranks, 1, ranks), dtype=np.int64)
    add_split(sum_R1R, load_RE, quota_ER, nodes_of(node_R), in_proportion)
    return sum_R1R[:, 0].copy()


def nodes_of(node_R: np.ndarray) -> Nodes:
    """List the ranks of every node, ascending."""
    by_node_R = np.argsort(node_R, kind="mergesort")
    return Nodes(node_R, by_node_R, np.searchsorted(node_R[by_node_R], np.arange(node_R.max() + 2)))


def add_split(
    out_RXR: np.ndarray, load_RE: np.ndarray, quota_ER: np.ndarray, nodes: Nodes, in_proportion: bool
) -> None:
    """Add the split of all experts to `out_RXR`: X is E to keep experts apart, or 1 to add them up."""
    node_R, width = nodes.node_R, out_RXR.shape[1]
    for e in range(len(quota_ER)):
        if in_proportion:
            _add_in_proportion(out_RXR[:, e % width], load_RE[:, e], quota_ER[e])
        else:
            _add_local_first(out_RXR[:, e % width], load_RE[:, e], quota_ER[e], nodes)
    if in_proportion:
        return
    # Step 4, only where receiving holds up the exchange.
    far_RR = out_RXR.sum(axis=1) * (node_R.reshape(-1, 1) != node_R)
    received_R = far_RR.sum(axis=0)
    if received_R.max() <= far_RR.sum(axis=1).max():
        return
    local_RR = np.zeros((len(node_R), len(node_R)), dtype=np.int64)
    for e in range(len(quota_ER)):
        holders = np.flatnonzero(quota_ER[e])
        if len(holders) < 2 or (node_R[holders] != node_R[holders[0]]).any():
            continue
        local_RR[:] = 0
        _add_local_first(local_RR, load_RE[:, e], quota_ER[e], nodes)
        for s in range(len(node_R)):
            for r in holders:
                out_RXR[s, e % width, r] -= local_RR[s, r]
                if node_R[s] != node_R[r]:
                    received_R[r] -= local_RR[s, r]
        _add_evenly(out_RXR[:, e % width], load_RE[:, e], quota_ER[e], received_R, nodes)


def _add_in_proportion(out_RR: np.ndarray, load_R: np.ndarray, quota_R: np.ndarray) -> None:
    """Split every source's rows over the holders as their room is."""
    holders = np.flatnonzero(quota_R)
    room_X = quota_R[holders]
    for s in range(len(load_R)):
        share_X = shares(load_R[s], room_X)
        for i in range(len(holders)):
            out_RR[s, holders[i]] += share_X[i]
        room_X -= share_X


def _add_local_first(out_RR: np.ndarray, load_R: np.ndarray, quota_R: np.ndarray, nodes: Nodes) -> None:
    """Steps 1 to 3 for one expert."""
    holders = np.flatnonzero(quota_R)
    if len(holders) == 1:
        out_RR[:, holders[0]] += load_R
        return
    left_R, room_R = load_R.copy(), quota_R.copy()
    for r in holders:
        own = min(left_R[r], room_R[r])
        out_RR[r, r] += own
        left_R[r] -= own
        room_R[r] -= own
    for node in range(len(nodes.start_N) - 1):
        here = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        near = here[room_R[here] > 0]
        rows = min(left_R[here].sum(), room_R[near].sum())
        if rows > 0:
            sent_X, taken_Y = shares(rows, left_R[here]), shares(rows, room_R[near])
            _pair(out_RR, here, sent_X, near, taken_Y)
            left_R[here] -= sent_X
            room_R[near] -= taken_Y
    _pair_by_node(out_RR, left_R, holders, room_R[holders], nodes)


def _add_evenly(
    out_RR: np.ndarray, load_R: np.ndarray, quota_R: np.ndarray, received_R: np.ndarray, nodes: Nodes
) -> None:
    """Step 4 for one expert whose holders share a node; raises `received_R` by what they get from other nodes."""
    holders = np.flatnonzero(quota_R)
    node = nodes.node_R[holders[0]]
    here = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
    near_R, far_R = np.zeros_like(load_R), load_R.copy()
    for r in here:
        near_R[r], far_R[r] = load_R[r], 0
    far_X = np.zeros(len(holders), dtype=np.int64)
    fill_levels(far_R.sum(), quota_R[holders], received_R[holders], far_X, len(holders))
    _pair_by_node(out_RR, far_R, holders, far_X, nodes)
    room_X = quota_R[holders] - far_X
    for i in range(len(holders)):
        r = holders[i]
        received_R[r] += far_X[i]
        own = min(near_R[r], room_X[i])
        out_RR[r, r] += own
        near_R[r] -= own
        room_X[i] -= own
    _pair(out_RR, here, near_R[here], holders, room_X)


def _pair_by_node(
    out_RR: np.ndarray, sent_R: np.ndarray, holders: np.ndarray, room_X: np.ndarray, nodes: Nodes
) -> None:
    """Pair the rows of each node in proportion to what holders have left."""
    left_X = room_X.copy()
    for node in range(len(nodes.start_N) - 1):
        here = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        rows = sent_R[here].sum()
        if rows > 0:
            share_X = shares(rows, left_X)
            _pair(out_RR, here, sent_R[here], holders, share_X)
            left_X -= share_X


def _pair(
    out_RR: np.ndarray, sources: np.ndarray, sent_X: np.ndarray, holders: np.ndarray, taken_Y: np.ndarray
) -> None:
    """Lay rows end to end on both sides and pair them where they overlap."""
    i, j = 0, 0
    sent, taken = sent_X.copy(), taken_Y.copy()
    while i < len(sources) and j < len(holders):
        rows = min(sent[i], taken[j])
        out_RR[sources[i], holders[j]] += rows
        sent[i] -= rows
        taken[j] -= rows
        if sent[i] == 0:
            i += 1
        else:
            j += 1


def shares(rows: int, room_X: np.ndarray) -> np.ndarray:
    """[X] `rows` rows in proportion to `room_X`; see `fill_shares`."""
    share_X = np.zeros(len(room_X), dtype=np.int64)
    fill_shares(rows, room_X, share_X, len(room_X))
    return share_X


def fill_shares(rows: int, room_X: np.ndarray, share_X: np.ndarray, count: int) -> None:
    """Fill the first `count` of `share_X` with `rows` rows in proportion to `room_X`, rounded down.

    What rounding leaves goes to the first that have room. Room is weighed in at most 31 bits, so that products stay in
    64.
    """
    total = np.int64(0)
    for i in range(count):
        share_X[i] = room_X[i]
        total += room_X[i]
    if rows == total:
        return
    shift = 0
    while (total >> shift) >= 2**31:
        shift += 1
    whole = np.int64(0)
    for i in range(count):
        whole += room_X[i] >> shift
    whole = max(np.int64(1), whole)
    left = rows
    for i in range(count):
        if room_X[i] > 0:
            weight = room_X[i] >> shift
            share_X[i] = min(room_X[i], rows // whole * weight + rows % whole * weight // whole)
            left -= share_X[i]
    for i in range(count):
        more = min(left, room_X[i] - share_X[i])
        share_X[i] += more
        left -= more


def fill_levels(rows: int, room_X: np.ndarray, level_X: np.ndarray, share_X: np.ndarray, count: int) -> None:
    """Fill the first `count` of `share_X` with `rows` rows, dealt one by one to the lowest level that has room.

    Of equal levels the first takes the row. Levels rise with what they take: `level_X` is changed.
    """
    for i in range(count):
        share_X[i] = 0
    left = rows
    while left > 0:
        lowest, higher = 2**62, 2**62
        for i in range(count):
            if share_X[i] < room_X[i]:
                lowest = min(lowest, level_X[i])
        step: int = left
        at_lowest = 0
        for i in range(count):
            if share_X[i] < room_X[i]:
                if level_X[i] == lowest:
                    at_lowest += 1
                    step = min(step, room_X[i] - share_X[i])
                else:
                    higher = min(higher, level_X[i])
        each = max(1, min(step, higher - lowest, left // at_lowest))
        for i in range(count):
            if left > 0 and share_X[i] < room_X[i] and level_X[i] == lowest:
                share_X[i] += each
                level_X[i] += each
                left -= each
