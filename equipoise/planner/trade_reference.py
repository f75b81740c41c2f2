"""The specification of trades: replicas that level what crosses nodes. Third part of `reference.py`, after `fill`.

Once ranks are level (`fill_reference.py`), slots are often left, and what all wait for is a link across nodes. In a
*trade* two ranks each take some rows of one expert of the other, as many as they give: both compute as much as before.

- `trade_across`, where replicas may stand in any node: the ranks are of two nodes, and each takes rows that come from
  its own node. What they took no longer crosses. Of all such trades the largest is made first.
- `trade_inside`: the ranks are of one node, which holds both replicas. One receives more rows from other nodes than any
  rank sends there, and gives some away for rows from inside the node. Like `fill` an alias table: the rank that
  receives most trades with the one that receives least, until one of the two is level.

Only experts without a replica are traded, so that who computes what is plain. How the rows of a traded expert split by
source is not decided here but by `core.split`, as ever; the price of the entry says whether a trade was worth it.

Plain, never optimised; `_trade.py` does the same compiled, bit for bit. Ties by index. Knows rows, not seconds.

Invariants (asserted by the tests):
1. No rank computes more or fewer rows than before.
2. No more rows cross nodes than before; after a trade across, fewer.
"""

import numpy as np

from equipoise.core.split import split_rows
from equipoise.cost.reference import quotas


def trade_across(
    load_RE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    min_rows: int,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> bool:
    """Let ranks of two nodes compute rows of their own node for each other; returns whether any do.

    Args:
        load_RE: [R, E] rows by source
        home_E: [E] home of each expert
        node_R: [R] node of each rank
        min_rows: least rows that a replica is worth, 1 or more
        rep_expert_RS: [R, S] changed: the expert of each replica slot, -1 where it stays free
        rep_rows_RS: [R, S] changed: its rows
    """
    is_changed = False
    while True:
        best: tuple[int, tuple[int, int, int, int]] = min_rows - 1, (-1, -1, -1, -1)
        for a in range(node_R.max() + 1):
            for b in range(a + 1, node_R.max() + 1):
                at_b = _best_offer(load_RE[node_R == a].sum(axis=0), node_R == b, home_E, rep_expert_RS)
                at_a = _best_offer(load_RE[node_R == b].sum(axis=0), node_R == a, home_E, rep_expert_RS)
                if at_a and at_b and min(at_a[0], at_b[0]) > best[0]:
                    best = min(at_a[0], at_b[0]), (at_a[1], at_b[2], at_b[1], at_a[2])
        rows, (p, at_p, q, at_q) = best
        if p < 0:
            return is_changed
        _put(p, at_p, rows, rep_expert_RS, rep_rows_RS)
        _put(q, at_q, rows, rep_expert_RS, rep_rows_RS)
        is_changed = True


def _best_offer(
    rows_E: np.ndarray, inside_R: np.ndarray, home_E: np.ndarray, rep_expert_RS: np.ndarray
) -> tuple[int, int, int] | None:
    """(rows, rank, expert) of the expert with most rows at the ranks given that have a slot left; None if none has."""
    open_ranks = [r for r in np.flatnonzero(inside_R).tolist() if (rep_expert_RS[r] < 0).any()]
    offers = [(int(rows_E[e]), r, e) for r in open_ranks for e in _whole(r, home_E, rep_expert_RS)]
    return max(offers, key=lambda offer: (offer[0], -offer[1], -offer[2]), default=None)


def trade_inside(
    load_RE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    min_rows: int,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> bool:
    """Let ranks of a node exchange rows from afar for rows from near; arguments as of `trade_across`."""
    is_far_RR = node_R[:, None] != node_R[None, :]
    quota_ER = quotas(load_RE.sum(axis=0), home_E, rep_expert_RS, rep_rows_RS)
    across_RR = split_rows(load_RE, quota_ER, node_R=node_R).sum(axis=1) * is_far_RR
    far_R, cap = across_RR.sum(axis=0), int(across_RR.sum(axis=1).max())
    if far_R.max() <= cap:
        return False
    is_near_RE = node_R[:, None] == node_R[home_E][None, :]
    near_E, far_E = (load_RE * is_near_RE).sum(axis=0), (load_RE * ~is_near_RE).sum(axis=0)
    is_changed = False
    for node in range(node_R.max() + 1):
        members = np.flatnonzero(node_R == node).tolist()
        level = max(cap, -(-int(far_R[members].sum()) // len(members)))
        while True:
            open_ranks = [r for r in members if (rep_expert_RS[r] < 0).any()]
            giver = max((r for r in open_ranks if far_R[r] > level), key=lambda r: far_R[r], default=-1)
            taker = min((r for r in open_ranks if far_R[r] < level), key=lambda r: far_R[r], default=-1)
            if giver < 0 or taker < 0:
                break
            want = min(int(far_R[giver]) - level, level - int(far_R[taker]))
            gone = _least_enough(far_E, want, _whole(giver, home_E, rep_expert_RS))
            back = _least_enough(near_E, want, _whole(taker, home_E, rep_expert_RS))
            rows = min(want, int(far_E[gone]), int(near_E[back])) if gone >= 0 and back >= 0 else 0
            if rows < min_rows:
                break
            _put(taker, gone, rows, rep_expert_RS, rep_rows_RS)
            _put(giver, back, rows, rep_expert_RS, rep_rows_RS)
            far_R[giver] -= rows
            far_R[taker] += rows
            is_changed = True
    return is_changed


def _whole(rank: int, home_E: np.ndarray, rep_expert_RS: np.ndarray) -> list[int]:
    """A rank's home experts that have no replica."""
    return [e for e in np.flatnonzero(home_E == rank).tolist() if e not in rep_expert_RS]


def _least_enough(rows_E: np.ndarray, want: int, experts: list[int]) -> int:
    """The expert whose rows just suffice, else that with the most; -1 if there is none."""
    enough = [e for e in experts if rows_E[e] >= want]
    if enough:
        return min(enough, key=lambda e: rows_E[e])
    return max(experts, key=lambda e: rows_E[e], default=-1)


def _put(rank: int, expert: int, rows: int, rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray) -> None:
    """Give a rank a replica in its first free slot."""
    slot = int(np.flatnonzero(rep_expert_RS[rank] < 0)[0])
    rep_expert_RS[rank, slot], rep_rows_RS[rank, slot] = expert, rows
