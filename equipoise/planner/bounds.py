"""Bounds: what no plan can beat, found by other means than the planner's own.

1. Node bound of given homes: replicas inside nodes can level a node's ranks, never its total. The busiest rank has at
   least the fullest node's rows over its ranks.
2. Split optimum of given replicas: a linear programme (HiGHS) over how many rows each replica takes.
3. Exact homes for small cases: a mixed-integer programme (HiGHS) that assigns experts to nodes.

Slow and obvious; used by tests and benchmarks, and by the `lplb` baseline.

Invariants (asserted by the tests):
1. No plan whose replicas stay inside nodes has a busiest rank below the node bound of its homes.
2. Rows may be split in whole rows without loss: the least busiest rank in whole rows is the optimum rounded up, because
   the split is a flow and a flow with whole capacities has whole solutions.
3. `exact_homes` is the best of all assignments, as counted out on tiny cases.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix


class SplitOptimum(NamedTuple):
    """The best split of rows over given replicas."""

    top: float
    """Rows of the busiest rank."""
    rows_P: np.ndarray
    """[P] rows each replica takes, in the order given; fractions are possible."""


class ExactHomes(NamedTuple):
    """The best assignment of experts to nodes."""

    node_E: np.ndarray
    value: float
    """Weighted sum over micro-steps of the fullest node's rows per rank."""


def node_bound_ML(loads: LoadMatrix, home_LE: np.ndarray, cluster: Cluster) -> np.ndarray:
    """[M, L] least skew that homes allow with replicas inside nodes; 1 where nothing is loaded."""
    per_rank_MLN = _node_loads(loads, home_LE, cluster) / cluster.ranks_N
    mean_ML = loads.load_MLRE.sum(axis=(2, 3)) / cluster.ep
    return np.where(mean_ML > 0, per_rank_MLN.max(axis=-1) / np.maximum(mean_ML, 1e-300), 1.0)


def node_bound_rows_ML(loads: LoadMatrix, home_LE: np.ndarray, cluster: Cluster) -> np.ndarray:
    """[M, L] the same as whole rows of the busiest rank."""
    bound_ML: np.ndarray = (-(-_node_loads(loads, home_LE, cluster) // cluster.ranks_N)).max(axis=-1)
    return bound_ML


def _node_loads(loads: LoadMatrix, home_LE: np.ndarray, cluster: Cluster) -> np.ndarray:
    """[M, L, N] rows of the experts whose home is in each node."""
    node_LE = cluster.node_array_R[home_LE]
    in_node_LEN = (node_LE[:, :, None] == np.arange(cluster.num_ep_nodes)).astype(np.int64)
    return np.einsum("mle,len->mln", loads.total_MLE(), in_node_LEN)


def split_optimum(
    load_E: np.ndarray, home_E: np.ndarray, replicas: Sequence[tuple[int, int]], *, ranks: int
) -> SplitOptimum:
    """Find the split over given replicas that makes the busiest rank least loaded.

    Args:
        load_E: [E] rows of each expert in one micro-step of one layer
        home_E: [E] home rank of each expert
        replicas: (expert, rank) of each replica
        ranks: ranks of the EP group
    """
    base_R = np.bincount(home_E, weights=load_E, minlength=ranks)
    if not len(replicas):
        return SplitOptimum(float(base_R.max()), np.zeros(0))
    expert_P, rank_P = np.array(replicas, dtype=np.int64).T
    count = len(expert_P)
    index_P, one_P = np.arange(count), np.ones(count)
    # Variables: rows of each replica, then the busiest rank. Lines: every rank stays below it; no expert gives more
    # than it has.
    into = sparse.csr_array((one_P, (rank_P, index_P)), shape=(ranks, count))
    out_of = sparse.csr_array((one_P, (home_E[expert_P], index_P)), shape=(ranks, count))
    given = sparse.csr_array((one_P, (expert_P, index_P)), shape=(len(load_E), count))
    top_R1 = sparse.csr_array(-np.ones((ranks, 1)))
    lines = sparse.block_array([[into - out_of, top_R1], [given, None]], format="csr")
    aim = np.append(np.zeros(count), 1.0)
    solved = optimize.linprog(aim, A_ub=lines, b_ub=np.concatenate([-base_R, load_E]), method="highs")
    if not solved.success:
        raise InfeasiblePlanError(f"no optimum of the split over {count} replicas: {solved.message}")
    return SplitOptimum(float(solved.fun), solved.x[:count])


def exact_homes(load_ME: np.ndarray, ranks_N: np.ndarray, *, weight_M: np.ndarray | None = None) -> ExactHomes:
    """Find the homes whose fullest node is least loaded, summed over micro-steps; for small cases.

    Args:
        load_ME: [M, E] rows
        ranks_N: [N] ranks of each node; a node keeps as many experts as its ranks own
        weight_M: [M] weight of each micro-step; all 1 by default
    """
    micro_steps, experts = load_ME.shape
    nodes = len(ranks_N)
    if experts % int(ranks_N.sum()):
        raise InfeasiblePlanError(f"{experts} experts do not divide by {int(ranks_N.sum())} ranks")
    room_N = ranks_N * (experts // int(ranks_N.sum()))
    weights = np.ones(micro_steps) if weight_M is None else weight_M
    choices = experts * nodes
    # Variables: is expert e in node n, at e * nodes + n; then the fullest node of each micro-step.
    one_node = sparse.hstack([sparse.kron(sparse.eye_array(experts), np.ones((1, nodes))), _zeros(experts, load_ME)])
    full = sparse.hstack([sparse.kron(np.ones((1, experts)), sparse.eye_array(nodes)), _zeros(nodes, load_ME)])
    per_rank = sparse.kron(load_ME, sparse.diags_array(1 / ranks_N))
    below = sparse.hstack([per_rank, -sparse.kron(sparse.eye_array(micro_steps), np.ones((nodes, 1)))])
    solved = optimize.milp(
        np.concatenate([np.zeros(choices), weights]),
        integrality=np.concatenate([np.ones(choices), np.zeros(micro_steps)]),
        bounds=optimize.Bounds(0, np.concatenate([np.ones(choices), np.full(micro_steps, np.inf)])),
        constraints=[
            optimize.LinearConstraint(one_node.tocsc(), 1, 1),
            optimize.LinearConstraint(full.tocsc(), room_N, room_N),
            optimize.LinearConstraint(below.tocsc(), -np.inf, 0),
        ],
    )
    if not solved.success:
        raise InfeasiblePlanError(f"no exact homes for {experts} experts on {nodes} nodes: {solved.message}")
    node_E = solved.x[:choices].reshape(experts, nodes).argmax(axis=1)
    return ExactHomes(node_E, float(solved.fun))


def _zeros(lines: int, load_ME: np.ndarray) -> sparse.csr_array:
    return sparse.csr_array((lines, len(load_ME)))
