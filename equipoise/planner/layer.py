"""The plan of one layer: which homes are tried, and which of them wins.

1. `plan_layer` tries a few placements of homes (`candidates`), works out replicas and prices for each (`evaluate`),
   and keeps the one with the least total, with what publish and collect add to it (`value_of`). Homes at their owners
   are always tried first, so a plan never loses to doing nothing. Where replicas may cross nodes, all homes are tried
   with that, too: the best homes inside nodes are often not the best ones across.
2. `candidates` levels twice. Replicas stay inside a node, so first the *nodes* must be level in every micro-step
   (`level_nodes`), then the ranks inside each node (`level_ranks`). Both are one problem: put experts into *groups*.
3. Rows that cross nodes often cost more than rows on a fuller rank. So levelled nodes are tried with experts moved to
   the nodes whose sources choose them (`bring_near`), and with ranks level in what crosses, too (`with_far`). Where
   samples were packed by their experts, homes that follow the samples are tried as well (`follow_sources`).

The inner functions, `level`, `near` and `evaluate`, are compiled; the plain ones of `tests/planner/reference.py` return
the same to the bit.

Invariants (asserted by the tests):
1. No more than `budget` experts of a layer are displaced, and each rank keeps its number of homes.
2. What is minimised is never above that of homes at their owners.
3. An edge that takes longer, or has less to hide behind, never costs less.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.model import Tables
from equipoise.cost.window import mean_visit_ns, row_prices
from equipoise.loads.packer import follow_nodes
from equipoise.planner import homes
from equipoise.planner.assemble import WindowTask
from equipoise.planner.replicas import LayerPlan, LayerProblem, evaluate

Level = Callable[..., np.ndarray]
"""`homes.level`, or the plain one of the tests."""


class Inputs(NamedTuple):
    """What the search looks at."""

    load_EM: np.ndarray
    """[E, M] rows."""
    share_EM: np.ndarray
    """[E, M] the same in 2^-20 of a whole, which keeps products small."""
    weight_M: np.ndarray
    """[M] weight of each micro-step."""


class Kernels(NamedTuple):
    """The inner functions of a plan: the compiled ones, or those of `tests/planner/reference.py`."""

    level: Level
    near: Callable[..., np.ndarray]
    evaluate: Callable[[np.ndarray, np.ndarray, np.ndarray, LayerProblem, Tables], LayerPlan]


FEWER_CROSSING = 15 / 16
"""Homes that follow the sources are tried where at most this share of the crossing rows is left."""
COMPILED = Kernels(homes.level, homes.near, evaluate)


def plan_layer(
    load_MRE: np.ndarray,
    warm_home_E: np.ndarray,
    pair_EE: np.ndarray,
    problem: LayerProblem,
    tables: Tables,
    kernels: Kernels = COMPILED,
) -> LayerPlan:
    """Plan one layer of one window.

    Args:
        load_MRE: [M, R, E] rows
        warm_home_E: [E] where the search starts: the previous window's homes, or the owners
        pair_EE: [E, E] tokens that chose both experts, for the price of crossing nodes; empty where not counted
        problem: what all layers share
        tables: prices
        kernels: the inner functions
    """
    ranks, experts = load_MRE.shape[1:]
    owner_E = owners(experts, ranks)
    found = [owner_E]
    if problem.budget > 0 and ranks > 1:
        found += candidates(load_MRE, warm_home_E, pair_EE, problem, kernels)
    inside, *crossing = _variants(problem)
    trials = [
        kernels.evaluate(load_MRE, home_E, pair_EE, each, tables)
        for each in (inside, *crossing[-1:])
        for home_E in found
    ]
    best = min(trials, key=lambda trial: value_of(trial, load_MRE, owner_E, problem))
    # Without trades fewer experts cross, which pays in small windows, whatever the homes: the best ones are enough.
    fewer = [kernels.evaluate(load_MRE, best.home_E, pair_EE, each, tables) for each in crossing[:-1]]
    if not fewer:
        return best
    return min([best, *fewer], key=lambda trial: value_of(trial, load_MRE, owner_E, problem))


def _variants(problem: LayerProblem) -> Iterator[LayerProblem]:
    """The problem inside nodes; where replicas may cross them, with as few as level ranks, then with trades across.

    An entry does not know what it costs to bring an expert to another node: that is the window's, and shared by all.
    """
    yield problem._replace(domain_DR=problem.domain_DR[:1], trades_across=0)
    if len(problem.domain_DR) > 1:
        yield problem._replace(trades_across=0)
    if problem.trades_across:
        yield problem


def layer_problem(task: WindowTask, *, budget: int, is_warm: bool = False) -> LayerProblem:
    """What all layers of a window share, in integers."""
    by_skew = task.objective == "skew"
    cost = task.cost
    node_R = task.cluster.node_array_R
    domains = [node_R]
    if task.options.cross_node and task.cluster.num_ep_nodes > 1:
        domains.append(np.zeros_like(node_R))
    fixed_ns, one = cost.edge_fixed_ns, [{"inside_experts": 1 - far, "across_experts": far} for far in (0, 1)]
    edge_ns_22, edge_slow_22 = (
        np.array([[price(**each, edge=edge) for each in one] for edge in ("publish", "collect")])
        for price in (cost.edge_ns, cost.edge_slow_ns)
    )
    edge_ns_22 -= fixed_ns
    # Rows of a mean rank in one (micro-step, layer).
    loads, layers = task.loads, task.model.layers
    mean_rows = max(1, int(loads.load_MLRE.sum()) // (loads.num_micro_steps * layers * loads.num_ranks))
    row, hides_2 = row_prices(cost, mean_rows), mean_visit_ns(cost, mean_rows)
    # An expert's price while homes are searched for: its part of what would be late if a rank's were all displaced.
    homes = task.cluster.home_slots(task.model)
    late_22 = np.maximum(0, homes * edge_ns_22 - hides_2[:, None]) // homes
    each_2 = ((edge_ns_22 + (layers - 1) * late_22) // layers + edge_slow_22).sum(axis=0)
    cost_2 = (each_2 * 1000 * 1024 // (row.slope_ps * task.cluster.ep)).tolist()
    patience = _patience(task.model.experts, by_skew=by_skew, crosses=len(domains) > 1) * task.options.effort
    return LayerProblem(
        node_R=node_R,
        domain_DR=np.stack(domains),
        trades_across=int(len(domains) > 1 and not by_skew),
        slots=task.slots,
        min_rows=1 if by_skew else row.min_rows,
        by_skew=int(by_skew),
        gated=int(task.options.gate and not by_skew),
        is_warm=int(is_warm),
        budget=budget,
        patience=patience,
        max_checks=6_000 * task.options.effort,
        near_checks=750 * task.options.effort,
        near_steps=16 * task.options.effort,
        row_weight=1024 * row.compute_ps // row.slope_ps,
        link_weight=1024 * row.crossing_ps // row.slope_ps,
        cost_inside=0 if by_skew else cost_2[0],
        cost_across=0 if by_skew else cost_2[1],
        layers=layers,
        edge_ns_22=edge_ns_22,
        edge_fixed_ns=fixed_ns,
        crossing_ns=int(edge_ns_22[0, 1]) + cost.refresh_ns(1),
        hides_2=hides_2,
        edge_slow_22=edge_slow_22,
    )


def _patience(experts: int, *, by_skew: bool, crosses: bool) -> int:
    """States without improvement before the search for homes stops: more for few experts, whose swaps are coarse.

    Skew is asked for offline, and the last permille cost most: it is searched for eight times as long. With very many
    experts that takes long and gains little; where replicas may cross nodes, they level what homes leave.
    """
    patience = max(200, min(4000, 25 * 2**31 // experts**4))
    return patience * 8 if by_skew and experts <= (64 if crosses else 256) else patience


def owners(experts: int, ranks: int) -> np.ndarray:
    """[E] owner of each expert: contiguous, as in static expert parallelism."""
    return np.arange(experts) // (experts // ranks)


def candidates(
    load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, kernels: Kernels
) -> list[np.ndarray]:
    """Homes worth pricing, [E] each: level across nodes and near their sources; level inside nodes, too; inside alone.

    For skew, where displacements are free and links do not count, one is enough; from a good warm start likewise, and
    its nodes are not levelled again.
    """
    ranks, experts = load_MRE.shape[1:]
    owner_E, node_R, level = owners(experts, ranks), problem.node_R, kernels.level
    inputs = search_inputs(load_MRE, problem)
    none_EE = np.zeros((experts, experts), dtype=np.int64)
    start_E, is_good = owner_E, is_good_start(inputs, warm_home_E, owner_E, problem)
    if is_good:
        start_E = warm_home_E
        problem = problem._replace(patience=problem.patience // 24, max_checks=problem.max_checks // 8)
    if node_R.max() == 0:
        return [level_ranks(inputs, start_E, problem, level)]
    if is_good and not problem.by_skew:
        # Nodes are level already: what is left is to follow the sources, which may take a few more swaps.
        longer = problem._replace(near_checks=3 * problem.near_checks // 2)
        found = [bring_near(load_MRE, start_E, longer, kernels.near)]
    else:
        nodes_E = level_nodes(inputs, start_E, none_EE, problem, level)
        if problem.by_skew:
            return [level_ranks(inputs, nodes_E, problem, level)]
        far = with_far(inputs, load_MRE, nodes_E, problem)
        found = [
            bring_near(load_MRE, nodes_E, problem, kernels.near),
            level_ranks(far, nodes_E, problem, level),
            level_ranks(inputs, start_E, problem, level),
        ]
    if len(pair_EE) > 0:
        together_E = level_nodes(inputs, start_E, affinity(inputs.share_EM, pair_EE), problem, level)
        found.append(level_ranks(inputs, together_E, problem, level))
    follow_E = follow_sources(load_MRE, found[0], problem)
    if (follow_E != found[0]).any():
        far = with_far(inputs, load_MRE, follow_E, problem)
        found.append(level_ranks(far, follow_E, problem, level))
        found.append(bring_near(load_MRE, follow_E, problem, kernels.near))
    return found


def follow_sources(load_MRE: np.ndarray, home_E: np.ndarray, problem: LayerProblem) -> np.ndarray:
    """[E] homes in the nodes that send each expert most rows; `home_E` where few rows more would stay in their node.

    Swaps alone do not get there from level nodes: single swaps make nodes unlevel before they save anything.
    """
    node_R, experts = problem.node_R, len(home_E)
    ranks_N = np.bincount(node_R)
    is_in_NR = (node_R == np.arange(len(ranks_N))[:, None]).astype(np.int64)
    rows_NE = is_in_NR @ load_MRE.sum(axis=0)
    whole = int(rows_NE.sum())

    def crossing(node_E: np.ndarray) -> int:
        return whole - int(rows_NE[node_E, np.arange(experts)].sum())

    # No homes keep more rows than this, and sources that nobody packed differ by one or two percent.
    least = FEWER_CROSSING * crossing(node_R[home_E])
    if whole - int(rows_NE.max(axis=0).sum()) > least:
        return home_E
    node_E, owner_E = follow_nodes(rows_NE.astype(np.float64), ranks_N, rounds=8), owners(experts, len(node_R))
    follow_E = assign_ranks(node_E, owner_E.copy(), owner_E, node_R)
    if crossing(node_E) > least or int((follow_E != owner_E).sum()) > problem.budget:
        return home_E
    return follow_E


def is_good_start(inputs: Inputs, warm_home_E: np.ndarray, owner_E: np.ndarray, problem: LayerProblem) -> bool:
    """Whether warm homes leave less than three quarters of what the owners' leave unlevel, within the budget.

    Then a short search is enough; likewise where homes stayed at their owners, because nothing else paid.
    After an abrupt change they do not, and the search starts afresh.
    """
    away = int((warm_home_E != owner_E).sum())
    if not problem.is_warm or away > problem.budget:
        return False
    if away == 0:
        return True
    # Between nodes if there are several, else between ranks.
    group_R = problem.node_R if problem.node_R.max() > 0 else np.arange(len(problem.node_R))
    even_M = -(-inputs.load_EM.sum(axis=0) // len(group_R))
    excess = []
    # In float64, which is exact for sums of rows: products of integers take ten times as long.
    load_EM = inputs.load_EM.astype(np.float64)
    for home_E in (warm_home_E, owner_E):
        member_GE = group_R[home_E] == np.arange(group_R.max() + 1)[:, None]
        rows_GM = (member_GE.astype(np.float64) @ load_EM).astype(np.int64)
        top_M = (-(-rows_GM // np.bincount(group_R)[:, None])).max(axis=0)
        excess.append(int((inputs.weight_M * (top_M - even_M)).sum()))
    return 4 * excess[0] < 3 * excess[1]


def search_inputs(load_MRE: np.ndarray, problem: LayerProblem) -> Inputs:
    """Scale the loads for the search.

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
    return Inputs(load_EM, (load_EM << 20) // whole_M, weight_M)


def affinity(share_EM: np.ndarray, pair_EE: np.ndarray) -> np.ndarray:
    """[E, E] what co-activation is worth beside level loads: a mean pair counts as 1/64 of a mean product, negative."""
    experts = len(share_EM)
    mean_product = max(1, int((share_EM.sum(axis=0) ** 2).sum()) // experts**2)
    apart_EE = pair_EE * ~np.eye(experts, dtype=np.bool_)
    mean_pair = max(1, int(apart_EE.sum()) // max(1, experts * (experts - 1)))
    return -(apart_EE * 64 // mean_pair) * (mean_product // 4096)


def level_nodes(
    inputs: Inputs, start_E: np.ndarray, affinity_EE: np.ndarray, problem: LayerProblem, level: Level
) -> np.ndarray:
    """[E] homes after levelling nodes: an expert in its owner's node is at its owner, others take the freed slots."""
    node_R, experts = problem.node_R, len(start_E)
    owner_E = owners(experts, len(node_R))
    limits = problem.budget, problem.patience, problem.max_checks
    # Skew does not ask which experts are displaced.
    turn_E = np.arange(experts) if problem.by_skew else in_turn(experts, len(node_R))
    cost_EN, affinity_EE = node_prices(owner_E, problem)[turn_E], affinity_EE[np.ix_(turn_E, turn_E)]
    groups = (
        node_R[start_E[turn_E]],
        np.bincount(node_R),
        inputs.weight_M,
        cost_EN,
        affinity_EE,
        node_R[owner_E[turn_E]],
    )
    node_E = np.empty_like(owner_E)
    node_E[turn_E] = level(inputs.load_EM[turn_E], inputs.share_EM[turn_E], *groups, *limits)
    return assign_ranks(node_E, np.array(start_E), owner_E, node_R)


def in_turn(experts: int, ranks: int) -> np.ndarray:
    """[E] experts in the order in which nodes look at them: the first of every owner, then the second, and so on.

    Of experts that serve as well, the first one found is displaced. In turn these are from different owners, and no
    owner's link has all displaced experts at an edge.
    """
    return np.arange(experts).reshape(ranks, -1).T.reshape(experts)


def bring_near(
    load_MRE: np.ndarray, start_E: np.ndarray, problem: LayerProblem, near: Callable[..., np.ndarray]
) -> np.ndarray:
    """[E] homes after moving experts to the nodes whose sources choose them, as long as nodes stay level enough."""
    node_R, experts = problem.node_R, len(start_E)
    owner_E, turn_E = owners(experts, len(node_R)), in_turn(experts, len(node_R))
    weights = problem.row_weight, problem.link_weight
    limits = problem.budget, problem.near_checks, problem.near_steps
    cost_EN = node_prices(owner_E, problem)
    node_E = near(load_MRE, node_R[start_E], node_R, cost_EN, node_R[owner_E], turn_E, weights, *limits)
    return assign_ranks(node_E, np.array(start_E), owner_E, node_R)


def node_prices(owner_E: np.ndarray, problem: LayerProblem) -> np.ndarray:
    """[E, N] price of an expert in each node: none in its owner's."""
    is_owners_EN = np.arange(problem.node_R.max() + 1) == problem.node_R[owner_E][:, None]
    return np.where(is_owners_EN, 0, problem.cost_across)


def with_far(inputs: Inputs, load_MRE: np.ndarray, home_E: np.ndarray, problem: LayerProblem) -> Inputs:
    """Rows from other nodes as further micro-steps, so that ranks of a node are level in what crosses, too."""
    is_far_RE = problem.node_R[:, None] != problem.node_R[home_E]
    far_EM = np.einsum("mre,re->em", load_MRE, is_far_RE.astype(np.int64))
    whole = max(1, int(inputs.load_EM.sum(axis=0).max()))
    ratio = problem.link_weight // max(1, problem.row_weight)
    return Inputs(
        np.concatenate([inputs.load_EM, far_EM], axis=1),
        # Twice as much in the sum of squares, because a link costs several times what computing does.
        np.concatenate([inputs.share_EM, (far_EM << 21) // whole], axis=1),
        np.concatenate([inputs.weight_M, inputs.weight_M * ratio]),
    )


@compiled
def assign_ranks(node_E: np.ndarray, start_E: np.ndarray, owner_E: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[E] a rank of its node for every expert: its owner's, else where it was, else the first rank with a free slot."""
    experts, ranks = len(node_E), len(node_R)
    free_R = np.full(ranks, experts // ranks)
    home_E = np.full(experts, -1)
    for wish in range(3):
        for e in range(experts):
            if home_E[e] >= 0:
                continue
            first = owner_E[e] if wish == 0 else start_E[e] if wish == 1 else 0
            last = ranks - 1 if wish == 2 else first
            for r in range(first, last + 1):
                if home_E[e] < 0 and node_R[r] == node_E[e] and free_R[r] > 0:
                    home_E[e] = r
                    free_R[r] -= 1
    return home_E


def level_ranks(inputs: Inputs, start_E: np.ndarray, problem: LayerProblem, level: Level) -> np.ndarray:
    """[E] homes after levelling the ranks inside each node, with a sixteenth of the effort."""
    node_R, home_E = problem.node_R, start_E.copy()
    owner_E = owners(len(start_E), len(node_R))
    for node in range(node_R.max() + 1):
        members, here = np.flatnonzero(node_R == node), np.flatnonzero(node_R[start_E] == node)
        index_R = np.full(len(node_R), -1)
        index_R[members] = np.arange(len(members))
        own_E = index_R[owner_E[here]]
        # An expert from another node is displaced on any rank of this one.
        cost_EG = np.where((own_E[:, None] == np.arange(len(members))) | (own_E[:, None] < 0), 0, problem.cost_inside)
        elsewhere = int((home_E != owner_E).sum() - (home_E[here] != owner_E[here]).sum())
        limits = problem.budget - elsewhere, problem.patience // 16, problem.max_checks // 16
        none_EE = np.zeros((len(here), len(here)), dtype=np.int64)
        ones_G = np.ones(len(members), dtype=np.int64)
        groups = index_R[start_E[here]], ones_G, inputs.weight_M, cost_EG, none_EE, own_E
        home_E[here] = members[level(inputs.load_EM[here], inputs.share_EM[here], *groups, *limits)]
    return home_E


def value_of(plan: LayerPlan, load_MRE: np.ndarray, owner_E: np.ndarray, problem: LayerProblem) -> int:
    """What is minimised: nanoseconds of all micro-steps and both edges, or the busiest rank over the mean in 2^-40."""
    if not problem.by_skew:
        crossing = 0
        if len(problem.domain_DR) > 1:
            crossing = int(crossings(plan.rep_expert_MRS, plan.home_E, problem.node_R).max())
        return int(plan.line_MC[:, :4].sum()) + edges_ns(plan.home_E, owner_E, crossing, problem)
    load_ME, ranks = load_MRE.sum(axis=1), load_MRE.shape[1]
    rows_MR = load_ME @ (plan.home_E[:, None] == np.arange(ranks)).astype(np.int64)
    m, r, s = np.nonzero(plan.rep_expert_MRS >= 0)
    rows = plan.rep_rows_MRS[m, r, s]
    np.add.at(rows_MR, (m, r), rows)
    np.subtract.at(rows_MR, (m, plan.home_E[plan.rep_expert_MRS[m, r, s]]), rows)
    weight_M = 2**40 // np.maximum(1, load_ME.sum(axis=1) // ranks)
    return int((rows_MR.max(axis=1) * weight_M).sum())


def edges_ns(home_E: np.ndarray, owner_E: np.ndarray, crossing: int, problem: LayerProblem) -> int:
    """What one layer's publish and collect add to the window by themselves.

    Args:
        crossing: experts over the busiest link to other nodes' host stores
    """
    node_R, ranks = problem.node_R, len(problem.node_R)
    away_E, across_E = home_E != owner_E, node_R[home_E] != node_R[owner_E]
    chosen_2E = (away_E & ~across_E, across_E)
    busiest_2 = np.array(
        [
            max(int(np.bincount(rank_E[chosen_E], minlength=ranks).max()) for rank_E in (owner_E, home_E))
            for chosen_E in chosen_2E
        ]
    )
    fixed = problem.edge_fixed_ns
    ns_2 = (busiest_2 * problem.edge_ns_22).max(axis=1) + (fixed if busiest_2.any() else 0)
    ns_2[0] += crossing * problem.crossing_ns + (fixed if crossing else 0)
    slow = int((busiest_2 * problem.edge_slow_22).sum()) + crossing * int(problem.edge_slow_22[0, 1])
    return slow + sum(
        edge_price(ns, hides, problem.layers) for ns, hides in zip(ns_2.tolist(), problem.hides_2.tolist(), strict=True)
    )


def edge_price(ns: int, hides: int, layers: int) -> int:
    """What an edge of `ns` nanoseconds adds: all of it in one layer of all, which has nothing to hide it behind.

    That is the first layer's publish and the last one's collect. In others it is what another layer's visit does not
    hide. What it slows is added.
    """
    return (ns + (layers - 1) * max(0, ns - hides)) // layers


def crossings(rep_expert_MRS: np.ndarray, home_E: np.ndarray, node_R: np.ndarray) -> np.ndarray:
    """[2, R] experts that each rank sends to the host stores of other nodes, and receives for its own, once a window.

    A store takes each expert once, whichever replicas need it; the ranks of its node receive them in turn.
    """
    nodes, experts = int(node_R.max()) + 1, len(home_E)
    needs_NE = np.zeros((nodes, experts), dtype=np.bool_)
    _, rank_P, _ = held_P = np.nonzero(rep_expert_MRS >= 0)
    needs_NE[node_R[rank_P], rep_expert_MRS[held_P]] = True
    needs_NE[node_R[home_E], np.arange(experts)] = False
    crossing_2R = np.zeros((2, len(node_R)), dtype=np.int64)
    np.add.at(crossing_2R[0], home_E, needs_NE.sum(axis=0))
    for node, needed in enumerate(needs_NE.sum(axis=1).tolist()):
        ranks = np.flatnonzero(node_R == node)
        crossing_2R[1, ranks] = needed // len(ranks) + (np.arange(len(ranks)) < needed % len(ranks))
    return crossing_2R
