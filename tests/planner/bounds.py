"""Bounds: what no plan can beat, found by other means than the planner's own; slow and obvious.

1. Node bound of given homes: replicas inside nodes can level a node's ranks, never its total. The busiest rank has at
   least the fullest node's rows over its ranks.
2. Exact homes for small cases: a mixed-integer programme (HiGHS) that assigns experts to nodes.

`equipoise.planner.baselines.split_optimum` is the third one: the best split over given replicas.
"""

from typing import NamedTuple

import numpy as np
from scipy import optimize, sparse

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix


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
