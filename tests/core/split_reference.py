"""The split of `core.split` in array operations: the same steps, one expert at a time, never optimised."""

import numpy as np


def split_rows(load_RE: np.ndarray, quota_ER: np.ndarray, *, node_R: np.ndarray) -> np.ndarray:
    """Split rows over holders.

    Args:
        load_RE: [R, E] rows at each source for each expert
        quota_ER: [E, R] rows each holder takes; sums over ranks to the expert's load
        node_R: [R] node of each rank

    Returns: [R source, E, R holder] int64 rows
    """
    ranks, experts = load_RE.shape
    split = np.zeros((ranks, experts, ranks), dtype=np.int64)
    for expert in range(experts):
        load_R, quota_R = load_RE[:, expert], quota_ER[expert]
        assert load_R.sum() == quota_R.sum(), f"expert {expert}: quota does not sum to its load"
        split[:, expert] = split_local_first(load_R, quota_R, node_R=node_R)
    _even_out(split, quota_ER, node_R)
    return split


def split_local_first(load_R: np.ndarray, quota_R: np.ndarray, *, node_R: np.ndarray) -> np.ndarray:
    """[R source, R holder] steps 1 to 3 for one expert."""
    left_R, room_R = load_R.copy(), quota_R.copy()
    own_R = np.minimum(left_R, room_R)
    split_RR = np.diag(own_R)
    left_R -= own_R
    room_R -= own_R
    for node in np.unique(node_R):
        inside_R = node_R == node
        rows = min(int(left_R[inside_R].sum()), int(room_R[inside_R].sum()))
        sent_R, taken_R = shares(rows, left_R * inside_R), shares(rows, room_R * inside_R)
        split_RR += _pair(sent_R, taken_R)
        left_R -= sent_R
        room_R -= taken_R
    return split_RR + _pair_by_node(left_R, room_R, node_R)


def _even_out(split_RER: np.ndarray, quota_ER: np.ndarray, node_R: np.ndarray) -> None:
    """Step 4, in place, in the order of experts."""
    is_far_RR = node_R[:, None] != node_R[None, :]
    far_RR = split_RER.sum(axis=1) * is_far_RR
    received_R = far_RR.sum(axis=0)
    if received_R.max() <= far_RR.sum(axis=1).max():
        return
    for expert in np.flatnonzero((quota_ER > 0).sum(axis=1) > 1).tolist():
        quota_R, load_R = quota_ER[expert], split_RER[:, expert].sum(axis=1)
        holders = np.flatnonzero(quota_R)
        is_far_R = node_R != node_R[holders[0]]
        if is_far_R[holders].any():
            continue
        received_R -= split_RER[is_far_R, expert].sum(axis=0)
        far_R = np.zeros_like(quota_R)
        far_R[holders] = level_shares(int(load_R[is_far_R].sum()), quota_R[holders], received_R[holders])
        received_R += far_R
        near_R, room_R = load_R * ~is_far_R, quota_R - far_R
        own_R = np.minimum(near_R, room_R)
        split_RER[:, expert] = _pair_by_node(load_R * is_far_R, far_R, node_R)
        split_RER[:, expert] += np.diag(own_R) + _pair(near_R - own_R, room_R - own_R)


def level_shares(rows: int, room_X: np.ndarray, level_X: np.ndarray) -> np.ndarray:
    """[X] `rows` rows dealt one by one to the lowest level that has room, the first of equals; levels rise with it."""
    share_X = np.zeros_like(room_X)
    left = rows
    while left > 0:
        open_X = share_X < room_X
        now_X = level_X + share_X
        lowest_X = open_X & (now_X == now_X[open_X].min())
        higher = now_X[open_X & ~lowest_X] - now_X[lowest_X][0]
        step = min(int((room_X - share_X)[lowest_X].min()), int(higher.min()) if len(higher) else left)
        step = min(step, left // int(lowest_X.sum()))
        if step == 0:
            share_X[np.flatnonzero(lowest_X)[:left]] += 1
            break
        share_X[lowest_X] += step
        left -= step * int(lowest_X.sum())
    return share_X


def _pair_by_node(sent_R: np.ndarray, taken_R: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[R source, R holder] the rows of each node in proportion to what holders have left."""
    if np.count_nonzero(taken_R) < 2:
        return _pair(sent_R, taken_R)
    split_RR, room_R = np.zeros((len(sent_R), len(sent_R)), dtype=np.int64), taken_R.copy()
    for node in np.unique(node_R[sent_R > 0]):
        here_R = sent_R * (node_R == node)
        share_R = shares(int(here_R.sum()), room_R)
        split_RR += _pair(here_R, share_R)
        room_R -= share_R
    return split_RR


def _pair(sent_R: np.ndarray, taken_R: np.ndarray) -> np.ndarray:
    """[R source, R holder] rows laid end to end on both sides, in rank order, and paired where they overlap."""
    sent_to, taken_to = np.cumsum(sent_R), np.cumsum(taken_R)
    low = np.maximum((sent_to - sent_R)[:, None], (taken_to - taken_R)[None, :])
    high = np.minimum(sent_to[:, None], taken_to[None, :])
    return np.maximum(0, high - low)


def split_in_proportion(load_RE: np.ndarray, quota_ER: np.ndarray) -> np.ndarray:
    """Split rows over holders in proportion to their quotas, source by source; same shapes as `split_rows`."""
    ranks, experts = load_RE.shape
    split = np.zeros((ranks, experts, ranks), dtype=np.int64)
    for expert in range(experts):
        room_R = quota_ER[expert].copy()
        for source in range(ranks):
            split[source, expert] = shares(int(load_RE[source, expert]), room_R)
            room_R -= split[source, expert]
        assert not room_R.any(), f"expert {expert}: quota does not sum to its load"
    return split


def shares(rows: int, room_R: np.ndarray) -> np.ndarray:
    """[R] `rows` rows in proportion to `room_R`, rounded down; what rounding leaves goes to the first ranks with room.

    Room is weighed in at most 31 bits, so that products stay in 64.
    """
    shift = max(0, int(room_R.sum()).bit_length() - 31)
    weight_R = room_R >> shift
    whole = max(1, int(weight_R.sum()))
    share_R = np.minimum(room_R, rows // whole * weight_R + rows % whole * weight_R // whole)
    for r in range(len(room_R)):
        share_R[r] += min(rows - int(share_R.sum()), int(room_R[r] - share_R[r]))
    return share_R
