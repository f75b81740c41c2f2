"""How an expert's rows split over its holders, by source: local first, or in proportion.

Local first is how our plans are dispatched. In proportion is what balancers do that draw a copy for each token without
asking where the token is (EPLB, LPLB): every source splits its rows over the holders as their quotas are.

A pure function of loads and quotas, so that every rank derives the same split on demand. Integers only.

Steps of `split_rows`, for each expert:
1. A holder takes its own rank's rows, up to its quota.
2. Rows left over go to holders of the same node, in proportion to what they have left: so no holder takes all rows
   from near and another all from afar.
3. What is left goes to whatever quota is left.

Invariants (asserted by the tests):
1. Sums over holders give the load of each source; sums over sources give the quota of each holder.
2. Local first: no row leaves its rank while that rank has quota left, nor its node while the node has.
3. In proportion: quotas that are multiples of each other split every source's rows the same way, up to rounding.
"""

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
        left_R, room_R = load_RE[:, expert].copy(), quota_ER[expert].copy()
        # Step 1: own rank.
        own_R = np.minimum(left_R, room_R)
        split[np.arange(ranks), expert, np.arange(ranks)] = own_R
        left_R -= own_R
        room_R -= own_R
        # Step 2: own node.
        for node in np.unique(node_R):
            inside_R = node_R == node
            rows = min(int(left_R[inside_R].sum()), int(room_R[inside_R].sum()))
            sent_R, taken_R = shares(rows, left_R * inside_R), shares(rows, room_R * inside_R)
            split[:, expert] += _pair(sent_R, taken_R)
            left_R -= sent_R
            room_R -= taken_R
        # Step 3: the rest.
        split[:, expert] += _pair(left_R, room_R)
        assert left_R.sum() == room_R.sum(), f"expert {expert}: quota does not sum to its load"
    return split


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
