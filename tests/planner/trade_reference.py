"""The specification of trades: replicas that level what crosses nodes. Third part of `reference.py`, after `fill`.

Once ranks are level (`fill_reference.py`), slots are often left, and what all wait for is a link across nodes. In a
*trade* two ranks each take some rows of one expert of the other, as many as they give: both compute as much as before.

- `trade_across`, where replicas may stand in any node: the ranks are of two nodes, and each takes rows that come from
  its own node. What they took no longer crosses. Again and again the busiest link gets the trade that takes most off
  it, until there is none; a source's share of what no longer crosses is taken to be its share of its node's rows.
- `trade_inside`: the ranks are of one node, which holds both replicas. One receives more rows from other nodes than any
  rank sends there, and gives some away for rows from inside the node. Like `fill` an alias table: the rank that
  receives most trades with the one that can take most of it, at best until one of the two is level.

Only experts without a replica are traded, so that who computes what is plain. How the rows of a traded expert split by
source is not decided here but by `core.split`, as ever; the price of the entry says whether a trade was worth it.

Plain, never optimised; `_trade.py` does the same compiled, bit for bit. Ties by index. Knows rows, not seconds.

Invariants (asserted by the tests):
1. No rank computes more or fewer rows than before.
2. No more rows cross nodes than before; after a trade across, fewer.
"""

import numpy as np

from tests.core.split_reference import split_rows
from tests.cost.reference import quotas


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
    across_RR = _across(load_RE, home_E, node_R, rep_expert_RS, rep_rows_RS)
    received_R, sent_R = across_RR.sum(axis=0), across_RR.sum(axis=1)
    node_NE = np.stack([load_RE[node_R == n].sum(axis=0) for n in range(node_R.max() + 1)])
    is_changed = False
    while True:
        is_sent = bool(sent_R.max() > received_R.max())
        rank = int((sent_R if is_sent else received_R).argmax())
        best, chosen = 0, (-1, -1, -1)
        for q in _open_ranks(node_R != node_R[rank], rep_expert_RS):
            # What a rank receives, it can give away itself; what it sends, any rank of its node can compute.
            partners = _open_ranks(node_R == node_R[rank], rep_expert_RS)
            partners = [r for r in partners if is_sent or r == rank]
            offers = {r: _most(node_NE[node_R[q]], _whole(r, home_E, rep_expert_RS))[0] for r in partners}
            p = max(offers, key=lambda r: offers[r], default=-1)
            for e in _whole(q, home_E, rep_expert_RS) if p >= 0 else ():
                whole = int(node_NE[node_R[rank], e])
                rows = min(whole, offers[p])
                if rows >= min_rows:
                    less = part(int(load_RE[rank, e]), rows, whole) if is_sent else rows
                    best, chosen = max((best, chosen), (less, (p, q, e)), key=lambda trade: trade[0])
        p, q, gone = chosen
        if p < 0:
            return is_changed
        at_q, back = _most(node_NE[node_R[q]], _whole(p, home_E, rep_expert_RS))
        rows = min(int(node_NE[node_R[p], gone]), at_q)
        for holder, expert in ((p, gone), (q, back)):
            _put(holder, expert, rows, rep_expert_RS, rep_rows_RS)
            for r in np.flatnonzero(node_R == node_R[holder]).tolist():
                sent_R[r] -= part(int(load_RE[r, expert]), rows, int(node_NE[node_R[r], expert]))
            received_R[holder] -= rows
        is_changed = True


def part(chosen: int, rows: int, whole: int) -> int:
    """`chosen` times `rows` over `whole`, the latter two in 31 bits: of a node's rows, those of one source."""
    shift = max(0, whole.bit_length() - 31)
    return chosen * (rows >> shift) // (whole >> shift)


def _most(rows_E: np.ndarray, experts: list[int]) -> tuple[int, int]:
    """The most rows of one of these experts, and which it is, the first of equals; 0, -1 if there is none."""
    expert = max(experts, key=lambda e: rows_E[e], default=-1)
    return (int(rows_E[expert]), expert) if experts else (0, -1)


def _across(
    load_RE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> np.ndarray:
    """[R source, R holder] rows that cross nodes."""
    quota_ER = quotas(load_RE.sum(axis=0), home_E, rep_expert_RS, rep_rows_RS)
    across_RR: np.ndarray = split_rows(load_RE, quota_ER, node_R=node_R).sum(axis=1) * (node_R[:, None] != node_R)
    return across_RR


def _open_ranks(inside_R: np.ndarray, rep_expert_RS: np.ndarray) -> list[int]:
    """Those of the ranks given that have a slot left."""
    return np.flatnonzero(inside_R & (rep_expert_RS < 0).any(axis=1)).tolist()


def trade_inside(
    load_RE: np.ndarray,
    home_E: np.ndarray,
    node_R: np.ndarray,
    min_rows: int,
    rep_expert_RS: np.ndarray,
    rep_rows_RS: np.ndarray,
) -> bool:
    """Let ranks of a node exchange rows from other nodes for rows of their own; arguments as of `trade_across`."""
    across_RR = _across(load_RE, home_E, node_R, rep_expert_RS, rep_rows_RS)
    far_R, cap = across_RR.sum(axis=0), int(across_RR.sum(axis=1).max())
    if far_R.max() <= cap:
        return False
    is_near_RE = node_R[:, None] == node_R[home_E][None, :]
    near_E, far_E = (load_RE * is_near_RE).sum(axis=0), (load_RE * ~is_near_RE).sum(axis=0)
    is_changed = False
    for node in range(node_R.max() + 1):
        level = max(cap, -(-int(far_R[node_R == node].sum()) // int((node_R == node).sum())))
        while True:
            open_ranks = _open_ranks(node_R == node, rep_expert_RS)
            giver = max((r for r in open_ranks if far_R[r] > level), key=lambda r: far_R[r], default=-1)
            if giver < 0:
                break
            whole_R = {r: _whole(r, home_E, rep_expert_RS) for r in open_ranks}
            most = min(int(far_R[giver]) - level, _most(far_E, whole_R[giver])[0])
            takers = [r for r in open_ranks if far_R[r] < level]
            possible = {r: min(most, level - int(far_R[r]), _most(near_E, whole_R[r])[0]) for r in takers}
            taker = max(takers, key=lambda r: possible[r], default=-1)
            if taker < 0 or possible[taker] < min_rows:
                break
            rows = possible[taker]
            _put(taker, _least_enough(far_E, rows, whole_R[giver]), rows, rep_expert_RS, rep_rows_RS)
            _put(giver, _least_enough(near_E, rows, whole_R[taker]), rows, rep_expert_RS, rep_rows_RS)
            far_R[giver] -= rows
            far_R[taker] += rows
            is_changed = True
    return is_changed


def _whole(rank: int, home_E: np.ndarray, rep_expert_RS: np.ndarray) -> list[int]:
    """A rank's home experts that have no replica."""
    return [e for e in np.flatnonzero(home_E == rank).tolist() if e not in rep_expert_RS]


def _least_enough(rows_E: np.ndarray, want: int, experts: list[int]) -> int:
    """The expert whose rows just suffice, the first of equals; some do."""
    return min((e for e in experts if rows_E[e] >= want), key=lambda e: rows_E[e])


def _put(rank: int, expert: int, rows: int, rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray) -> None:
    """Give a rank a replica in its first free slot."""
    slot = int(np.flatnonzero(rep_expert_RS[rank] < 0)[0])
    rep_expert_RS[rank, slot], rep_rows_RS[rank, slot] = expert, rows
