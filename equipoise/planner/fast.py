"""The planner of one layer, compiled: same decisions as `reference.plan_layer`, bit for bit.

Steps:
1. Candidates for the homes: at their owners; levelled inside nodes; levelled across nodes; both.
2. For each candidate and micro-step: choose replicas (`fill`), price with and without them, keep what is cheaper.
3. Keep the candidate with the least total, edges included.

Integers only, no clock, no randomness. The loops over micro-steps are linear in M.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.kernels import COLUMNS, Holders, home_nodes, kept_permille, price_holders, traffic
from equipoise.cost.model import Tables
from equipoise.planner._fill import fill
from equipoise.planner._level import level


class LayerProblem(NamedTuple):
    """What every layer of a window shares."""

    node_R: np.ndarray
    fill_node_R: np.ndarray
    """[R] the domain replicas may stay in: the node, or 0 for all where they may cross nodes."""
    slots: int
    min_rows: int
    by_skew: int
    """1: minimise the busiest rank's rows; 0: minimise nanoseconds."""
    gated: int
    """1: replicas only where they pay."""
    budget: int
    """Most experts of a layer that may be displaced."""
    patience: int
    """Swaps without improvement before `level` stops."""
    max_checks: int
    """Swaps `polish` may look at."""
    cost_inside: int
    """Price of displacing one expert inside its node, in 1/1024 rows of the busiest rank."""
    cost_across: int
    edge_inside_ns: int
    """Publish and collect of one expert over one link, both edges together."""
    edge_across_ns: int


class LayerPlan(NamedTuple):
    """What one layer's planning decided."""

    home_E: np.ndarray
    rep_expert_MRS: np.ndarray
    """[M, R, S] expert of each replica slot; -1: empty."""
    rep_rows_MRS: np.ndarray
    line_MC: np.ndarray
    """[M, COLUMNS] price line of each micro-step, as chosen."""
    closed_MC: np.ndarray
    """[M, COLUMNS] the same homes without replicas."""
    static_MC: np.ndarray
    """[M, COLUMNS] contiguous homes without replicas."""


@compiled
def plan_layer(
    load_MRE: np.ndarray,
    warm_home_E: np.ndarray,
    pair_EE: np.ndarray,
    problem: LayerProblem,
    tables: Tables,
) -> LayerPlan:
    """Plan one layer of one window. See `reference.plan_layer`.

    Args:
        load_MRE: [M, R, E] rows
        warm_home_E: [E] where the search starts: the previous window's homes, or the owners
        pair_EE: [E, E] tokens that chose both experts, for the price of crossing nodes; empty where not counted
    """
    ranks, experts = load_MRE.shape[1:]
    owner_E = np.arange(experts) // (experts // ranks)
    best = evaluate(load_MRE, owner_E, pair_EE, problem, tables)
    static_MC = best.closed_MC
    if problem.budget > 0 and ranks > 1:
        best_value = value_of(best, load_MRE, owner_E, problem)
        for row_E in candidates(load_MRE, warm_home_E, pair_EE, problem):
            home_E = row_E.copy()
            trial = evaluate(load_MRE, home_E, pair_EE, problem, tables)
            value = value_of(trial, load_MRE, owner_E, problem)
            if value < best_value:
                best, best_value = trial, value
    return LayerPlan(best.home_E, best.rep_expert_MRS, best.rep_rows_MRS, best.line_MC, best.closed_MC, static_MC)


@compiled
def candidates(load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem) -> np.ndarray:
    """[C, E] homes worth pricing. See `reference.candidates`."""
    ranks, experts = load_MRE.shape[1:]
    owner_E = np.arange(experts) // (experts // ranks)
    node_R = problem.node_R
    if (warm_home_E != owner_E).sum() > problem.budget:
        warm_home_E = owner_E
    stays = bool((node_R[warm_home_E] == node_R[owner_E]).all())
    load_EM, share_EM, weight_M = _inputs(load_MRE, problem)
    homes_CE = np.zeros((4, experts), dtype=np.int64)
    count = 0
    if node_R.max() == 0 or (stays and not problem.by_skew):
        homes_CE[0] = level_ranks(load_EM, share_EM, weight_M, warm_home_E, problem)
        count = 1
    if node_R.max() == 0:
        return homes_CE[:1]
    none_EE = np.zeros((experts, experts), dtype=np.int64)
    nodes_E = level_nodes(load_EM, share_EM, weight_M, warm_home_E, none_EE, problem)
    if count == 1:
        homes_CE[1] = nodes_E
        count = 2
    homes_CE[count] = level_ranks(load_EM, share_EM, weight_M, nodes_E, problem)
    count += 1
    if len(pair_EE) > 0 and not problem.by_skew:
        together_E = level_nodes(load_EM, share_EM, weight_M, warm_home_E, affinity(share_EM, pair_EE), problem)
        homes_CE[count] = level_ranks(load_EM, share_EM, weight_M, together_E, problem)
        count += 1
    return homes_CE[:count]


@compiled
def affinity(share_EM: np.ndarray, pair_EE: np.ndarray) -> np.ndarray:
    """[E, E] what co-activation is worth beside level loads: a mean pair counts as 1/64 of a mean product, negative."""
    experts = len(share_EM)
    total_M = share_EM.sum(axis=0)
    mean_product = max(np.int64(1), (total_M * total_M).sum() // (experts * experts))
    pairs = np.int64(0)
    for e in range(experts):
        for f in range(experts):
            pairs += pair_EE[e, f] if e != f else 0
    mean_pair = max(np.int64(1), pairs // max(1, experts * (experts - 1)))
    worth_EE = np.zeros((experts, experts), dtype=np.int64)
    for e in range(experts):
        for f in range(experts):
            if e != f:
                worth_EE[e, f] = -(pair_EE[e, f] * 64 // mean_pair) * (mean_product // 4096)
    return worth_EE


@compiled
def _inputs(load_MRE: np.ndarray, problem: LayerProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows per expert and micro-step, their shares for the sum of squares, and each micro-step's weight."""
    micro_steps, ranks, experts = load_MRE.shape
    load_EM = np.zeros((experts, micro_steps), dtype=np.int64)
    for m in range(micro_steps):
        for r in range(ranks):
            for e in range(experts):
                load_EM[e, m] += load_MRE[m, r, e]
    total_M = np.zeros(micro_steps, dtype=np.int64)
    for e in range(experts):
        total_M += load_EM[e]
    largest = max(np.int64(1), total_M.max())
    share_EM = np.zeros((experts, micro_steps), dtype=np.int64)
    weight_M = np.zeros(micro_steps, dtype=np.int64)
    for m in range(micro_steps):
        whole = max(np.int64(1), total_M[m]) if problem.by_skew else largest
        weight_M[m] = 2**40 // max(np.int64(1), total_M[m] // ranks) if problem.by_skew else 1024
        for e in range(experts):
            share_EM[e, m] = (load_EM[e, m] << 20) // whole
    return load_EM, share_EM, weight_M


@compiled
def level_nodes(
    load_EM: np.ndarray,
    share_EM: np.ndarray,
    weight_M: np.ndarray,
    start_E: np.ndarray,
    affinity_EE: np.ndarray,
    problem: LayerProblem,
) -> np.ndarray:
    """Homes after levelling nodes: an expert that stays in its node keeps its rank, newcomers take the freed slots."""
    node_R = problem.node_R
    experts, ranks = len(start_E), len(node_R)
    nodes = node_R.max() + 1
    owner_E = np.arange(experts) // (experts // ranks)
    ranks_N = np.zeros(nodes, dtype=np.int64)
    for r in range(ranks):
        ranks_N[node_R[r]] += 1
    cost_EN = np.zeros((experts, nodes), dtype=np.int64)
    for e in range(experts):
        for n in range(nodes):
            if n != node_R[owner_E[e]]:
                cost_EN[e, n] = problem.cost_across
    node_E = level(
        load_EM,
        share_EM,
        node_R[start_E],
        ranks_N,
        weight_M,
        cost_EN,
        affinity_EE,
        node_R[owner_E],
        problem.budget,
        problem.patience,
        problem.max_checks,
    )
    return settle_in(node_E, start_E, owner_E, node_R)


@compiled
def settle_in(node_E: np.ndarray, start_E: np.ndarray, owner_E: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """Give every expert a rank of its node: its owner's, else where it was, else the first rank with a free slot."""
    experts, ranks = len(node_E), len(node_R)
    free_R = np.full(ranks, experts // ranks)
    home_E = np.full(experts, -1)
    for wish_E in (owner_E, start_E):
        for e in range(experts):
            r = wish_E[e]
            if home_E[e] < 0 and node_R[r] == node_E[e] and free_R[r] > 0:
                home_E[e] = r
                free_R[r] -= 1
    for e in range(experts):
        if home_E[e] < 0:
            r = 0
            while node_R[r] != node_E[e] or free_R[r] == 0:
                r += 1
            home_E[e] = r
            free_R[r] -= 1
    return home_E


@compiled
def level_ranks(
    load_EM: np.ndarray, share_EM: np.ndarray, weight_M: np.ndarray, start_E: np.ndarray, problem: LayerProblem
) -> np.ndarray:
    """Homes after levelling the ranks inside each node."""
    node_R = problem.node_R
    experts, ranks = len(start_E), len(node_R)
    owner_E = np.arange(experts) // (experts // ranks)
    home_E = start_E.copy()
    away = np.int64(0)
    for e in range(experts):
        away += home_E[e] != owner_E[e]
    for node in range(node_R.max() + 1):
        members = np.flatnonzero(node_R == node)
        here = np.flatnonzero(node_R[start_E] == node)
        index_R = np.full(ranks, -1)
        for i in range(len(members)):
            index_R[members[i]] = i
        count = len(here)
        cost_EG = np.full((count, len(members)), problem.cost_inside)
        away_here = np.int64(0)
        for i in range(count):
            away_here += start_E[here[i]] != owner_E[here[i]]
            if index_R[owner_E[here[i]]] >= 0:
                cost_EG[i, index_R[owner_E[here[i]]]] = 0
            else:
                cost_EG[i] = 0
        group_E = level(
            load_EM[here],
            share_EM[here],
            index_R[start_E[here]],
            np.ones(len(members), dtype=np.int64),
            weight_M,
            cost_EG,
            np.zeros((count, count), dtype=np.int64),
            index_R[owner_E[here]],
            problem.budget - away + away_here,
            problem.patience // 16,
            problem.max_checks // 16,
        )
        for i in range(count):
            home_E[here[i]] = members[group_E[i]]
            away += (home_E[here[i]] != owner_E[here[i]]) - (start_E[here[i]] != owner_E[here[i]])
    return home_E


@compiled
def homes_by_rank(home_E: np.ndarray, ranks: int) -> np.ndarray:
    """[R, H] the experts whose home each rank is, ascending."""
    experts = len(home_E)
    homes_RH = np.zeros((ranks, experts // ranks), dtype=np.int64)
    used_R = np.zeros(ranks, dtype=np.int64)
    for e in range(experts):
        homes_RH[home_E[e], used_R[home_E[e]]] = e
        used_R[home_E[e]] += 1
    return homes_RH


@compiled
def evaluate(
    load_MRE: np.ndarray, home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Replicas and prices of every micro-step for given homes; the gate decides entry by entry."""
    micro_steps, ranks = load_MRE.shape[:2]
    homes_RH = homes_by_rank(home_E, ranks)
    keep_permille_N = kept_permille(problem.node_R[home_E], problem.node_R.max() + 1, pair_EE, tables.top_k)
    expert_MRS = np.full((micro_steps, ranks, problem.slots), -1)
    rows_MRS = np.zeros((micro_steps, ranks, problem.slots), dtype=np.int64)
    line_MC = np.zeros((micro_steps, COLUMNS), dtype=np.int64)
    closed_MC = np.zeros((micro_steps, COLUMNS), dtype=np.int64)
    none_R0 = np.zeros((ranks, 0), dtype=np.int64)
    mask_NE = home_nodes(home_E, problem.node_R)
    for m in range(micro_steps):
        load_RE = load_MRE[m]
        base = traffic(load_RE, home_E, problem.node_R, mask_NE)
        alone = Holders(home_E, problem.node_R, none_R0, none_R0)
        closed = price_holders(load_RE, base, alone, keep_permille_N, tables, False, closed_MC[m])
        line_MC[m] = closed_MC[m]
        if problem.slots == 0:
            continue
        fill(base.total_E, home_E, homes_RH, problem.fill_node_R, problem.min_rows, expert_MRS[m], rows_MRS[m])
        if expert_MRS[m].max() < 0:
            continue
        shared = Holders(home_E, problem.node_R, expert_MRS[m], rows_MRS[m])
        opened = price_holders(load_RE, base, shared, keep_permille_N, tables, False, line_MC[m])
        if problem.gated and opened >= closed:
            line_MC[m] = closed_MC[m]
            expert_MRS[m] = -1
            rows_MRS[m] = 0
    return LayerPlan(home_E, expert_MRS, rows_MRS, line_MC, closed_MC, closed_MC)


@compiled
def value_of(plan: LayerPlan, load_MRE: np.ndarray, owner_E: np.ndarray, problem: LayerProblem) -> int:
    """What is minimised: nanoseconds of all micro-steps and both edges, or weighted rows of the busiest rank."""
    total = np.int64(0)
    for m in range(len(load_MRE)):
        if problem.by_skew:
            total += _busiest_rank(load_MRE[m], plan.home_E, plan.rep_expert_MRS[m], plan.rep_rows_MRS[m])
        else:
            total += plan.line_MC[m, :4].sum()
    if not problem.by_skew:
        total += edges_ns(plan.home_E, owner_E, problem)
    return total


@compiled
def _busiest_rank(load_RE: np.ndarray, home_E: np.ndarray, rep_expert_RS: np.ndarray, rep_rows_RS: np.ndarray) -> int:
    """The busiest rank's rows over the mean, in 2^-40."""
    ranks, experts = load_RE.shape
    rows_R = np.zeros(ranks, dtype=np.int64)
    total = np.int64(0)
    for s in range(ranks):
        for e in range(experts):
            rows_R[home_E[e]] += load_RE[s, e]
            total += load_RE[s, e]
    for r in range(ranks):
        for j in range(rep_expert_RS.shape[1]):
            if rep_expert_RS[r, j] >= 0:
                rows_R[r] += rep_rows_RS[r, j]
                rows_R[home_E[rep_expert_RS[r, j]]] -= rep_rows_RS[r, j]
    return rows_R.max() * (2**40 // max(np.int64(1), total // ranks))


@compiled
def edges_ns(home_E: np.ndarray, owner_E: np.ndarray, problem: LayerProblem) -> int:
    """Publish and collect of one layer by its busiest link, both edges together."""
    ranks = len(problem.node_R)
    link_R4 = np.zeros((ranks, 4), dtype=np.int64)
    for e in range(len(home_E)):
        a, b = owner_E[e], home_E[e]
        if a != b:
            column = 0 if problem.node_R[a] == problem.node_R[b] else 2
            link_R4[a, column] += 1
            link_R4[b, column + 1] += 1
    inside = max(link_R4[:, 0].max(), link_R4[:, 1].max())
    across = max(link_R4[:, 2].max(), link_R4[:, 3].max())
    return max(inside * problem.edge_inside_ns, across * problem.edge_across_ns)
