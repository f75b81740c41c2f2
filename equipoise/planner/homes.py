"""Search for homes: which experts share a group, a node or a rank of it.

`level` is a tabu search over swaps of two experts. The swap that lowers the sum of squared group loads most is taken,
even where that sum rises; every state is judged by the true objective, the fullest group's rows per rank in every
micro-step plus the price of displaced experts. `polish` then takes single swaps that lower the true objective.

`near` then swaps experts between nodes by what those nodes compute and what crosses between them together: beyond one
node the busiest link often costs more than a few rows on a fuller node.

For `level`, experts are kept sorted by group ("positions", P), so that the scan for the best swap is one contiguous
add-and-min per row, and all tables are updated in O(experts) after a swap. Integers only; ties by expert id.
`tests/planner/reference.py` specifies all three functions in plain Python.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled

BIG = np.int64(2**62)


@compiled
def level(
    load_EM: np.ndarray,
    share_EM: np.ndarray,
    group_E: np.ndarray,
    ranks_G: np.ndarray,
    weight_M: np.ndarray,
    cost_EG: np.ndarray,
    affinity_EE: np.ndarray,
    owner_E: np.ndarray,
    budget: int,
    patience: int,
    max_checks: int,
) -> np.ndarray:
    """Swap experts between groups to level them in every micro-step. See `reference.level`."""
    experts, groups = len(share_EM), len(ranks_G)
    order = np.argsort(group_E, kind="mergesort")
    start_G = np.searchsorted(group_E[order], np.arange(groups + 1))
    common = common_multiple(ranks_G)
    weight_G = common // ranks_G
    rows_GM, cost, away = _state(group_E, load_EM, groups, cost_EG, owner_E)
    dot_EE, swap_gain_PP, square_P, pull_GP = _tables(share_EM, affinity_EE, order, start_G, weight_G)
    best, since, swap = BIG, 0, 0
    best_order, best_rows_GM, best_away = order.copy(), rows_GM.copy(), away
    tabu_P, edge_P = np.zeros(experts, dtype=np.int64), np.zeros(experts, dtype=np.int64)
    tenure = min(10, experts // 8 + 1)
    while True:
        value = cost + busiest(rows_GM, weight_G, common, weight_M)
        if value < best and away <= budget:
            best, since, best_away = value, 0, away
            best_order[:] = order
            best_rows_GM[:] = rows_GM
        elif since >= patience:
            break
        else:
            since += 1
        p, q, change = _best_swap(start_G, pull_GP, swap_gain_PP, square_P, tabu_P, swap, order, edge_P)
        if p < 0:
            if tabu_P.max() <= swap:
                break
            # All experts that could be swapped rest: wait.
            swap += 1
            continue
        a, b = group_of(start_G, p), group_of(start_G, q)
        e, f = order[p], order[q]
        _move_rows(rows_GM, load_EM, e, f, a, b)
        _move_pull(pull_GP, dot_EE, order, weight_G, e, f, a, b)
        cost += cost_EG[e, b] - cost_EG[e, a] + cost_EG[f, a] - cost_EG[f, b]
        away += more_away(owner_E, e, f, a, b)
        _swap_positions(order, tabu_P, square_P, swap_gain_PP, pull_GP, p, q)
        swap += 1
        if change >= 0:
            # An uphill swap is kept from being undone at once.
            low, high = (q, p) if e < f else (p, q)
            tabu_P[low], tabu_P[high] = rests(swap, tenure)
    result = _groups_of(best_order, start_G)
    polished = result.copy()
    work_GM = best_rows_GM * weight_M * weight_G.reshape(-1, 1)
    room = budget - best_away
    polish(load_EM * weight_M, polished, work_GM, weight_G, common * cost_EG, owner_E, room, max_checks)
    rows_GM, cost, away = _state(polished, load_EM, groups, cost_EG, owner_E)
    return polished if cost + busiest(rows_GM, weight_G, common, weight_M) < best else result


@compiled
def _state(
    group_E: np.ndarray, load_EM: np.ndarray, groups: int, cost_EG: np.ndarray, owner_E: np.ndarray
) -> tuple[np.ndarray, int, int]:
    """[G, M] rows of each group, the experts' prices together, and how many are away from their owner's group."""
    rows_GM = np.zeros((groups, load_EM.shape[1]), dtype=np.int64)
    cost, away = np.int64(0), np.int64(0)
    for e in range(len(group_E)):
        rows_GM[group_E[e]] += load_EM[e]
        cost += cost_EG[e, group_E[e]]
        away += group_E[e] != owner_E[e]
    return rows_GM, cost, away


@compiled
def _move_rows(rows_GM: np.ndarray, load_EM: np.ndarray, e: int, f: int, a: int, b: int) -> None:
    """Move expert e from group a to b, and f from b to a."""
    for m in range(rows_GM.shape[1]):
        d = load_EM[f, m] - load_EM[e, m]
        rows_GM[a, m] += d
        rows_GM[b, m] -= d


@compiled
def _move_pull(
    pull_GP: np.ndarray,
    dot_EE: np.ndarray,
    order: np.ndarray,
    weight_G: np.ndarray,
    e: int,
    f: int,
    a: int,
    b: int,
) -> None:
    """The same for the products of every position with the two groups' sums."""
    for i in range(len(order)):
        d = dot_EE[f, order[i]] - dot_EE[e, order[i]]
        pull_GP[a, i] += weight_G[a] * d
        pull_GP[b, i] -= weight_G[b] * d


@compiled
def _groups_of(order: np.ndarray, start_G: np.ndarray) -> np.ndarray:
    """[E] group of each expert, from experts by position."""
    group_E = np.empty(len(order), dtype=np.int64)
    for g in range(len(start_G) - 1):
        for p in range(start_G[g], start_G[g + 1]):
            group_E[order[p]] = g
    return group_E


@compiled
def rests(swap: int, tenure: int) -> tuple[int, int]:
    """Until which swap the lower and the higher expert of a pair rest. See `reference.rests`."""
    least = swap + 1 + tenure // 2
    return least + swap * 40503 % 65537 % (2 * tenure), least + swap * 30011 % 65537 % (2 * tenure + 3)


@compiled
def more_away(owner_E: np.ndarray, e: int, f: int, a: int, b: int) -> int:
    """How many more experts are away from their owner's group once e moves from a to b and f from b to a."""
    leave = int(owner_E[e] == a) + int(owner_E[f] == b)
    return leave - int(owner_E[e] == b) - int(owner_E[f] == a)


@compiled
def common_multiple(ranks_G: np.ndarray) -> int:
    """The least number that every group's ranks divide: groups of unlike sizes are compared in such parts of a row."""
    common = np.int64(1)
    for ranks in ranks_G:
        common = np.lcm(common, ranks)
    return common


@compiled
def busiest(rows_GM: np.ndarray, weight_G: np.ndarray, common: int, weight_M: np.ndarray) -> int:
    """Weighted sum over micro-steps of the fullest group's rows per rank, rounded up.

    A group's rows count `weight_G` times (`common` over its ranks), so that one division per micro-step is enough.
    """
    total = np.int64(0)
    for m in range(rows_GM.shape[1]):
        top = np.int64(0)
        for g in range(len(weight_G)):
            top = max(top, weight_G[g] * rows_GM[g, m])
        total += weight_M[m] * ((top + common - 1) // common)
    return total


@compiled
def _tables(
    share_EM: np.ndarray, affinity_EE: np.ndarray, order: np.ndarray, start_G: np.ndarray, weight_G: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inner products by expert; by position what a swap adds by itself, in two parts, and products with group sums.

    Swapping positions p and q adds `swap_gain_PP[p, q] + square_P[p] + square_P[q]` beside what the groups pull.
    """
    experts, micro_steps = share_EM.shape
    dot_EE = affinity_EE.copy()
    for e in range(experts):
        for f in range(e, experts):
            s = np.int64(0)
            for m in range(micro_steps):
                s += share_EM[e, m] * share_EM[f, m]
            dot_EE[e, f] += s
            if e != f:
                dot_EE[f, e] += s
    top_weight = weight_G.max()
    swap_gain_PP, square_P = np.zeros((experts, experts), dtype=np.int64), np.zeros(experts, dtype=np.int64)
    for p in range(experts):
        square_P[p] = top_weight * dot_EE[order[p], order[p]]
        for q in range(experts):
            swap_gain_PP[p, q] = -2 * top_weight * dot_EE[order[p], order[q]]
    pull_GP = np.zeros((len(weight_G), experts), dtype=np.int64)
    for g in range(len(weight_G)):
        for q in range(start_G[g], start_G[g + 1]):
            for p in range(experts):
                pull_GP[g, p] += weight_G[g] * dot_EE[order[q], order[p]]
    return dot_EE, swap_gain_PP, square_P, pull_GP


@compiled
def _best_swap(
    start_G: np.ndarray,
    pull_GP: np.ndarray,
    swap_gain_PP: np.ndarray,
    square_P: np.ndarray,
    tabu_P: np.ndarray,
    swap: int,
    order: np.ndarray,
    edge_P: np.ndarray,
) -> tuple[int, int, int]:
    """The allowed pair of positions whose swap lowers the sum of squares most, and the change; -1, -1, BIG if none."""
    groups = len(start_G) - 1
    least, p0, q0 = BIG, -1, -1
    for a in range(groups - 1):
        for b in range(a + 1, groups):
            for q in range(start_G[b], start_G[b + 1]):
                edge_P[q] = BIG if tabu_P[q] > swap else pull_GP[a, q] - pull_GP[b, q] + square_P[q]
        for p in range(start_G[a], start_G[a + 1]):
            if tabu_P[p] > swap:
                continue
            for b in range(a + 1, groups):
                lo, hi = start_G[b], start_G[b + 1]
                # Counted from 0 an index cannot be negative, and only then is this loop vectorized.
                edge_Q, gain_Q = edge_P[lo:hi], swap_gain_PP[p, lo:hi]
                constant = pull_GP[b, p] - pull_GP[a, p] + square_P[p]
                small = BIG
                for i in range(len(edge_Q)):
                    small = min(small, edge_Q[i] + gain_Q[i])
                if small >= BIG // 2 or small + constant > least:
                    continue
                for i in range(len(edge_Q)):
                    if edge_Q[i] + gain_Q[i] == small and (
                        small + constant < least or _before(order[p], order[lo + i], order[p0], order[q0])
                    ):
                        least, p0, q0 = small + constant, p, lo + i
    return p0, q0, least


@compiled
def polish(
    work_EM: np.ndarray,
    group_E: np.ndarray,
    work_GM: np.ndarray,
    weight_G: np.ndarray,
    cost_EG: np.ndarray,
    owner_E: np.ndarray,
    room: int,
    max_checks: int,
) -> None:
    """Take the first swap that lowers the sum of the fullest groups, again and again. See `reference.polish`.

    Works on weighted rows (`work_EM`; `work_GM` with each group's weight), not rounded up: no division in the loop.
    """
    experts, micro_steps = work_EM.shape
    groups = len(weight_G)
    rest_M = np.zeros(micro_steps, dtype=np.int64)
    checks, quiet = 0, 0
    pairs = groups * (groups - 1) // 2
    while quiet < pairs and checks < max_checks:
        for a in range(groups - 1):
            for b in range(a + 1, groups):
                improved = False
                now = _fullest_but(work_GM, a, b, rest_M)
                for e in range(experts):
                    if group_E[e] != a:
                        continue
                    for f in range(experts):
                        if group_E[f] != b or checks >= max_checks:
                            continue
                        checks += 1
                        more = cost_EG[e, b] - cost_EG[e, a] + cost_EG[f, a] - cost_EG[f, b]
                        value = more + _after_swap(work_EM, work_GM, rest_M, weight_G, e, f, a, b)
                        if value < now and more_away(owner_E, e, f, a, b) <= room:
                            now = value - more
                            room -= more_away(owner_E, e, f, a, b)
                            work_GM[a] += weight_G[a] * (work_EM[f] - work_EM[e])
                            work_GM[b] -= weight_G[b] * (work_EM[f] - work_EM[e])
                            group_E[e], group_E[f] = b, a
                            improved = True
                            break
                quiet = 0 if improved else quiet + 1


@compiled
def _after_swap(
    work_EM: np.ndarray,
    work_GM: np.ndarray,
    rest_M: np.ndarray,
    weight_G: np.ndarray,
    e: int,
    f: int,
    a: int,
    b: int,
) -> int:
    """Sum over micro-steps of the fullest group once e moves from a to b and f from b to a."""
    value = np.int64(0)
    if weight_G[a] == 1 and weight_G[b] == 1:
        for m in range(len(rest_M)):
            d = work_EM[f, m] - work_EM[e, m]
            value += max(rest_M[m], max(work_GM[a, m] + d, work_GM[b, m] - d))
        return value
    for m in range(len(rest_M)):
        d = work_EM[f, m] - work_EM[e, m]
        value += max(rest_M[m], max(work_GM[a, m] + weight_G[a] * d, work_GM[b, m] - weight_G[b] * d))
    return value


@compiled
def _fullest_but(work_GM: np.ndarray, a: int, b: int, rest_M: np.ndarray) -> int:
    """Fill `rest_M` with the fullest group but a and b; return the sum over micro-steps of the fullest of all."""
    total = np.int64(0)
    for m in range(work_GM.shape[1]):
        rest_M[m] = 0
        for g in range(len(work_GM)):
            if g not in (a, b):
                rest_M[m] = max(rest_M[m], work_GM[g, m])
        total += max(rest_M[m], max(work_GM[a, m], work_GM[b, m]))
    return total


@compiled
def _before(e: int, f: int, e0: int, f0: int) -> bool:
    """Whether the pair {e, f} is before {e0, f0}, the smaller id first."""
    low, high = min(e, f), max(e, f)
    low0, high0 = min(e0, f0), max(e0, f0)
    return low < low0 or (low == low0 and high < high0)


@compiled
def group_of(start_G: np.ndarray, position: int) -> int:
    """The group whose positions hold `position`."""
    g = 0
    while start_G[g + 1] <= position:
        g += 1
    return g


@compiled
def _swap_positions(
    order: np.ndarray,
    tabu_P: np.ndarray,
    square_P: np.ndarray,
    swap_gain_PP: np.ndarray,
    pull_GP: np.ndarray,
    p: int,
    q: int,
) -> None:
    """Exchange two experts in every table by position."""
    order[p], order[q] = order[q], order[p]
    tabu_P[p], tabu_P[q] = tabu_P[q], tabu_P[p]
    square_P[p], square_P[q] = square_P[q], square_P[p]
    for g in range(pull_GP.shape[0]):
        pull_GP[g, p], pull_GP[g, q] = pull_GP[g, q], pull_GP[g, p]
    for i in range(len(order)):
        swap_gain_PP[p, i], swap_gain_PP[q, i] = swap_gain_PP[q, i], swap_gain_PP[p, i]
    for i in range(len(order)):
        swap_gain_PP[i, p], swap_gain_PP[i, q] = swap_gain_PP[i, q], swap_gain_PP[i, p]


class NodeRows(NamedTuple):
    """Rows of nodes and links for the homes at hand, kept up to date by `near`; ranks in the order of their nodes."""

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
    across_MN: np.ndarray
    """[M, N] of these, rows from other nodes."""


class OtherNodes(NamedTuple):
    """What a swap between two nodes does not change."""

    top_M2: np.ndarray
    """[M, 2] the fullest of the other nodes, and the busiest of their links."""
    floor_M: np.ndarray
    """[M + 1] the value of these alone, from each micro-step on."""


@compiled
def near(
    load_MRE: np.ndarray,
    group_E: np.ndarray,
    node_R: np.ndarray,
    cost_EN: np.ndarray,
    owner_E: np.ndarray,
    turn_E: np.ndarray,
    weights: tuple[int, int],
    budget: int,
    max_checks: int,
    most_steps: int,
) -> np.ndarray:
    """Swap experts between nodes as long as fuller nodes cost less than what crosses. See `reference.near`."""
    # Ranks node by node, so that a swap reads four short runs.
    micro_steps, ranks, experts = load_MRE.shape
    order, stride = np.argsort(node_R, kind="mergesort"), (micro_steps + most_steps - 1) // most_steps
    start_N = np.searchsorted(node_R[order], np.arange(node_R.max() + 2))
    micro_steps = (micro_steps + stride - 1) // stride
    load_EMR = np.empty((experts, micro_steps, ranks), dtype=np.int64)
    for m in range(micro_steps):
        # One micro-step fits in the cache: it is read down its columns, and written in runs.
        load_RE = load_MRE[m * stride]
        for e in range(experts):
            for i in range(ranks):
                load_EMR[e, m, i] = load_RE[order[i], e]
    group_E, nodes = group_E.copy(), len(start_N) - 1
    rows = _node_rows(load_EMR, group_E, start_N)
    others = OtherNodes(np.zeros((micro_steps, 2), dtype=np.int64), np.zeros(micro_steps + 1, dtype=np.int64))
    room = budget - (group_E != owner_E).sum()
    checks, quiet, pairs = 0, 0, nodes * (nodes - 1) // 2
    while quiet < pairs and checks < max_checks:
        for a in range(nodes - 1):
            for b in range(a + 1, nodes):
                improved = False
                now = _fill_others(rows, a, b, weights, others)
                for e in turn_E:
                    if group_E[e] != a:
                        continue
                    for f in turn_E:
                        if group_E[f] != b or checks >= max_checks:
                            continue
                        checks += 1
                        more = rows.common * (cost_EN[e, b] - cost_EN[e, a] + cost_EN[f, a] - cost_EN[f, b])
                        value = more + _burden_after_swap(load_EMR, rows, e, f, a, b, weights, others, now - more)
                        if value < now and more_away(owner_E, e, f, a, b) <= room:
                            now = value - more
                            room -= more_away(owner_E, e, f, a, b)
                            _swap_nodes(load_EMR, rows, e, f, a, b)
                            group_E[e], group_E[f] = b, a
                            improved = True
                            break
                quiet = 0 if improved else quiet + 1
    return group_E


@compiled
def _node_rows(load_EMR: np.ndarray, group_E: np.ndarray, start_N: np.ndarray) -> NodeRows:
    """Count the rows of nodes and links."""
    experts, micro_steps, ranks = load_EMR.shape
    nodes = len(start_N) - 1
    total_EM = np.zeros((experts, micro_steps), dtype=np.int64)
    sent_MR = np.zeros((micro_steps, ranks), dtype=np.int64)
    total_MN = np.zeros((micro_steps, nodes), dtype=np.int64)
    across_MN = np.zeros((micro_steps, nodes), dtype=np.int64)
    for e in range(experts):
        node = group_E[e]
        for m in range(micro_steps):
            rows_R, sent_R = load_EMR[e, m], sent_MR[m]
            total, own = np.int64(0), np.int64(0)
            for r in range(ranks):
                total += rows_R[r]
                sent_R[r] += rows_R[r]
            # What a node's own sources choose stays there.
            for r in range(start_N[node], start_N[node + 1]):
                own += rows_R[r]
                sent_R[r] -= rows_R[r]
            total_EM[e, m] = total
            total_MN[m, node] += total
            across_MN[m, node] += total - own
    common = common_multiple(np.diff(start_N))
    return NodeRows(start_N, common // np.diff(start_N), common, total_EM, sent_MR, total_MN, across_MN)


@compiled
def _fill_others(rows: NodeRows, a: int, b: int, weights: tuple[int, int], others: OtherNodes) -> int:
    """Fill `others` with what nodes other than a and b have; return the value of all nodes."""
    start_N, weight_N, common, _, sent_MR, total_MN, across_MN = rows
    top_M2, floor_M = others
    value = np.int64(0)
    for m in range(len(sent_MR)):
        top_M2[m] = 0
        top, link = np.int64(0), np.int64(0)
        for node in range(len(weight_N)):
            full, busy = weight_N[node] * total_MN[m, node], weight_N[node] * across_MN[m, node]
            for r in range(start_N[node], start_N[node + 1]):
                busy = max(busy, common * sent_MR[m, r])
            top, link = max(top, full), max(link, busy)
            if node not in (a, b):
                top_M2[m, 0], top_M2[m, 1] = max(top_M2[m, 0], full), max(top_M2[m, 1], busy)
        value += weights[0] * top + weights[1] * link
    for m in range(len(sent_MR) - 1, -1, -1):
        floor_M[m] = floor_M[m + 1] + weights[0] * top_M2[m, 0] + weights[1] * top_M2[m, 1]
    return int(value)


@compiled
def _burden_after_swap(
    load_EMR: np.ndarray,
    rows: NodeRows,
    e: int,
    f: int,
    a: int,
    b: int,
    weights: tuple[int, int],
    others: OtherNodes,
    limit: int,
) -> int:
    """The value of all nodes once e moves from a to b and f from b to a; `limit` or more if it is not below `limit`."""
    start_N, weight_N, common, total_EM, sent_MR, total_MN, across_MN = rows
    top_M2, floor_M = others
    value = np.int64(0)
    in_a, in_b = slice(start_N[a], start_N[a + 1]), slice(start_N[b], start_N[b + 1])
    for m in range(len(sent_MR)):
        # Slices are counted from 0, as in `_best_swap`, so that both loops are vectorized.
        sent, more_a, more_b = np.int64(0), np.int64(0), np.int64(0)
        e_X, f_X, sent_X = load_EMR[e, m, in_a], load_EMR[f, m, in_a], sent_MR[m, in_a]
        for i in range(len(sent_X)):
            more = f_X[i] - e_X[i]
            more_a += more
            sent = max(sent, sent_X[i] - more)
        e_X, f_X, sent_X = load_EMR[e, m, in_b], load_EMR[f, m, in_b], sent_MR[m, in_b]
        for i in range(len(sent_X)):
            more = e_X[i] - f_X[i]
            more_b += more
            sent = max(sent, sent_X[i] - more)
        more = total_EM[f, m] - total_EM[e, m]
        top = max(weight_N[a] * (total_MN[m, a] + more), weight_N[b] * (total_MN[m, b] - more))
        link = max(weight_N[a] * (across_MN[m, a] + more - more_a), weight_N[b] * (across_MN[m, b] - more - more_b))
        link = max(link, common * sent)
        value += weights[0] * max(top_M2[m, 0], top) + weights[1] * max(top_M2[m, 1], link)
        # Most swaps are worse, and a few micro-steps are enough to know it.
        if value + floor_M[m + 1] >= limit:
            return int(value + floor_M[m + 1])
    return int(value)


@compiled
def _swap_nodes(load_EMR: np.ndarray, rows: NodeRows, e: int, f: int, a: int, b: int) -> None:
    """Move expert e from node a to b, and f from b to a."""
    start_N, _, _, total_EM, sent_MR, total_MN, across_MN = rows
    for m in range(len(sent_MR)):
        more = total_EM[f, m] - total_EM[e, m]
        total_MN[m, a] += more
        total_MN[m, b] -= more
        across_MN[m, a] += more
        across_MN[m, b] -= more
        for r in range(start_N[a], start_N[a + 1]):
            sent_MR[m, r] -= load_EMR[f, m, r] - load_EMR[e, m, r]
            across_MN[m, a] -= load_EMR[f, m, r] - load_EMR[e, m, r]
        for r in range(start_N[b], start_N[b + 1]):
            sent_MR[m, r] -= load_EMR[e, m, r] - load_EMR[f, m, r]
            across_MN[m, b] -= load_EMR[e, m, r] - load_EMR[f, m, r]
