"""The compiled planner of one layer: `level`, `near`, `fill`, trades (`_level.py` and so on) and `evaluate`, together.

Same decisions as `reference.py`, bit for bit: integers only, no clock, no randomness, ties by index. The loops over
micro-steps are linear in M.
"""

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.exchange import kept_permille
from equipoise.cost.kernels import COLUMNS, PULL, RETURN, price_holders, price_settled, settle
from equipoise.cost.links import Holders, Traffic, home_nodes, nodes_of, traffic
from equipoise.cost.model import Tables
from equipoise.planner import layer
from equipoise.planner._fill import fill
from equipoise.planner._level import level
from equipoise.planner._near import near
from equipoise.planner._trade import trade_across, trade_inside
from equipoise.planner.layer import CHEAP, SLACKS, Kernels, LayerPlan, LayerProblem


def plan_layer(
    load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Plan one layer of one window with compiled kernels. See `layer.plan_layer`."""
    return layer.plan_layer(load_MRE, warm_home_E, pair_EE, problem, tables, Kernels(level, near, evaluate))


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
    node_E, forwards = problem.node_R[home_E], tables.forwards == 1
    keep_permille_N = kept_permille(node_E, problem.node_R.max() + 1, pair_EE, tables.top_k)
    expert_MRS = np.full((micro_steps, ranks, problem.slots), -1)
    rows_MRS = np.zeros((micro_steps, ranks, problem.slots), dtype=np.int64)
    line_MC = np.zeros((micro_steps, COLUMNS), dtype=np.int64)
    closed_MC = np.zeros((micro_steps, COLUMNS), dtype=np.int64)
    none_R0 = np.zeros((ranks, 0), dtype=np.int64)
    expert_RS, rows_RS = expert_MRS[0].copy(), rows_MRS[0].copy()
    line = np.zeros(COLUMNS, dtype=np.int64)
    mask_NE, nodes = home_nodes(home_E, problem.node_R), nodes_of(problem.node_R)
    for m in range(micro_steps):
        load_RE = load_MRE[m]
        base = traffic(load_RE, home_E, problem.node_R, mask_NE, forwards)
        alone = Holders(home_E, nodes, none_R0, none_R0)
        closed = price_holders(load_RE, base, alone, keep_permille_N, tables, False, closed_MC[m])
        best, line_MC[m], link_R4 = closed if problem.gated else base.total_E.sum(), closed_MC[m], base.link_R4
        if problem.slots == 0:
            continue
        shared = Holders(home_E, nodes, expert_RS, rows_RS)
        for widest in range(len(problem.domain_DR)):
            domain_DR = problem.domain_DR[: widest + 1]
            for slack in SLACKS:
                top = fill(base.total_E, home_E, homes_RH, domain_DR, problem.min_rows, slack, expert_RS, rows_RS)
                if expert_RS.max() < 0:
                    break
                settled = settle(load_RE, base, shared, False)
                opened = price_settled(settled, base, shared, keep_permille_N, tables, False, line)
                value = opened if problem.gated else top
                if value < best:
                    best, line_MC[m], link_R4 = value, line, settled.link_R4
                    expert_MRS[m], rows_MRS[m] = expert_RS, rows_RS
                if not problem.gated or line[PULL] + line[RETURN] <= opened // CHEAP:
                    break
        if problem.by_skew or len(mask_NE) == 1:
            continue
        if problem.trades_across:
            expert_RS[:], rows_RS[:] = expert_MRS[m], rows_MRS[m]
            if problem.slots > 1:
                _fill_but_one(base, shared, homes_RH, problem)
            start_R4 = settle(load_RE, base, shared, False).link_R4
            if trade_across(load_RE, base, shared, homes_RH, start_R4, problem.min_rows):
                settled = settle(load_RE, base, shared, False)
                traded = price_settled(settled, base, shared, keep_permille_N, tables, False, line)
                if traded < line_MC[m, : RETURN + 1].sum():
                    line_MC[m], link_R4 = line, settled.link_R4
                    expert_MRS[m], rows_MRS[m] = expert_RS, rows_RS
        # Where tokens are handed on, the rank that computes does not receive from other nodes.
        expert_RS[:], rows_RS[:] = expert_MRS[m], rows_MRS[m]
        if not forwards and trade_inside(base, shared, homes_RH, link_R4, problem.min_rows):
            traded = price_holders(load_RE, base, shared, keep_permille_N, tables, False, line)
            if traded < line_MC[m, : RETURN + 1].sum():
                line_MC[m], expert_MRS[m], rows_MRS[m] = line, expert_RS, rows_RS
    return LayerPlan(home_E, expert_MRS, rows_MRS, line_MC, closed_MC, closed_MC)


@compiled
def _fill_but_one(base: Traffic, holders: Holders, homes_RH: np.ndarray, problem: LayerProblem) -> None:
    """Level the ranks of each node anew with one slot less, so that each has one left for trades."""
    ranks, slots = holders.rep_expert_RS.shape
    expert_RS, rows_RS = np.full((ranks, slots - 1), -1), np.zeros((ranks, slots - 1), dtype=np.int64)
    domain_DR = problem.domain_DR[:1]
    fill(base.total_E, holders.home_E, homes_RH, domain_DR, problem.min_rows, 0, expert_RS, rows_RS)
    holders.rep_expert_RS[:, -1], holders.rep_rows_RS[:, -1] = -1, 0
    holders.rep_expert_RS[:, :-1], holders.rep_rows_RS[:, :-1] = expert_RS, rows_RS
