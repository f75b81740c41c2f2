"""Turn a baseline's decisions into a `Draft`, priced with the planner's own kernels, so that all policies pay alike.

A baseline decides homes and, per layer, `quota_MER`: the rows every holder takes of every expert. Everything else
follows from these two. Does not know how they were chosen.

How a persistent baseline (copies stay for the whole window) is charged:
1. Compute and all-to-all of every (micro-step, layer) by `cost.kernels.price`, as every other plan.
2. Publish: weights to every copy that is not on its owner, once per window, each layer by its busiest link.
3. Collect: in update windows the gradient of every such copy to the owner, which adds up all that it gets; in recompute
   windows nothing but the weights of experts that left their owner, which must come back.
Both hide behind the layers as those of displaced experts do.

Invariants (asserted by the tests):
1. Quotas survive: the plan's `quota_ER` is the quota that was given.
2. Nothing is free: a copy away from its owner costs publish seconds and bytes, in update collect too.
"""

from collections.abc import Sequence

import numpy as np

from equipoise.core.compiled import compiled
from equipoise.core.plan import Bytes, Seconds
from equipoise.cost.edges import Edges
from equipoise.cost.exchange import kept_permille
from equipoise.cost.kernels import COLUMNS, price
from equipoise.cost.model import Tables
from equipoise.planner.assemble import Draft, Links, Task, edge_links, price_edges


def owner_homes(task: Task) -> np.ndarray:
    """[L, E] contiguous homes: every expert at its owner."""
    per_rank = task.cluster.home_slots(task.model)
    return np.tile(np.arange(task.model.experts) // per_rank, (task.model.layers, 1))


def price_window(
    load_MLRE: np.ndarray,
    home_LE: np.ndarray,
    *,
    rep_expert_MLRS: np.ndarray,
    rep_rows_MLRS: np.ndarray,
    node_R: np.ndarray,
    tables: Tables,
) -> np.ndarray:
    """[M, L, COLUMNS] price lines of replicas that stay, so that no pull or return is charged entry by entry."""
    # Copies, because a read-only array would compile the kernels a second time.
    lines = [
        _price_layer(
            np.array(load_MLRE[:, layer]),
            np.array(home_LE[layer]),
            np.array(rep_expert_MLRS[:, layer]),
            np.array(rep_rows_MLRS[:, layer]),
            node_R,
            tables,
        )
        for layer in range(len(home_LE))
    ]
    return np.stack(lines, axis=1)


@compiled
def _price_layer(
    load_MRE: np.ndarray,
    home_E: np.ndarray,
    rep_expert_MRS: np.ndarray,
    rep_rows_MRS: np.ndarray,
    node_R: np.ndarray,
    tables: Tables,
) -> np.ndarray:
    line_MC = np.zeros((len(load_MRE), COLUMNS), dtype=np.int64)
    none_EE = np.zeros((0, 0), dtype=np.int64)
    keep_permille_N = kept_permille(node_R[home_E], node_R.max() + 1, none_EE, tables.top_k)
    for m in range(len(load_MRE)):
        rep_expert_RS, rep_rows_RS = rep_expert_MRS[m], rep_rows_MRS[m]
        price(load_MRE[m], home_E, node_R, rep_expert_RS, rep_rows_RS, keep_permille_N, tables, True, line_MC[m])
    return line_MC


def price_homes(task: Task, home_LE: np.ndarray) -> np.ndarray:
    """[M, L, COLUMNS] price lines of given homes without replicas."""
    none = np.zeros((task.loads.num_micro_steps, task.model.layers, task.cluster.ep, 0), dtype=np.int64)
    return price_window(
        task.loads.load_MLRE,
        home_LE,
        rep_expert_MLRS=none,
        rep_rows_MLRS=none,
        node_R=task.cluster.node_array_R,
        tables=_tables(task, home_LE),
    )


def persistent_draft(
    task: Task,
    home_LE: np.ndarray,
    *,
    quotas_L: Sequence[np.ndarray],
    holds_LER: np.ndarray,
    planning_s: float = 0.0,
) -> Draft:
    """Draft a plan whose copies stay for the whole window.

    Args:
        task: the window
        home_LE: [L, E] the copy that counts as home
        quotas_L: per layer [M, E, R] rows of each holder
        holds_LER: [L, E, R] bool, where a copy stands, used or not: what is published and collected
        planning_s: planning seconds on the critical path
    """
    expert_MLRS, rows_MLRS = fill_slots(home_LE, quotas_L)
    line_MLC = price_window(
        task.loads.load_MLRE,
        home_LE,
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        node_R=task.cluster.node_array_R,
        tables=_tables(task, home_LE, expert_MLRS),
    )
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=line_MLC,
        closed_MLC=price_homes(task, home_LE),
        static_MLC=price_homes(task, owner_homes(task)),
        edges=copy_edges(task, holds_LER),
        charges=Seconds(planning=planning_s),
        moved=copy_bytes(task, holds_LER),
        persistent=True,
        cross_node=True,
        executable=False,
    )


def fill_slots(home_LE: np.ndarray, quotas_L: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Replica slots from quotas: ([M, L, R, S] expert, -1 where empty; [M, L, R, S] rows), S as wide as needed."""
    micro_steps, experts, ranks = quotas_L[0].shape
    layers: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for home_E, quota_MER in zip(home_LE, quotas_L, strict=True):
        away_MRE = quota_MER.transpose(0, 2, 1).copy()
        away_MRE[:, home_E, np.arange(experts)] = 0
        m_P, r_P, e_P = np.nonzero(away_MRE)
        slot_P = count_before((m_P * ranks + r_P)[None, :])[0]
        layers.append((m_P * ranks + r_P, slot_P, e_P, away_MRE[m_P, r_P, e_P]))
    width = max((int(slot_P.max(initial=-1)) + 1 for _, slot_P, _, _ in layers), default=0)
    expert = np.full((len(layers), micro_steps * ranks, width), -1)
    rows = np.zeros_like(expert)
    for layer, (place_P, slot_P, e_P, rows_P) in enumerate(layers):
        expert[layer, place_P, slot_P] = e_P
        rows[layer, place_P, slot_P] = rows_P
    shape = (len(layers), micro_steps, ranks, width)
    return expert.reshape(shape).swapaxes(0, 1).copy(), rows.reshape(shape).swapaxes(0, 1).copy()


def count_before(value_LX: np.ndarray) -> np.ndarray:
    """[L, X] how many earlier entries of its line have the same value: slots handed out in order."""
    order = np.argsort(value_LX, axis=1, kind="stable")
    ordered = np.take_along_axis(value_LX, order, axis=1)
    place = np.broadcast_to(np.arange(value_LX.shape[1]), value_LX.shape)
    is_first = np.ones_like(ordered, dtype=bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = np.maximum.accumulate(np.where(is_first, place, 0), axis=1)
    count = np.empty_like(value_LX)
    np.put_along_axis(count, order, place - first, axis=1)
    return count


def copy_edges(task: Task, holds_LER: np.ndarray) -> Edges:
    """Publishing and collecting copies that stay, and adding up what is collected."""
    cost = task.cost
    edges = price_edges(cost, *_edges(task, holds_LER))
    if task.loads.stage == "update":
        edges.ns_2L[1] += cost.add_ns(cost.edge_bytes("collect")) * _most_added(holds_LER)
    return edges


def _most_added(holds_LER: np.ndarray) -> np.ndarray:
    """[L] gradients that the busiest owner adds up: all of an expert's copies but the first."""
    layers, _, ranks = holds_LER.shape
    most_L: np.ndarray = (holds_LER.sum(axis=2) - 1).reshape(layers, ranks, -1).sum(axis=2).max(axis=1)
    return most_L


def copy_bytes(task: Task, holds_LER: np.ndarray) -> Bytes:
    """Bytes that publishing and collecting these copies move."""
    inside = across = 0
    for edge, links in zip(("publish", "collect"), _edges(task, holds_LER), strict=True):
        inside += links.all_inside * task.cost.edge_bytes(edge)
        across += links.all_across * task.cost.edge_bytes(edge)
    return Bytes(edge_inside=inside, edge_across=across)


def _edges(task: Task, holds_LER: np.ndarray) -> tuple[Links, Links]:
    """Copies over the links at publish and at collect."""
    owner_E = owner_homes(task)[0]
    at_owner_LE = holds_LER[:, np.arange(len(owner_E)), owner_E]
    publish = edge_links(holds_LER, task.cluster)
    if task.loads.stage == "update":
        return publish, publish
    # One copy of each expert that left its owner comes back: the lowest rank's.
    lowest_LER = np.cumsum(holds_LER, axis=2) == 1
    return publish, edge_links(holds_LER & lowest_LER & ~at_owner_LE[:, :, None], task.cluster)


def _tables(task: Task, home_LE: np.ndarray, rep_expert_MLRS: np.ndarray | None = None) -> Tables:
    """Prices up to the most non-empty slots that any rank can have here."""
    ranks = task.cluster.ep
    most = max(int(np.bincount(home_E, minlength=ranks).max()) for home_E in home_LE)
    return task.cost.tables(most + (0 if rep_expert_MLRS is None else rep_expert_MLRS.shape[-1]))
