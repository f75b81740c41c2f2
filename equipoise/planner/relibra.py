"""ReLibra (arXiv 2605.08639) on the loads, slots and prices of the planner: the layer planner of the policy `relibra`.

1. Once a window, experts are reordered over nodes by simulated annealing (`anneal`). A move swaps two experts of
   different nodes. What is minimised is `burden`: over all micro-steps, a log-sum-exp of the nodes' rows, one of the
   rows on their links, each at its price, and the price of displaced experts. Scoring is incremental.
2. In each micro-step, hot experts are replicated inside their nodes; replicas and their rows are chosen together.

What the paper leaves open, and what could not be read of it, is decided in the rival's favour:
- Annealing starts from the better of the owners and LPT, and the best state it passed counts.
- Ranks inside nodes are levelled by our own search, or left at owners where that is cheaper; a layer, or a window,
  whose reordering does not pay keeps its homes at the owners.
- Replicas are chosen by our own `evaluate`, trades and gate included. It levels ranks at least as far as an
  incremental greedy, as we read the paper's (`tests/planner/test_relibra.py`). They are pulled ahead like ours.
- Planning is free. Samples stay at their sources, in this policy as in all.
Seeded: the same input gives the same plan. Effort is bounded by `SWAPS` per expert.
"""

from typing import NamedTuple

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.cost.model import Tables
from equipoise.planner import homes
from equipoise.planner.baselines import pack
from equipoise.planner.layer import assign_ranks, level_ranks, node_prices, owners, search_inputs, value_of
from equipoise.planner.replicas import LayerPlan, LayerProblem, evaluate

SWAPS = 100
"""Swaps looked at per expert."""
SHARPNESS = 32.0
"""Of the log-sum-exp, per mean load: N equal nodes count as log(N) / 32 of the mean more than the fullest one."""
HOT, COLD = 1e-3, 1e-6
"""First and last temperature, as shares of what the start costs."""
SEED = 0


class NodeLoads(NamedTuple):
    """What the annealing looks at; rows are per rank of a node."""

    total_ENM: np.ndarray
    """[E, N, M] rows of an expert, if it were in this node."""
    own_ENM: np.ndarray
    """[E, N, M] of these the rows that the node's own sources chose, which do not cross."""
    sent_NM: np.ndarray
    """[N, M] rows of the node's sources."""
    mean_M: np.ndarray
    """[M] rows of a mean rank, at least 1."""
    cost_EN: np.ndarray
    """[E, N] price of an expert in each node."""
    row_weight: float
    link_weight: float


def plan_as_relibra(
    load_MRE: np.ndarray, warm_home_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Plan one layer of one window; arguments as in `layer.plan_layer`; each window is reordered from the owners."""
    owner_E, node_R = owners(load_MRE.shape[2], load_MRE.shape[1]), problem.node_R
    tried = [owner_E]
    if problem.budget > 0:
        home_E = assign_ranks(reordered(load_MRE, problem), owner_E, owner_E, node_R)
        tried += [home_E, level_ranks(search_inputs(load_MRE, problem), home_E, problem, homes.level)]
    trials = [evaluate(load_MRE, home_E, pair_EE, problem, tables) for home_E in tried]
    return min(trials, key=lambda trial: value_of(trial, load_MRE, owner_E, problem))


def reordered(load_MRE: np.ndarray, problem: LayerProblem) -> np.ndarray:
    """[E] node of each expert after annealing from the better of the owners and LPT."""
    ranks, experts = load_MRE.shape[1:]
    node_R, loads = problem.node_R, node_loads(load_MRE, problem)
    starts = owners(experts, ranks), pack(load_MRE.sum(axis=(0, 1)), ranks, node_R=node_R)
    return anneal(loads, min((node_R[home_E] for home_E in starts), key=lambda node_E: burden(loads, node_E)))


def node_loads(load_MRE: np.ndarray, problem: LayerProblem) -> NodeLoads:
    """Add the loads of a layer up by node."""
    node_R = problem.node_R
    in_node_NR = (node_R == np.arange(node_R.max() + 1)[:, None]).astype(np.float64)
    ranks_N1 = in_node_NR.sum(axis=1)[:, None]
    own_ENM = np.einsum("mre,nr->enm", load_MRE.astype(np.float64), in_node_NR)
    total_EM = load_MRE.sum(axis=1).T
    return NodeLoads(
        total_ENM=total_EM[:, None, :] / ranks_N1,
        own_ENM=own_ENM / ranks_N1,
        sent_NM=own_ENM.sum(axis=0) / ranks_N1,
        mean_M=np.maximum(1.0, total_EM.sum(axis=0) / len(node_R)),
        cost_EN=node_prices(owners(load_MRE.shape[2], len(node_R)), problem).astype(np.float64),
        row_weight=float(problem.row_weight),
        link_weight=0.0 if problem.by_skew else float(problem.link_weight),
    )


def burden(loads: NodeLoads, node_E: np.ndarray) -> float:
    """What is minimised, in 1/1024 rows of the busiest rank."""
    value, _, _ = _state_of(loads, node_E)
    return float(value)


def anneal(loads: NodeLoads, start_E: np.ndarray) -> np.ndarray:
    """[E] node of each expert: the best state of a random walk over swaps that takes ever fewer steps upwards."""
    experts, rng = len(start_E), np.random.default_rng(SEED)
    pair_X2 = rng.integers(0, experts, size=(SWAPS * experts, 2))
    # Metropolis: a swap that costs x more is taken with probability exp(-x / temperature).
    heat_X = burden(loads, start_E) * np.geomspace(HOT, COLD, len(pair_X2))
    return walk(loads, start_E, pair_X2, -np.log(1.0 - rng.random(len(pair_X2))) * heat_X)


@compiled
def walk(loads: NodeLoads, start_E: np.ndarray, pair_X2: np.ndarray, allowed_X: np.ndarray) -> np.ndarray:
    """[E] the best state of a walk over the swaps in `pair_X2`, each taken if it costs at most `allowed_X` more."""
    node_E, best_E = start_E.copy(), start_E.copy()
    value, (total_NM, own_NM), soft_2NM = _state_of(loads, node_E)
    best = value
    micro_steps = len(loads.mean_M)
    trial_42M = np.empty((4, 2, micro_steps))
    for x in range(len(pair_X2)):
        e, f = pair_X2[x]
        a, b = node_E[e], node_E[f]
        if a == b:
            continue
        more = loads.cost_EN[e, b] + loads.cost_EN[f, a] - loads.cost_EN[e, a] - loads.cost_EN[f, b]
        for m in range(micro_steps):
            for side, gone, come, n in ((0, e, f, a), (1, f, e, b)):
                total = total_NM[n, m] + loads.total_ENM[come, n, m] - loads.total_ENM[gone, n, m]
                own = own_NM[n, m] + loads.own_ENM[come, n, m] - loads.own_ENM[gone, n, m]
                trial_42M[0, side, m], trial_42M[1, side, m] = total, own
                trial_42M[2, side, m], trial_42M[3, side, m] = _soft(loads, total, own, n, m)
            full, busy = trial_42M[2, :, m].sum(), trial_42M[3, :, m].sum()
            for n in range(len(total_NM)):
                if n not in (a, b):
                    full += soft_2NM[0, n, m]
                    busy += soft_2NM[1, n, m]
            more += _micro_step_value(loads, full, busy, m)
            more -= _micro_step_value(loads, soft_2NM[0, :, m].sum(), soft_2NM[1, :, m].sum(), m)
        if more > allowed_X[x]:
            continue
        node_E[e], node_E[f] = b, a
        value += more
        for side, n in ((0, a), (1, b)):
            total_NM[n], own_NM[n] = trial_42M[0, side], trial_42M[1, side]
            soft_2NM[0, n], soft_2NM[1, n] = trial_42M[2, side], trial_42M[3, side]
        if value < best:
            best = value
            best_E[:] = node_E
    return best_E


@compiled
def _state_of(loads: NodeLoads, node_E: np.ndarray) -> tuple[float, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The burden, [N, M] rows of each node's experts and those of them that do not cross, and their exponentials."""
    nodes, micro_steps = loads.sent_NM.shape
    total_NM, own_NM = np.zeros((nodes, micro_steps)), np.zeros((nodes, micro_steps))
    soft_2NM = np.zeros((2, nodes, micro_steps))
    value = 0.0
    for e in range(len(node_E)):
        value += loads.cost_EN[e, node_E[e]]
        total_NM[node_E[e]] += loads.total_ENM[e, node_E[e]]
        own_NM[node_E[e]] += loads.own_ENM[e, node_E[e]]
    for m in range(micro_steps):
        for n in range(nodes):
            soft_2NM[0, n, m], soft_2NM[1, n, m] = _soft(loads, total_NM[n, m], own_NM[n, m], n, m)
        value += _micro_step_value(loads, soft_2NM[0, :, m].sum(), soft_2NM[1, :, m].sum(), m)
    return value, (total_NM, own_NM), soft_2NM


@compiled
def _soft(loads: NodeLoads, total: float, own: float, n: int, m: int) -> tuple[float, float]:
    """Exponentials of a node's rows, and of those that enter it and that leave it."""
    scale = SHARPNESS / loads.mean_M[m]
    # Above e^600 all is as bad: a node with 18 times the mean.
    full, into = min(600.0, scale * total), min(600.0, scale * (total - own))
    out = min(600.0, scale * (loads.sent_NM[n, m] - own))
    return np.exp(full), np.exp(into) + np.exp(out)


@compiled
def _micro_step_value(loads: NodeLoads, full: float, busy: float, m: int) -> float:
    """What one micro-step costs, given the sums of exponentials over nodes."""
    return (loads.row_weight * np.log(full) + loads.link_weight * np.log(busy)) * loads.mean_M[m] / SHARPNESS
