"""Compiled trades: ranks exchange rows, so that less crosses nodes; `trade_reference.py` specifies them.

Integers only; ties by index. Knows rows. Does not know seconds.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.links import RECEIVED_ACROSS, SENT_ACROSS, Holders, Traffic


class Taken(NamedTuple):
    """What replicas have taken up, before and during trades."""

    used_R: np.ndarray
    """[R] replica slots in use."""
    is_split_E: np.ndarray
    """[E] whether an expert has a replica."""


@compiled
def trade_across(base: Traffic, holders: Holders, homes_RH: np.ndarray, min_rows: int) -> bool:
    """Let ranks of two nodes compute rows of their own node for each other. See `trade_reference.trade_across`."""
    nodes, slots = len(base.node_NE), holders.rep_expert_RS.shape[1]
    node_R, taken = holders.nodes.node_R, _taken(holders)
    # For each node, its sources' most rows of one expert at home on each rank.
    most_NR = np.empty((nodes, len(homes_RH)), dtype=np.int64)
    for node in range(nodes):
        for r in range(len(homes_RH)):
            most_NR[node, r] = _most(base.node_NE[node], taken, homes_RH[r])
    rank_NN = np.empty((nodes, nodes), dtype=np.int64)
    is_changed = False
    while True:
        _find_offers(most_NR, taken, node_R, slots, rank_NN)
        rows, a, b = _largest_trade(most_NR, rank_NN, min_rows)
        if rows < min_rows:
            return is_changed
        p, q = rank_NN[b, a], rank_NN[a, b]
        _put(holders, taken, p, _expert_of_most(base.node_NE[a], taken, homes_RH[q]), rows)
        _put(holders, taken, q, _expert_of_most(base.node_NE[b], taken, homes_RH[p]), rows)
        for node in range(nodes):
            most_NR[node, p] = _most(base.node_NE[node], taken, homes_RH[p])
            most_NR[node, q] = _most(base.node_NE[node], taken, homes_RH[q])
        is_changed = True


@compiled
def _find_offers(most_NR: np.ndarray, taken: Taken, node_R: np.ndarray, slots: int, rank_NN: np.ndarray) -> None:
    """Fill [N, N] with the rank of the second node that has most for the first, of those with a slot left; -1: none."""
    rank_NN[:] = -1
    for r in range(len(node_R)):
        if taken.used_R[r] == slots:
            continue
        for node in range(len(rank_NN)):
            best = rank_NN[node, node_R[r]]
            if node != node_R[r] and (best < 0 or most_NR[node, r] > most_NR[node, best]):
                rank_NN[node, node_R[r]] = r


@compiled
def _largest_trade(most_NR: np.ndarray, rank_NN: np.ndarray, min_rows: int) -> tuple[int, int, int]:
    """Rows of the largest trade of at least `min_rows`, and its two nodes; one row less, -1, -1 if there is none."""
    largest, a0, b0 = min_rows - 1, -1, -1
    for a in range(len(rank_NN)):
        for b in range(a + 1, len(rank_NN)):
            if rank_NN[a, b] >= 0 and rank_NN[b, a] >= 0:
                rows = min(most_NR[a, rank_NN[a, b]], most_NR[b, rank_NN[b, a]])
                if rows > largest:
                    largest, a0, b0 = rows, a, b
    return largest, a0, b0


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
    nodes, slots, taken = holders.nodes, holders.rep_expert_RS.shape[1], _taken(holders)
    near_E, far_E = np.empty_like(base.total_E), np.empty_like(base.total_E)
    for e in range(len(near_E)):
        near_E[e] = base.node_NE[nodes.node_R[holders.home_E[e]], e]
        far_E[e] = base.total_E[e] - near_E[e]
    is_changed = False
    for node in range(len(nodes.start_N) - 1):
        members = nodes.by_node_R[nodes.start_N[node] : nodes.start_N[node + 1]]
        level = max(cap, (far_R[members].sum() + len(members) - 1) // len(members))
        while True:
            giver, taker = _giver_and_taker(far_R, level, members, taken, slots)
            if giver < 0 or taker < 0:
                break
            want = min(far_R[giver] - level, level - far_R[taker])
            gone = _least_enough(far_E, taken, homes_RH[giver], want)
            back = _least_enough(near_E, taken, homes_RH[taker], want)
            if gone < 0 or back < 0 or min(want, min(far_E[gone], near_E[back])) < min_rows:
                break
            rows = min(want, min(far_E[gone], near_E[back]))
            _put(holders, taken, taker, gone, rows)
            _put(holders, taken, giver, back, rows)
            far_R[giver] -= rows
            far_R[taker] += rows
            is_changed = True
    return is_changed


@compiled
def _giver_and_taker(far_R: np.ndarray, level: int, members: np.ndarray, taken: Taken, slots: int) -> tuple[int, int]:
    """The rank furthest above the level and that furthest below, of those with a slot left; -1 where there is none."""
    giver, taker = -1, -1
    for r in members:
        if taken.used_R[r] < slots:
            if far_R[r] > level and (giver < 0 or far_R[r] > far_R[giver]):
                giver = r
            if far_R[r] < level and (taker < 0 or far_R[r] < far_R[taker]):
                taker = r
    return giver, taker


@compiled
def _taken(holders: Holders) -> Taken:
    ranks, slots = holders.rep_expert_RS.shape
    taken = Taken(np.zeros(ranks, dtype=np.int64), np.zeros(len(holders.home_E), dtype=np.bool_))
    for r in range(ranks):
        for j in range(slots):
            e = holders.rep_expert_RS[r, j]
            if e >= 0:
                taken.used_R[r] += 1
                taken.is_split_E[e] = True
    return taken


@compiled
def _put(holders: Holders, taken: Taken, rank: int, expert: int, rows: int) -> None:
    """Give a rank a replica in its first free slot."""
    slot = 0
    while holders.rep_expert_RS[rank, slot] >= 0:
        slot += 1
    holders.rep_expert_RS[rank, slot], holders.rep_rows_RS[rank, slot] = expert, rows
    taken.used_R[rank] += 1
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
    """Its rows; 0 if there is none."""
    expert = _expert_of_most(rows_E, taken, homes_H)
    return int(rows_E[expert]) if expert >= 0 else 0


@compiled
def _least_enough(rows_E: np.ndarray, taken: Taken, homes_H: np.ndarray, want: int) -> int:
    """The expert without a replica whose rows just suffice, else that with the most; -1 if there is none."""
    enough, most = -1, -1
    for e in homes_H:
        if taken.is_split_E[e]:
            continue
        if most < 0 or rows_E[e] > rows_E[most]:
            most = e
        if rows_E[e] >= want and (enough < 0 or rows_E[e] < rows_E[enough]):
            enough = e
    return enough if enough >= 0 else most
