"""Compiled `near`: experts move to the node whose sources choose them. The specification is `reference.near`.

Experts are swapped between nodes as in `_level.polish`, pair of nodes by pair; rows by node and rows that cross are
kept up to date (`Tally`), and a swap is judged by the two nodes it changes.

Integers only; of swaps that lower the value the first is taken, experts in turn (`in_turn`). Knows rows and two
weights. Does not know seconds, slots or replicas.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.planner._level import common_multiple, more_away


class Tally(NamedTuple):
    """Rows as they stand, ranks in the order of their nodes."""

    start_N: np.ndarray
    """[N + 1] where each node's ranks begin."""
    weight_N: np.ndarray
    """[N] parts that one row of a node counts, so that nodes of unlike sizes compare."""
    common: int
    """Parts of a row at one rank."""
    total_EM: np.ndarray
    """[E, M] rows of each expert."""
    sent_MR: np.ndarray
    """[M, R] rows that each source sends to other nodes."""
    total_MN: np.ndarray
    """[M, N] rows for the experts of each node."""
    far_MN: np.ndarray
    """[M, N] of these, rows from other nodes."""


class Rest(NamedTuple):
    """What a swap between two nodes leaves as it is."""

    rest_M2: np.ndarray
    """[M, 2] the fullest of the other nodes, and the busiest of their links."""
    floor_M: np.ndarray
    """[M + 1] what these alone come to, from each micro-step on."""


@compiled
def near(
    load_MRE: np.ndarray,
    group_E: np.ndarray,
    node_R: np.ndarray,
    cost_EN: np.ndarray,
    owner_E: np.ndarray,
    weights: tuple[int, int],
    budget: int,
    max_checks: int,
    most_steps: int,
) -> np.ndarray:
    """Swap experts between nodes as long as fuller nodes cost less than what crosses. See `reference.near`."""
    load_EMR, start_N = _by_expert(load_MRE, node_R, most_steps)
    group_E, nodes, turn_E = group_E.copy(), len(start_N) - 1, in_turn(load_MRE.shape[2], load_MRE.shape[1])
    tally = _tally(load_EMR, group_E, start_N)
    micro_steps = load_EMR.shape[1]
    rest = Rest(np.zeros((micro_steps, 2), dtype=np.int64), np.zeros(micro_steps + 1, dtype=np.int64))
    room = budget - (group_E != owner_E).sum()
    checks, quiet, pairs = 0, 0, nodes * (nodes - 1) // 2
    while quiet < pairs and checks < max_checks:
        for a in range(nodes - 1):
            for b in range(a + 1, nodes):
                improved = False
                now = _fill_rest(tally, a, b, weights, rest)
                for e in turn_E:
                    if group_E[e] != a:
                        continue
                    for f in turn_E:
                        if group_E[f] != b or checks >= max_checks:
                            continue
                        checks += 1
                        more = tally.common * (cost_EN[e, b] - cost_EN[e, a] + cost_EN[f, a] - cost_EN[f, b])
                        value = more + _after_swap(load_EMR, tally, e, f, a, b, weights, rest, now - more)
                        if value < now and more_away(owner_E, e, f, a, b) <= room:
                            now = value - more
                            room -= more_away(owner_E, e, f, a, b)
                            _swap(load_EMR, tally, e, f, a, b)
                            group_E[e], group_E[f] = b, a
                            improved = True
                            break
                quiet = 0 if improved else quiet + 1
    return group_E


@compiled
def in_turn(experts: int, ranks: int) -> np.ndarray:
    """[E] experts in the order in which they are looked at: the first of every owner, then the second, and so on.

    Of experts that serve as well, the first one found is displaced. In turn, these come from different owners, and at a
    window's edges no owner's link has all of them.
    """
    return np.arange(experts).reshape(ranks, experts // ranks).T.copy().reshape(experts)


@compiled
def _by_expert(load_MRE: np.ndarray, node_R: np.ndarray, most_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """[E, M, R] rows of at most `most_steps` micro-steps, ranks node by node, so that a swap reads four short runs.

    Also [N + 1] where each node's ranks begin.
    """
    micro_steps, ranks, experts = load_MRE.shape
    order, stride = np.argsort(node_R, kind="mergesort"), (micro_steps + most_steps - 1) // most_steps
    load_EMR = np.empty((experts, (micro_steps + stride - 1) // stride, ranks), dtype=np.int64)
    for m in range(load_EMR.shape[1]):
        for i in range(ranks):
            load_E = load_MRE[m * stride, order[i]]
            for e in range(experts):
                load_EMR[e, m, i] = load_E[e]
    return load_EMR, np.searchsorted(node_R[order], np.arange(node_R.max() + 2))


@compiled
def far_rows(load_MRE: np.ndarray, node_E: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[E, M] rows of each expert that come from other nodes than its own."""
    micro_steps, ranks, experts = load_MRE.shape
    far_ME = np.zeros((micro_steps, experts), dtype=np.int64)
    for m in range(micro_steps):
        for r in range(ranks):
            for e in range(experts):
                if node_R[r] != node_E[e]:
                    far_ME[m, e] += load_MRE[m, r, e]
    return np.ascontiguousarray(far_ME.T)


@compiled
def _tally(load_EMR: np.ndarray, group_E: np.ndarray, start_N: np.ndarray) -> Tally:
    experts, micro_steps, ranks = load_EMR.shape
    nodes = len(start_N) - 1
    total_EM = np.zeros((experts, micro_steps), dtype=np.int64)
    sent_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    total_MN = np.zeros((micro_steps, nodes), dtype=np.int64)
    far_MN = np.zeros((micro_steps, nodes), dtype=np.int64)
    for e in range(experts):
        node = group_E[e]
        for m in range(micro_steps):
            for r in range(ranks):
                rows = load_EMR[e, m, r]
                total_EM[e, m] += rows
                if not start_N[node] <= r < start_N[node + 1]:
                    sent_MR[m, r] += rows
                    far_MN[m, node] += rows
            total_MN[m, node] += total_EM[e, m]
    common = common_multiple(np.diff(start_N))
    return Tally(start_N, common // np.diff(start_N), common, total_EM, sent_MR, total_MN, far_MN)


@compiled
def _fill_rest(tally: Tally, a: int, b: int, weights: tuple[int, int], rest: Rest) -> int:
    """Fill `rest` with what nodes other than a and b have; return the whole value."""
    start_N, weight_N, common, _, sent_MR, total_MN, far_MN = tally
    rest_M2, floor_M = rest
    value = np.int64(0)
    for m in range(len(sent_MR)):
        rest_M2[m] = 0
        top, link = np.int64(0), np.int64(0)
        for node in range(len(weight_N)):
            full, busy = weight_N[node] * total_MN[m, node], weight_N[node] * far_MN[m, node]
            for r in range(start_N[node], start_N[node + 1]):
                busy = max(busy, common * sent_MR[m, r])
            top, link = max(top, full), max(link, busy)
            if node not in (a, b):
                rest_M2[m, 0], rest_M2[m, 1] = max(rest_M2[m, 0], full), max(rest_M2[m, 1], busy)
        value += weights[0] * top + weights[1] * link
    for m in range(len(sent_MR) - 1, -1, -1):
        floor_M[m] = floor_M[m + 1] + weights[0] * rest_M2[m, 0] + weights[1] * rest_M2[m, 1]
    return int(value)


@compiled
def _after_swap(
    load_EMR: np.ndarray,
    tally: Tally,
    e: int,
    f: int,
    a: int,
    b: int,
    weights: tuple[int, int],
    rest: Rest,
    limit: int,
) -> int:
    """The whole value once expert e leaves node a for b and f comes back; no less than `limit` if it is not below."""
    start_N, weight_N, common, total_EM, sent_MR, total_MN, far_MN = tally
    rest_M2, floor_M = rest
    value = np.int64(0)
    for m in range(len(sent_MR)):
        sent, more_a, more_b = np.int64(0), np.int64(0), np.int64(0)
        for r in range(start_N[a], start_N[a + 1]):
            more = load_EMR[f, m, r] - load_EMR[e, m, r]
            more_a += more
            sent = max(sent, sent_MR[m, r] - more)
        for r in range(start_N[b], start_N[b + 1]):
            more = load_EMR[e, m, r] - load_EMR[f, m, r]
            more_b += more
            sent = max(sent, sent_MR[m, r] - more)
        more = total_EM[f, m] - total_EM[e, m]
        top = max(weight_N[a] * (total_MN[m, a] + more), weight_N[b] * (total_MN[m, b] - more))
        link = max(weight_N[a] * (far_MN[m, a] + more - more_a), weight_N[b] * (far_MN[m, b] - more - more_b))
        link = max(link, common * sent)
        value += weights[0] * max(rest_M2[m, 0], top) + weights[1] * max(rest_M2[m, 1], link)
        if value + floor_M[m + 1] >= limit:
            return int(value + floor_M[m + 1])
    return int(value)


@compiled
def _swap(load_EMR: np.ndarray, tally: Tally, e: int, f: int, a: int, b: int) -> None:
    """Expert e leaves node a for b, and f comes back."""
    start_N, _, _, total_EM, sent_MR, total_MN, far_MN = tally
    for m in range(len(sent_MR)):
        more = total_EM[f, m] - total_EM[e, m]
        total_MN[m, a] += more
        total_MN[m, b] -= more
        far_MN[m, a] += more
        far_MN[m, b] -= more
        for r in range(start_N[a], start_N[a + 1]):
            sent_MR[m, r] -= load_EMR[f, m, r] - load_EMR[e, m, r]
            far_MN[m, a] -= load_EMR[f, m, r] - load_EMR[e, m, r]
        for r in range(start_N[b], start_N[b + 1]):
            sent_MR[m, r] -= load_EMR[e, m, r] - load_EMR[f, m, r]
            far_MN[m, b] -= load_EMR[e, m, r] - load_EMR[f, m, r]
