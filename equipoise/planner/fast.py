"""The compiled planner of one layer: `level`, `near`, `fill`, trades (`_level.py` and so on) and `evaluate`, together.

Same decisions as `reference.py`, bit for bit: integers only, no clock, no randomness, ties by index. The loops over
micro-steps are linear in M.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.exchange import kept_permille
from equipoise.cost.kernels import COLUMNS, PULL, RETURN, Settled, price_holders, price_settled, settle
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


class Entry(NamedTuple):
    """One (micro-step, layer), and what is tried for it."""

    load_RE: np.ndarray
    base: Traffic
    homes_RH: np.ndarray
    keep_permille_N: np.ndarray
    trial: Holders
    """Replicas that are tried, written again and again."""
    line: np.ndarray
    """[COLUMNS] their price line."""


class Kept(NamedTuple):
    """The best replicas so far: views into the plan of the layer."""

    expert_RS: np.ndarray
    rows_RS: np.ndarray
    line: np.ndarray


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
    line = np.zeros(COLUMNS, dtype=np.int64)
    mask_NE, nodes = home_nodes(home_E, problem.node_R), nodes_of(problem.node_R)
    alone = Holders(home_E, nodes, none_R0, none_R0)
    trial = Holders(home_E, nodes, expert_MRS[0].copy(), rows_MRS[0].copy())
    for m in range(micro_steps):
        base = traffic(load_MRE[m], home_E, problem.node_R, mask_NE, forwards)
        price_holders(load_MRE[m], base, alone, keep_permille_N, tables, False, closed_MC[m])
        line_MC[m] = closed_MC[m]
        if problem.slots > 0:
            entry = Entry(load_MRE[m], base, homes_RH, keep_permille_N, trial, line)
            kept = Kept(expert_MRS[m], rows_MRS[m], line_MC[m])
            link_R4 = _level_ranks(entry, kept, problem, tables)
            if not problem.by_skew and len(mask_NE) > 1:
                _trade(entry, kept, link_R4, problem, tables)
    return LayerPlan(home_E, expert_MRS, rows_MRS, line_MC, closed_MC, closed_MC)


@compiled
def _level_ranks(entry: Entry, kept: Kept, problem: LayerProblem, tables: Tables) -> np.ndarray:
    """Keep the replicas that level ranks, where they pay or the gate is open; returns [R, 4] rows on the links then."""
    base, trial = entry.base, entry.trial
    best, link_R4 = _total(kept.line) if problem.gated else base.total_E.sum(), base.link_R4
    for widest in range(len(problem.domain_DR)):
        domain_DR = problem.domain_DR[: widest + 1]
        for slack in SLACKS:
            replicas = trial.rep_expert_RS, trial.rep_rows_RS
            top = fill(base.total_E, trial.home_E, entry.homes_RH, domain_DR, problem.min_rows, slack, *replicas)
            if trial.rep_expert_RS.max() < 0:
                break
            settled = _price(entry, tables)
            value = _total(entry.line) if problem.gated else top
            if value < best:
                best, link_R4 = value, settled.link_R4
                _keep(entry, kept)
            if not problem.gated or entry.line[PULL] + entry.line[RETURN] <= _total(entry.line) // CHEAP:
                break
    return link_R4


@compiled
def _trade(entry: Entry, kept: Kept, link_R4: np.ndarray, problem: LayerProblem, tables: Tables) -> None:
    """Keep trades across nodes, then those inside, each if it is cheaper."""
    base, trial = entry.base, entry.trial
    if problem.trades_across:
        _begin(trial, kept)
        if problem.slots > 1:
            _fill_but_one(entry, problem)
        start_R4 = settle(entry.load_RE, base, trial, False).link_R4
        if trade_across(entry.load_RE, base, trial, entry.homes_RH, start_R4, problem.min_rows):
            settled = _price(entry, tables)
            if _total(entry.line) < _total(kept.line):
                link_R4 = settled.link_R4
                _keep(entry, kept)
    # Where tokens are handed on, the rank that computes does not receive from other nodes.
    _begin(trial, kept)
    if not tables.forwards and trade_inside(base, trial, entry.homes_RH, link_R4, problem.min_rows):
        _price(entry, tables)
        if _total(entry.line) < _total(kept.line):
            _keep(entry, kept)


@compiled
def _fill_but_one(entry: Entry, problem: LayerProblem) -> None:
    """Level the ranks of each node anew with one slot less, so that each has one left for trades."""
    trial, total_E = entry.trial, entry.base.total_E
    ranks, slots = trial.rep_expert_RS.shape
    expert_RS, rows_RS = np.full((ranks, slots - 1), -1), np.zeros((ranks, slots - 1), dtype=np.int64)
    domain_DR = problem.domain_DR[:1]
    fill(total_E, trial.home_E, entry.homes_RH, domain_DR, problem.min_rows, 0, expert_RS, rows_RS)
    trial.rep_expert_RS[:, -1], trial.rep_rows_RS[:, -1] = -1, 0
    trial.rep_expert_RS[:, :-1], trial.rep_rows_RS[:, :-1] = expert_RS, rows_RS


@compiled
def _begin(trial: Holders, kept: Kept) -> None:
    trial.rep_expert_RS[:], trial.rep_rows_RS[:] = kept.expert_RS, kept.rows_RS


@compiled
def _price(entry: Entry, tables: Tables) -> Settled:
    """Fill the price line of the replicas that are tried; returns what every rank does."""
    settled = settle(entry.load_RE, entry.base, entry.trial, False)
    price_settled(settled, entry.base, entry.trial, entry.keep_permille_N, tables, False, entry.line)
    return settled


@compiled
def _keep(entry: Entry, kept: Kept) -> None:
    kept.expert_RS[:], kept.rows_RS[:], kept.line[:] = entry.trial.rep_expert_RS, entry.trial.rep_rows_RS, entry.line


@compiled
def _total(line: np.ndarray) -> int:
    """Nanoseconds of a price line."""
    return int(line[: RETURN + 1].sum())
