"""LPLB: replicas on the edges of a fixed graph between ranks, and a linear programme per micro-step that splits rows.

Our own implementation of DeepSeek's published description. Replicas stay for the whole window; only the split follows
the micro-step. What the description leaves open is decided in the rival's favour: homes stay contiguous or are packed
anew on the window's loads, edges stay inside nodes or one of them leads to the next node, and the cheapest counts.

Steps, per layer:
1. Graph: slot j of rank r is an edge to another rank (`link_ranks`). Two slots in nodes of 8: the cube with its
   diagonals, which has 16 edges. Otherwise rings of growing stride. As a torus, the last slot leads to the next node.
2. Replicas: each edge takes the heaviest expert of its other end that has no replica yet, by the window's loads.
3. Split: `bounds.split_optimum` in every micro-step, rounded to whole rows.
Charged: copies as in `pricing`, and 0.1 ms of planning per (micro-step, layer), as LPLB reports.

Invariants (asserted by the tests):
1. With nodes of equal size every rank has as many edges in as out, none to itself.
2. An expert has at most one replica; rounding loses no row and is off the optimum by at most its replicas' halves.
"""

import numpy as np

from equipoise.core import Cluster
from equipoise.cost.kernels import COMPUTE
from equipoise.planner.assemble import Draft, Task, seconds_of
from equipoise.planner.bounds import split_optimum
from equipoise.planner.eplb import place
from equipoise.planner.pricing import owner_homes, persistent_draft

PLAN_S = 1e-4
"""Seconds of one linear programme, on the critical path because loads are known only after the router."""
EVEN_MASKS, ODD_MASKS = (1, 2), (4, 7)
"""Cube with diagonals: ranks of even parity take from the ends of two of their four edges, odd ones of the others."""


def draft_lplb(task: Task) -> Draft:
    """Draft LPLB's plan of a window: the cheapest of its homes and graphs."""
    load_LE = task.loads.load_MLRE.sum(axis=(0, 2))
    packed_LE = np.stack([place(load_E, ranks=task.cluster.ep, slots=0).argmax(axis=1) for load_E in load_LE])
    graphs = [link_ranks(task.cluster, task.slots)]
    if task.cluster.num_ep_nodes > 1 and task.slots > 1:
        graphs.append(link_ranks(task.cluster, task.slots, torus=True))
    drafts = [_draft(task, home_LE, source_RS) for home_LE in (owner_homes(task), packed_LE) for source_RS in graphs]
    return min(drafts, key=lambda draft: _value(task, draft))


def _value(task: Task, draft: Draft) -> float:
    """What is minimised: seconds, or the busiest ranks alone."""
    if task.objective == "skew":
        return float(draft.line_MLC[..., COMPUTE].sum())
    return seconds_of(task, draft).total


def _draft(task: Task, home_LE: np.ndarray, source_RS: np.ndarray) -> Draft:
    total_MLE = task.loads.total_MLE()
    holds_LER = home_LE[:, :, None] == np.arange(task.cluster.ep)
    quotas = []
    for layer, home_E in enumerate(home_LE):
        replicas = choose_replicas(total_MLE[:, layer].sum(axis=0), home_E, source_RS)
        quotas.append(np.stack([split(load_E, home_E, replicas, task.cluster.ep) for load_E in total_MLE[:, layer]]))
        for expert, rank in replicas:
            holds_LER[layer, expert, rank] = True
    planning_s = PLAN_S * task.loads.num_micro_steps * task.model.layers
    return persistent_draft(task, home_LE, quotas_L=quotas, holds_LER=holds_LER, planning_s=planning_s)


def link_ranks(cluster: Cluster, slots: int, *, torus: bool = False) -> np.ndarray:
    """[R, S] the rank whose expert each slot replicates; -1 where a node has no other rank to link to."""
    source_RS = np.full((cluster.ep, slots), -1)
    for node in range(cluster.num_ep_nodes):
        members = np.flatnonzero(cluster.node_array_R == node)
        inside = _link_node(len(members), slots - 1 if torus else slots)
        source_RS[members, : inside.shape[1]] = np.where(inside >= 0, members[inside], -1)
    if torus:
        source_RS[:, -1] = _next_node(cluster)
    return source_RS


def _link_node(size: int, slots: int) -> np.ndarray:
    """[size, slots] links inside a node, by place in the node."""
    place_R = np.arange(size)
    if (size, slots) == (8, 2):
        is_odd = np.array([bin(r).count("1") % 2 for r in range(size)])[:, None]
        cube: np.ndarray = place_R[:, None] ^ np.where(is_odd, ODD_MASKS, EVEN_MASKS)
        return cube
    stride_S = np.arange(slots) % max(1, size - 1) + 1
    ring = (place_R[:, None] + stride_S) % size
    return np.where(ring == place_R[:, None], -1, ring)


def _next_node(cluster: Cluster) -> np.ndarray:
    """[R] the rank at the same place of the next node, or at its last place where that node is smaller."""
    members_N = [np.flatnonzero(cluster.node_array_R == node) for node in range(cluster.num_ep_nodes)]
    source_R = np.zeros(cluster.ep, dtype=np.int64)
    for node, members in enumerate(members_N):
        there = members_N[(node + 1) % len(members_N)]
        source_R[members] = there[np.minimum(np.arange(len(members)), len(there) - 1)]
    return source_R


def choose_replicas(load_E: np.ndarray, home_E: np.ndarray, source_RS: np.ndarray) -> list[tuple[int, int]]:
    """(expert, rank) of each edge's replica: the heaviest expert of the other end that has none yet."""
    left_R = {
        rank: sorted(np.flatnonzero(home_E == rank).tolist(), key=lambda e: (load_E[e], -e)) for rank in set(home_E)
    }
    replicas = []
    for slot in range(source_RS.shape[1]):
        for rank, source in enumerate(source_RS[:, slot].tolist()):
            if left_R.get(source):
                replicas.append((left_R[source].pop(), rank))
    return replicas


def split(load_E: np.ndarray, home_E: np.ndarray, replicas: list[tuple[int, int]], ranks: int) -> np.ndarray:
    """[E, R] whole rows of each holder at the optimum."""
    quota_ER = np.zeros((len(load_E), ranks), dtype=np.int64)
    best = split_optimum(load_E, home_E, replicas, ranks=ranks)
    for (expert, rank), rows in zip(replicas, np.rint(best.rows_P).astype(np.int64), strict=True):
        quota_ER[expert, rank] = min(rows, load_E[expert])
    quota_ER[np.arange(len(load_E)), home_E] += load_E - quota_ER.sum(axis=1)
    return quota_ER
