"""The specification of the planner's inner functions, short and plain, never optimised: `level`, `near`, `evaluate`.

`planner/homes.py` and `planner/replicas.py` do the same in compiled loops, under the same names, bit for bit. All
decisions are made in integers and every tie is broken by index, so that each rank and CPU finds the same plan.

The problem. In micro-step m, source rank s has `load_MRE[m, s, e]` rows for expert e. Each expert has one *home* rank
for the whole window; in each micro-step some experts also get *replicas*. A layer takes as long as its busiest rank.
`layer.py` says which homes are tried and which win; here is how they are found and what they come to:

1. `level` puts experts into groups (nodes, or the ranks of a node) by tabu search. It always takes the swap of two
   experts that lowers the sum over micro-steps and groups of squared load most, even if that raises it; after a swap
   that did not lower it, the two experts rest for a while, so that the search leaves the valley it is in. The sum of
   squares only guides. What counts is the true objective, `busiest`: the fullest group's rows per rank, rounded up,
   weighted and summed over micro-steps, plus the price of displacing experts. It is judged at every state visited, and
   the best state wins.
2. `polish` then looks at swaps by the true objective alone and takes each that lowers it.
3. `near` swaps experts between nodes by another objective, `burden`: the fullest node, and the busiest link across.
4. `evaluate` gives each micro-step its replicas by `fill` (`fill_reference.py`), which works like an alias table: the
   emptiest rank of a node is brought up to the bound from one expert of the fullest rank, until no rank is above the
   bound. With and without them the entry is priced, and the gate keeps what is cheaper. Where bringing them costs
   much, it is tried again with fewer, which leave some of the excess (`SLACKS`). Slots that are left then serve what
   crosses nodes (`trade_reference.py`), again if that is cheaper.

Invariants (asserted by the tests):
1. The compiled functions return exactly what these do.
"""

from collections.abc import Callable, Iterator

import numpy as np

from equipoise.cost.kernels import COLUMNS, PULL, RETURN
from equipoise.cost.model import Tables
from equipoise.planner import layer
from equipoise.planner.layer import Kernels
from equipoise.planner.replicas import CHEAP, SLACKS, LayerPlan, LayerProblem
from tests.cost.reference import kept_permille, price
from tests.planner.fill_reference import fill
from tests.planner.trade_reference import trade_across, trade_inside


def plan_layer(
    load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Plan one layer of one window with the plain functions. See `layer.plan_layer`."""
    return layer.plan_layer(load_MRE, warm_home_E, pair_EE, problem, tables, Kernels(level, near, evaluate))


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
    """Swap experts between groups to level them in every micro-step; groups keep their sizes.

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
    common = int(np.lcm.reduce(ranks_G))
    # In rows of common parts nothing is rounded, because every group's ranks divide them.
    whole = load_EM * common, ranks_G, weight_M, cost_EG * common
    turn_E = np.arange(len(group_E))
    return swap_down(
        group_E, len(ranks_G), lambda trial_E: busiest(trial_E, *whole), owner_E, turn_E, budget, max_checks
    )


def swap_down(
    group_E: np.ndarray,
    groups: int,
    value_of: Callable[[np.ndarray], int],
    owner_E: np.ndarray,
    turn_E: np.ndarray,
    budget: int,
    max_checks: int,
) -> np.ndarray:
    """Take each swap of two experts that lowers a value, pair of groups by pair, until none does or checks are spent.

    Returns: [E] groups
    """
    group_E = group_E.copy()
    best, checks, quiet = value_of(group_E), 0, 0
    pairs = [(a, b) for a in range(groups) for b in range(a + 1, groups)]
    while quiet < len(pairs) and checks < max_checks:
        for a, b in pairs:
            quiet += 1
            for e in turn_E:
                for f in turn_E:
                    if group_E[e] != a or group_E[f] != b or checks >= max_checks:
                        continue
                    checks += 1
                    trial_E = group_E.copy()
                    trial_E[e], trial_E[f] = b, a
                    value = value_of(trial_E)
                    # A swap may also lower a number of displaced experts that is above the budget.
                    if value < best and (trial_E != owner_E).sum() <= budget:
                        group_E, best, quiet = trial_E, value, 0
    return group_E


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
    """Take each swap of two experts between nodes that lowers `burden`, until none does or `max_checks` is spent.

    Args:
        load_MRE: [M, R, E] rows; of more than `most_steps` micro-steps, evenly spaced ones count
        group_E: [E] node of each expert's home at the start
        node_R: [R] node of each rank
        cost_EN: [E, N] price of an expert in each node
        owner_E: [E] the node of each expert's owner
        turn_E: [E] experts in the order in which they are looked at
        weights: price of a row to compute at every rank of the fullest node, and of one on the busiest link
        budget: most experts away from their owner's node
        max_checks: swaps to look at
        most_steps: micro-steps to look at

    Returns: [E] nodes
    """
    seen_MRE, nodes = load_MRE[:: -(-len(load_MRE) // most_steps)], int(node_R.max()) + 1

    def value_of(trial_E: np.ndarray) -> int:
        return burden(seen_MRE, trial_E, node_R, cost_EN, weights)

    return swap_down(group_E, nodes, value_of, owner_E, turn_E, budget, max_checks)


def burden(
    load_MRE: np.ndarray, group_E: np.ndarray, node_R: np.ndarray, cost_EN: np.ndarray, weights: tuple[int, int]
) -> int:
    """Fullest node and busiest link across nodes, each weighted and summed over micro-steps, plus prices of experts.

    A link carries what a rank sends to other nodes, or a rank's share of what its node receives. Everything is counted
    in common parts of a row, so that nodes of unlike sizes divide it.
    """
    ranks_N = np.bincount(node_R)
    common, member_NE = int(np.lcm.reduce(ranks_N)), group_E == np.arange(len(ranks_N))[:, None]
    value = common * int(cost_EN[np.arange(len(group_E)), group_E].sum())
    for load_RE in load_MRE:
        across_RE = load_RE * (node_R[:, None] != group_E[None, :])
        top, received = (
            int((common // ranks_N * (member_NE @ rows.sum(axis=0))).max()) for rows in (load_RE, across_RE)
        )
        sent = common * int(across_RE.sum(axis=1).max())
        value += weights[0] * top + weights[1] * max(sent, received)
    return value


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
        best, line_MC[m] = closed if problem.gated else load_E.sum(), closed_MC[m]
        node_DR, all_DR = problem.domain_DR[:1], problem.domain_DR[1:]
        for domain_DR in (node_DR, problem.domain_DR, all_DR) if len(all_DR) else (node_DR,):
            for slack in SLACKS:
                expert_RS, rows_RS, line = np.copy(none_RS[0]), np.copy(none_RS[1]), np.zeros_like(line_MC[m])
                top = fill(load_E, home_E, homes_RH, domain_DR, problem.min_rows, slack, expert_RS, rows_RS)
                if not rows_RS.any():
                    break
                opened = price(load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, False, line)
                value = opened if problem.gated else top
                if value < best:
                    best, line_MC[m], expert_MRS[m], rows_MRS[m] = value, line, expert_RS, rows_RS
                if not problem.gated or line[PULL] + line[RETURN] <= opened // CHEAP:
                    break
        for trade in _trades(problem, nodes, tables):
            expert_RS, rows_RS, line = expert_MRS[m].copy(), rows_MRS[m].copy(), np.zeros_like(line_MC[m])
            if trade is trade_across and problem.slots > 1:
                # Level the ranks of each node again with one slot less, so that each has one left for trades.
                expert_RS, rows_RS = np.copy(none_RS[0]), np.copy(none_RS[1])
                fewer = expert_RS[:, :-1], rows_RS[:, :-1]
                fill(load_E, home_E, homes_RH, problem.domain_DR[:1], problem.min_rows, 0, *fewer)
            if trade(load_RE, home_E, node_R, problem.min_rows, expert_RS, rows_RS):
                traded = price(load_RE, home_E, node_R, expert_RS, rows_RS, keep_N, tables, False, line)
                if traded < line_MC[m, : RETURN + 1].sum():
                    line_MC[m], expert_MRS[m], rows_MRS[m] = line, expert_RS, rows_RS
    return LayerPlan(home_E, expert_MRS, rows_MRS, line_MC, closed_MC)


def _trades(problem: LayerProblem, nodes: int, tables: Tables) -> Iterator[Callable[..., bool]]:
    """The trades that can pay: none for skew or in one node; where tokens are handed on, those across alone."""
    if problem.slots > 0 and nodes > 1 and not problem.by_skew:
        if problem.trades_across:
            yield trade_across
        if not tables.forwards:
            yield trade_inside


def homes_by_rank(home_E: np.ndarray, ranks: int) -> np.ndarray:
    """[R, H] the experts whose home each rank is, ascending."""
    return np.stack([np.flatnonzero(home_E == r) for r in range(ranks)])
