"""Compiled trades: ranks exchange rows, so that less crosses nodes; `trade_reference.py` specifies them.

Integers only; ties by index. Knows rows. Does not know seconds.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.links import RECEIVED_ACROSS, SENT_ACROSS, Holders, Traffic


class Taken(NamedTuple):
    """What replicas have taken up, and left."""

    free_R: np.ndarray
    """[R] replica slots that are left."""
    is_split_E: np.ndarray
    """[E] whether an expert has a replica."""


@compiled
def trade_across(
    load_RE: np.ndarray, base: Traffic, holders: Holders, homes_RH: np.ndarray, link_R4: np.ndarray, min_rows: int
) -> bool:
    """Let ranks of two nodes compute rows of their own node for each other. See `trade_reference.trade_across`.

    Args:
        link_R4: [R, 4] rows on each rank's links, as settled with these holders
    """
    node_R, node_NE, taken = holders.nodes.node_R, base.node_NE, _taken(holders)
    received_R, sent_R = link_R4[:, RECEIVED_ACROSS].copy(), link_R4[:, SENT_ACROSS].copy()
    # For each node, its sources' most rows of one expert at home on each rank.
    most_NR = np.empty((len(node_NE), len(node_R)), dtype=np.int64)
    for r in range(len(node_R)):
        _find_most(most_NR, r, node_NE, taken, homes_RH)
    is_changed = False
    while True:
        receiver, sender = received_R.argmax(), sent_R.argmax()
        is_sent = sent_R[sender] > received_R[receiver]
        rank = sender if is_sent else receiver
        p, q, gone = _best_trade(load_RE, node_NE, node_R, homes_RH, taken, most_NR, rank, is_sent, min_rows)
        if p < 0:
            return is_changed
        back = _expert_of_most(node_NE[node_R[q]], taken, homes_RH[p])
        rows = min(node_NE[node_R[p], gone], node_NE[node_R[q], back])
        _put(holders, taken, p, gone, rows)
        _put(holders, taken, q, back, rows)
        received_R[p] -= rows
        received_R[q] -= rows
        for r in range(len(node_R)):
            if node_R[r] == node_R[p]:
                sent_R[r] -= _part(load_RE[r, gone], rows, node_NE[node_R[r], gone])
            elif node_R[r] == node_R[q]:
                sent_R[r] -= _part(load_RE[r, back], rows, node_NE[node_R[r], back])
        _find_most(most_NR, p, node_NE, taken, homes_RH)
        _find_most(most_NR, q, node_NE, taken, homes_RH)
        is_changed = True


@compiled
def _best_trade(
    load_RE: np.ndarray,
    node_NE: np.ndarray,
    node_R: np.ndarray,
    homes_RH: np.ndarray,
    taken: Taken,
    most_NR: np.ndarray,
    rank: int,
    is_sent: bool,
    min_rows: int,
) -> tuple[int, int, int]:
    """The trade that takes most off what a rank sends, or receives: a rank of its node, one of another, its expert.

    -1, -1, -1 if none takes any.
    """
    node, partner_N = node_R[rank], np.full(len(node_NE), -1)
    for r in range(len(node_R)):
        if node_R[r] == node and taken.free_R[r] > 0 and (is_sent or r == rank):
            for b in range(len(partner_N)):
                if partner_N[b] < 0 or most_NR[b, r] > most_NR[b, partner_N[b]]:
                    partner_N[b] = r
    best, p, q, expert = np.int64(0), -1, -1, -1
    for r in range(len(node_R)):
        partner = partner_N[node_R[r]]
        if node_R[r] == node or partner < 0 or taken.free_R[r] == 0:
            continue
        for e in homes_RH[r]:
            rows = min(node_NE[node, e], most_NR[node_R[r], partner])
            if taken.is_split_E[e] or rows < min_rows:
                continue
            less = _part(load_RE[rank, e], rows, node_NE[node, e]) if is_sent else rows
            if less > best:
                best, p, q, expert = less, partner, r, e
    return p, q, expert


@compiled
def _part(chosen: int, rows: int, whole: int) -> int:
    """`chosen` times `rows` over `whole`, in 64 bits; see `trade_reference.part`."""
    shift = 0
    while (whole >> shift) >= 2**31:
        shift += 1
    return chosen * (rows >> shift) // (whole >> shift)


@compiled
def _find_most(most_NR: np.ndarray, rank: int, node_NE: np.ndarray, taken: Taken, homes_RH: np.ndarray) -> None:
    """Fill a rank's column: the most rows that each node has of one of its experts without a replica; 0 if none."""
    for node in range(len(node_NE)):
        most_NR[node, rank] = _most(node_NE[node], taken, homes_RH[rank])


@compiled
def trade_inside(base: Traffic, holders: Holders, homes_RH: np.ndarray, link_R4: np.ndarray, min_rows: int) -> bool:
    """Let ranks of a node exchange rows from afar for rows from near. See `trade_reference.trade_inside`.

    Args:
        link_R4: [R, 4] rows on each rank's links, as settled with these holders
    """
    cap = link_R4[:, SENT_ACROSS].max()
    if link_R4[:, RECEIVED_ACROSS].max() <= cap:
        return False
    far_R = link_R4[:, RECEIVED_ACROSS].copy()
    nodes, taken = holders.nodes, _taken(holders)
    near_E, far_E = np.empty_like(base.total_E), np.empty_like(base.total_E)
    for e in range(len(near_E)):
        near_E[e] = base.node_NE[nodes.node_R[holders.home_E[e]], e]
        far_E[e] = base.total_E[e] - near_E[e]
    is_changed = False
    for node in range(len(nodes.start_N) - 1):
        members = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        level = max(cap, (far_R[members].sum() + len(members) - 1) // len(members))
        while True:
            giver, taker, rows = _best_pair(far_R, near_E, far_E, level, members, taken, homes_RH)
            if rows < min_rows:
                break
            gone = _least_enough(far_E, taken, homes_RH[giver], rows)
            back = _least_enough(near_E, taken, homes_RH[taker], rows)
            _put(holders, taken, taker, gone, rows)
            _put(holders, taken, giver, back, rows)
            far_R[giver] -= rows
            far_R[taker] += rows
            is_changed = True
    return is_changed


@compiled
def _best_pair(
    far_R: np.ndarray,
    near_E: np.ndarray,
    far_E: np.ndarray,
    level: int,
    members: np.ndarray,
    taken: Taken,
    homes_RH: np.ndarray,
) -> tuple[int, int, int]:
    """The rank furthest above the level, the one that can trade most rows with it, and how many; -1, -1, 0 if none."""
    giver, taker, rows = -1, -1, 0
    for r in members:
        if taken.free_R[r] > 0 and far_R[r] > level and (giver < 0 or far_R[r] > far_R[giver]):
            giver = r
    if giver < 0:
        return giver, taker, rows
    most = min(far_R[giver] - level, _most(far_E, taken, homes_RH[giver]))
    for r in members:
        if taken.free_R[r] > 0 and far_R[r] < level:
            possible = min(most, min(level - far_R[r], _most(near_E, taken, homes_RH[r])))
            if possible > rows:
                taker, rows = r, int(possible)
    return giver, taker, rows


@compiled
def _taken(holders: Holders) -> Taken:
    ranks, slots = holders.rep_expert_RS.shape
    taken = Taken(np.full(ranks, slots), np.zeros(len(holders.home_E), dtype=np.bool_))
    for r in range(ranks):
        for j in range(slots):
            e = holders.rep_expert_RS[r, j]
            if e >= 0:
                taken.free_R[r] -= 1
                taken.is_split_E[e] = True
    return taken


@compiled
def _put(holders: Holders, taken: Taken, rank: int, expert: int, rows: int) -> None:
    """Give a rank a replica in its first free slot."""
    slot = 0
    while holders.rep_expert_RS[rank, slot] >= 0:
        slot += 1
    holders.rep_expert_RS[rank, slot], holders.rep_rows_RS[rank, slot] = expert, rows
    taken.free_R[rank] -= 1
    taken.is_split_E[expert] = True


@compiled
def _expert_of_most(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray) -> int:
    """The expert without a replica that has the most rows, the first of equals; -1 if there is none."""
    most = -1
    for e in homes_H:
        if not taken.is_split_E[e] and (most < 0 or rows_E[e] > rows_E[most]):
            most = e
    return most


@compiled
def _most(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray) -> int:
    """The most rows of one expert without a replica; 0 if there is none."""
    expert = _expert_of_most(rows_E, taken, homes_H)
    return int(rows_E[expert]) if expert >= 0 else 0


@compiled
def _least_enough(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray, want: int) -> int:
    """The expert without a replica whose rows just suffice, the first of equals; -1 if there is none."""
    enough = -1
    for e in homes_H:
        if not taken.is_split_E[e] and rows_E[e] >= want and (enough < 0 or rows_E[e] < rows_E[enough]):
            enough = e
    return enough
