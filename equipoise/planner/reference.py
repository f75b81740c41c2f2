"""The specification of the planner: one layer of one window, short and plain, never optimised.

`fast.py` and `_level.py` do the same in compiled loops, under the same names, bit for bit. All decisions
are made in integers and every tie is broken by index, so that each rank and CPU finds the same plan.

The problem. In micro-step m, source rank s has `load_MRE[m, s, e]` rows for expert e. Each expert has one *home* rank
for the whole window; in each micro-step some experts also get *replicas*. A layer takes as long as its busiest rank.

The way, in the order of the functions below:
1. `plan_layer` tries a few placements of homes (`candidates`), works out replicas and prices for each (`evaluate`),
   and keeps the one with the least total, publish and collect included (`value_of`). Homes at their owners are always
   tried first, so a plan never loses to doing nothing.
2. `candidates` levels twice. Replicas stay inside a node, so first the *nodes* must be level in every micro-step
   (`level_nodes`), then the ranks inside each node (`level_ranks`). Both are one problem: put experts into *groups*.
3. `level` solves it by tabu search. It always takes the swap of two experts that lowers the sum over micro-steps and
   groups of squared load most, even if that raises it; after a swap that did not lower it, the two experts rest for a
   while, so that the search leaves the valley it is in. The sum of squares only guides. What counts is the true
   objective, `busiest`: the fullest group's rows per rank, rounded up, weighted and summed over micro-steps, plus the
   price of displacing experts. It is judged at every state visited, and the best state wins.
4. `polish` then looks at swaps by the true objective alone and takes each that lowers it.
5. `fill` (`fill_reference.py`) chooses the replicas of one micro-step like an alias table: the emptiest rank of a node
   is brought up to the bound from one expert of the fullest rank, until no rank is above the bound.

Knows rows, and prices through `cost.reference`. Does not know windows, slots in memory or itineraries.

Invariants (asserted by the tests):
1. The compiled planner returns exactly what this one does.
2. No more than `budget` experts of a layer are displaced, and each rank keeps its number of homes.
"""

import numpy as np

from equipoise.cost.kernels import COLUMNS
from equipoise.cost.model import Tables
from equipoise.cost.reference import kept_permille, price, quotas
from equipoise.planner.fast import LayerPlan, LayerProblem
from equipoise.planner.fill_reference import fill


def plan_layer(
    load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Plan one layer of one window.

    Args:
        load_MRE: [M, R, E] rows
        warm_home_E: [E] where the search starts: the previous window's homes, or the owners
        pair_EE: [E, E] tokens that chose both experts, for the price of crossing nodes; empty where not counted
        problem: what all layers share
        tables: prices
    """
    ranks, experts = load_MRE.shape[1:]
    owner_E = owners(experts, ranks)
    best = evaluate(load_MRE, owner_E, pair_EE, problem, tables)
    static_MC = best.closed_MC
    if problem.budget > 0 and ranks > 1:
        trials = [best]
        for home_E in candidates(load_MRE, warm_home_E, pair_EE, problem):
            trials.append(evaluate(load_MRE, home_E, pair_EE, problem, tables))
        # Of equal ones the first.
        best = min(trials, key=lambda trial: value_of(trial, load_MRE, owner_E, problem))
    return best._replace(static_MC=static_MC)


def owners(experts: int, ranks: int) -> np.ndarray:
    """[E] owner of each expert: contiguous, as in static expert parallelism."""
    owner_E: np.ndarray = np.arange(experts) // (experts // ranks)
    return owner_E


def candidates(load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem) -> np.ndarray:
    """[C, E] homes worth pricing: levelled inside nodes; across them; both; both with co-active experts together.

    The first two save displacements. They are left out for skew, where displacements are free, and where the search
    starts from homes that already cross nodes: what paid in the window before is not put in question again.
    """
    ranks, experts = load_MRE.shape[1:]
    owner_E, node_R = owners(experts, ranks), problem.node_R
    if (warm_home_E != owner_E).sum() > problem.budget:
        warm_home_E = owner_E
    stays = bool((node_R[warm_home_E] == node_R[owner_E]).all())
    inputs = load_EM, share_EM, weight_M = search_inputs(load_MRE, problem)
    if node_R.max() == 0:
        return np.stack([level_ranks(*inputs, warm_home_E, problem)])
    none_EE = np.zeros((experts, experts), dtype=np.int64)
    nodes_E = level_nodes(*inputs, warm_home_E, none_EE, problem)
    found = [level_ranks(*inputs, nodes_E, problem)]
    if stays and not problem.by_skew:
        found = [level_ranks(*inputs, warm_home_E, problem), nodes_E, *found]
    if len(pair_EE) > 0 and not problem.by_skew:
        together_E = level_nodes(load_EM, share_EM, weight_M, warm_home_E, affinity(share_EM, pair_EE), problem)
        found.append(level_ranks(*inputs, together_E, problem))
    return np.stack(found)


def search_inputs(load_MRE: np.ndarray, problem: LayerProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[E, M] rows; [E, M] the same in 2^-20 of a whole, which keeps products small; [M] weight of each micro-step.

    For skew every micro-step counts alike: its own total is the whole. For seconds a fuller micro-step counts more.
    """
    load_EM = np.ascontiguousarray(load_MRE.sum(axis=1).T)
    total_M = load_EM.sum(axis=0)
    if problem.by_skew:
        whole_M = np.maximum(1, total_M)
        weight_M = 2**40 // np.maximum(1, total_M // load_MRE.shape[1])
    else:
        whole_M = np.full_like(total_M, max(1, total_M.max()))
        weight_M = np.full_like(total_M, 1024)
    return load_EM, (load_EM << 20) // whole_M, weight_M


def affinity(share_EM: np.ndarray, pair_EE: np.ndarray) -> np.ndarray:
    """[E, E] what co-activation is worth beside level loads: a mean pair counts as 1/64 of a mean product, negative."""
    experts = len(share_EM)
    mean_product = max(1, int((share_EM.sum(axis=0) ** 2).sum()) // experts**2)
    apart_EE = pair_EE * ~np.eye(experts, dtype=np.bool_)
    mean_pair = max(1, int(apart_EE.sum()) // max(1, experts * (experts - 1)))
    worth_EE: np.ndarray = -(apart_EE * 64 // mean_pair) * (mean_product // 4096)
    return worth_EE


def level_nodes(
    load_EM: np.ndarray,
    share_EM: np.ndarray,
    weight_M: np.ndarray,
    start_E: np.ndarray,
    affinity_EE: np.ndarray,
    problem: LayerProblem,
) -> np.ndarray:
    """[E] homes after levelling nodes: an expert in its owner's node is at its owner, others take the freed slots."""
    node_R, experts = problem.node_R, len(start_E)
    owner_E = owners(experts, len(node_R))
    ranks_N = np.bincount(node_R)
    cost_EN = np.where(np.arange(len(ranks_N)) == node_R[owner_E][:, None], 0, problem.cost_across)
    limits = problem.budget, problem.patience, problem.max_checks
    groups = node_R[start_E], ranks_N, weight_M, cost_EN, affinity_EE, node_R[owner_E]
    return settle_in(level(load_EM, share_EM, *groups, *limits), start_E, owner_E, node_R)


def settle_in(node_E: np.ndarray, start_E: np.ndarray, owner_E: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[E] a rank of its node for every expert: its owner's, else where it was, else the first rank with a free slot."""
    experts, ranks = len(node_E), len(node_R)
    free_R = np.full(ranks, experts // ranks)
    home_E = np.full(experts, -1)
    for wishes_E in (owner_E, start_E, None):
        for e in np.flatnonzero(home_E < 0):
            wished = range(ranks) if wishes_E is None else [wishes_E[e]]
            fitting = [r for r in wished if node_R[r] == node_E[e] and free_R[r] > 0]
            if fitting:
                home_E[e] = fitting[0]
                free_R[fitting[0]] -= 1
    return home_E


def level_ranks(
    load_EM: np.ndarray, share_EM: np.ndarray, weight_M: np.ndarray, start_E: np.ndarray, problem: LayerProblem
) -> np.ndarray:
    """[E] homes after levelling the ranks inside each node, with a sixteenth of the effort."""
    node_R, home_E = problem.node_R, start_E.copy()
    owner_E = owners(len(start_E), len(node_R))
    for node in range(node_R.max() + 1):
        members, here = np.flatnonzero(node_R == node), np.flatnonzero(node_R[start_E] == node)
        index_R = np.full(len(node_R), -1)
        index_R[members] = np.arange(len(members))
        own_E = index_R[owner_E[here]]
        # An expert from another node is displaced wherever it stands here.
        cost_EG = np.where((own_E[:, None] == np.arange(len(members))) | (own_E[:, None] < 0), 0, problem.cost_inside)
        elsewhere = int((home_E != owner_E).sum() - (home_E[here] != owner_E[here]).sum())
        limits = problem.budget - elsewhere, problem.patience // 16, problem.max_checks // 16
        none_EE = np.zeros((len(here), len(here)), dtype=np.int64)
        groups = index_R[start_E[here]], np.ones(len(members), dtype=np.int64), weight_M, cost_EG, none_EE, own_E
        home_E[here] = members[level(load_EM[here], share_EM[here], *groups, *limits)]
    return home_E


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
    """Swap experts between groups until no group stands out in any micro-step; groups keep their sizes.

    Args:
        load_EM: [E, M] rows
        share_EM: [E, M] the same, scaled for the sum of squares
        group_E: [E] where the search starts
        ranks_G: [G] ranks of each group
        weight_M: [M] weight of each micro-step in the true objective
        cost_EG: [E, G] price of each expert in each group, in the true objective
        affinity_EE: [E, E] added to the inner products: negative draws two experts into one group
        owner_E: [E] the group of each expert's owner; -1: none of these
        budget: most experts away from their owner's group
        patience: states without improvement before the search stops
        max_checks: swaps that `polish` may look at

    Returns: [E] groups
    """
    experts, group_E = len(group_E), group_E.copy()
    dot_EE = share_EM @ share_EM.T + affinity_EE
    tabu_E, tenure = np.zeros(experts, dtype=np.int64), min(10, experts // 8 + 1)
    best, best_E, since, swap = 2**62, group_E.copy(), 0, 0
    while True:
        value = busiest(group_E, load_EM, ranks_G, weight_M, cost_EG)
        if value < best and (group_E != owner_E).sum() <= budget:
            best, best_E, since = value, group_E.copy(), 0
        elif since >= patience:
            break
        else:
            since += 1
        found = best_swap(dot_EE, group_E, ranks_G, tabu_E <= swap)
        if found is None and tabu_E.max() <= swap:
            break
        swap += 1
        if found is None:
            # All that could be swapped rests: wait.
            continue
        e, f, change = found
        group_E[e], group_E[f] = group_E[f], group_E[e]
        if change >= 0:
            tabu_E[e], tabu_E[f] = rests(swap, tenure)
    polished_E = polish(load_EM, best_E, ranks_G, weight_M, cost_EG, owner_E, budget, max_checks)
    return polished_E if busiest(polished_E, load_EM, ranks_G, weight_M, cost_EG) < best else best_E


def rests(swap: int, tenure: int) -> tuple[int, int]:
    """Until which swap the lower and the higher expert of an uphill swap rest, so that it is not undone at once.

    From half the tenure to two and a half, in a fixed order without pattern: rests of one length, or of two that beat
    together, let the search run in circles.
    """
    least = swap + 1 + tenure // 2
    return least + swap * 40503 % 65537 % (2 * tenure), least + swap * 30011 % 65537 % (2 * tenure + 3)


def busiest(
    group_E: np.ndarray, load_EM: np.ndarray, ranks_G: np.ndarray, weight_M: np.ndarray, cost_EG: np.ndarray
) -> int:
    """The true objective: weighted sum of the fullest group's rows per rank, rounded up, plus prices of experts."""
    member_GE = group_E == np.arange(len(ranks_G))[:, None]
    rows_GM = member_GE.astype(np.int64) @ load_EM
    top_M = (-(-rows_GM // ranks_G[:, None])).max(axis=0)
    return int((weight_M * top_M).sum() + cost_EG[np.arange(len(group_E)), group_E].sum())


def best_swap(
    dot_EE: np.ndarray, group_E: np.ndarray, ranks_G: np.ndarray, free_E: np.ndarray
) -> tuple[int, int, int] | None:
    """The pair e < f of free experts whose swap lowers the sum of squares most, and the change; None if there is none.

    A group of half the ranks counts twice, since its load per rank is twice as high.
    """
    weight_G = np.lcm.reduce(ranks_G) // ranks_G
    member_GE = group_E == np.arange(len(ranks_G))[:, None]
    pull_EG = (weight_G[:, None] * (member_GE.astype(np.int64) @ dot_EE)).T
    own_E, square_E = pull_EG[np.arange(len(group_E)), group_E], np.diag(dot_EE)
    swapped_EE = pull_EG[:, group_E] + pull_EG[:, group_E].T - own_E[:, None] - own_E[None, :]
    change_EE = swapped_EE + weight_G.max() * (square_E[:, None] + square_E[None, :] - 2 * dot_EE)
    allowed_EE = (group_E[:, None] != group_E[None, :]) & free_E[:, None] & free_E[None, :]
    pairs = np.argwhere(np.triu(allowed_EE))
    if not len(pairs):
        return None
    change_P = change_EE[pairs[:, 0], pairs[:, 1]]
    at = int(change_P.argmin())
    return int(pairs[at, 0]), int(pairs[at, 1]), int(change_P[at])


def polish(
    load_EM: np.ndarray,
    group_E: np.ndarray,
    ranks_G: np.ndarray,
    weight_M: np.ndarray,
    cost_EG: np.ndarray,
    owner_E: np.ndarray,
    budget: int,
    max_checks: int,
) -> np.ndarray:
    """Take each swap that lowers the true objective, pair of groups by pair, until none does or `max_checks` is spent.

    Here the fullest group counts without rounding up: a swap may gain less than a row per rank, and the next one more.

    Returns: [E] groups
    """
    group_E, groups = group_E.copy(), len(ranks_G)
    common = int(np.lcm.reduce(ranks_G))
    # In rows of common parts nothing is rounded, because every group's ranks divide them.
    whole = load_EM * common, ranks_G, weight_M, cost_EG * common
    best, checks, quiet = busiest(group_E, *whole), 0, 0
    pairs = [(a, b) for a in range(groups) for b in range(a + 1, groups)]
    while quiet < len(pairs) and checks < max_checks:
        for a, b in pairs:
            quiet += 1
            for e in range(len(group_E)):
                for f in range(len(group_E)):
                    if group_E[e] != a or group_E[f] != b or checks >= max_checks:
                        continue
                    checks += 1
                    trial_E = group_E.copy()
                    trial_E[e], trial_E[f] = b, a
                    value = busiest(trial_E, *whole)
                    # A swap may also lower a number of displaced experts that is above the budget.
                    if value < best and (trial_E != owner_E).sum() <= budget:
                        group_E, best, quiet = trial_E, value, 0
    return group_E


def evaluate(
    load_MRE: np.ndarray, home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Replicas and prices of every micro-step for given homes; the gate decides entry by entry."""
    micro_steps, ranks = load_MRE.shape[:2]
    node_R, nodes = problem.node_R, int(problem.node_R.max()) + 1
    keep_N = kept_permille(node_R[home_E], nodes, pair_EE, tables.top_k)
    expert_MRS = np.full((micro_steps, ranks, problem.slots), -1)
    rows_MRS = np.zeros((micro_steps, ranks, problem.slots), dtype=np.int64)
    line_MC, closed_MC = np.zeros((2, micro_steps, COLUMNS), dtype=np.int64)
    for m, load_RE in enumerate(load_MRE):
        load_E, homes_RH = load_RE.sum(axis=0), homes_by_rank(home_E, ranks)
        none_RS = np.full((ranks, problem.slots), -1), np.zeros((ranks, problem.slots), dtype=np.int64)
        closed = price(load_RE, home_E, node_R, *none_RS, keep_N, tables, False, closed_MC[m])
        fill(load_E, home_E, homes_RH, problem.fill_node_R, problem.min_rows, expert_MRS[m], rows_MRS[m])
        opened = price(load_RE, home_E, node_R, expert_MRS[m], rows_MRS[m], keep_N, tables, False, line_MC[m])
        if problem.gated and opened >= closed:
            expert_MRS[m], rows_MRS[m], line_MC[m] = -1, 0, closed_MC[m]
    return LayerPlan(home_E, expert_MRS, rows_MRS, line_MC, closed_MC, closed_MC)


def homes_by_rank(home_E: np.ndarray, ranks: int) -> np.ndarray:
    """[R, H] the experts whose home each rank is, ascending."""
    return np.stack([np.flatnonzero(home_E == r) for r in range(ranks)])


def value_of(plan: LayerPlan, load_MRE: np.ndarray, owner_E: np.ndarray, problem: LayerProblem) -> int:
    """What is minimised: nanoseconds of all micro-steps and both edges, or the busiest rank over the mean in 2^-40."""
    if not problem.by_skew:
        return int(plan.line_MC[:, :4].sum()) + edges_ns(plan.home_E, owner_E, problem)
    total = 0
    for m, load_RE in enumerate(load_MRE):
        rows_R = quotas(load_RE.sum(axis=0), plan.home_E, plan.rep_expert_MRS[m], plan.rep_rows_MRS[m]).sum(axis=0)
        total += int(rows_R.max()) * (2**40 // max(1, int(load_RE.sum()) // len(load_RE)))
    return total


def edges_ns(home_E: np.ndarray, owner_E: np.ndarray, problem: LayerProblem) -> int:
    """Publish and collect of one layer by its busiest link, both edges together."""
    node_R, ranks = problem.node_R, len(problem.node_R)
    away_E, across_E = home_E != owner_E, node_R[home_E] != node_R[owner_E]
    ns = []
    for chosen_E, each in ((away_E & ~across_E, problem.edge_inside_ns), (across_E, problem.edge_across_ns)):
        ends = [np.bincount(rank_E[chosen_E], minlength=ranks).max() for rank_E in (owner_E, home_E)]
        ns.append(int(max(ends)) * each)
    return max(ns)
