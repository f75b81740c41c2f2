"""Baselines: the balancers a user could pick instead, on the same loads, slots and cost model as the planner.

    static          contiguous expert parallelism: homes at owners, no replica
    eplb-history    EPLB placed by the previous window's loads (`eplb.py`)
    eplb-oracle     EPLB placed by this window's own loads
    lplb            fixed replica edges, a linear programme per micro-step (`lplb.py`)
    reactive        our micro plan on contiguous homes with exact loads, known only after the router. Charged as UltraEP
                    reports: 0.08 ms of planning per (micro-step, layer), 0.255 ms of weight push (the middle of 0.19 to
                    0.32) where replicas are used. Its gate knows these charges.
    reactive-free   the same with both at zero, so that weights travel for nothing: no such system can exist
    balanced        every rank has the mean load, whatever the routes: the ceiling. It takes as many slots as it likes,
                    sends a uniform all-to-all and moves no weight.

Each policy makes a `Draft`; `assemble.build_plan` checks it like any other plan. None of them is executed.

Invariants (asserted by the tests):
1. Every policy's plan is a checked `Plan` of the given loads; no row is lost.
2. `static` costs its own `static_seconds`. `reactive` is never faster than `reactive-free`.
3. No plan has a busiest rank below that of `balanced`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix
from equipoise.core.compiled import compiled
from equipoise.core.plan import Bytes
from equipoise.cost.clock import REACTIVE_PUSH_NS
from equipoise.cost.kernels import ACROSS, COLUMNS, COMPUTE, EXCHANGE, INSIDE, PULL, RETURN, price
from equipoise.cost.links import kept_permille
from equipoise.cost.model import Tables, interpolate
from equipoise.cost.ranks import Edges, level_links, level_slots
from equipoise.planner.assemble import Draft, Links, Task, build_plan, edge_links, price_edges
from equipoise.planner.bounds import split_optimum
from equipoise.planner.layer import LayerPlan
from equipoise.planner.replicas import plan_layer

# Turn a baseline's decisions into a `Draft`, priced with the planner's own kernels, so that all policies pay alike.
#
# A baseline decides homes and, per layer, `quota_MER`: the rows every holder takes of every expert. Everything else
# follows from these two. Does not know how they were chosen.
#
# How a persistent baseline (copies stay for the whole window) is charged:
# 1. Compute and all-to-all of every (micro-step, layer) by `cost.kernels.price`, as every other plan.
# 2. Publish: weights to every copy that is not on its owner, once per window, each layer by its busiest link.
# 3. Collect: in update windows the gradient of every such copy to the owner, which adds up all that it gets; in
# recompute
#    windows nothing but the weights of experts that left their owner, which must come back.
# Both hide behind the layers as those of displaced experts do.
#
# Invariants (asserted by the tests):
# 1. Quotas survive: the plan's `quota_ER` is the quota that was given.
# 2. Nothing is free: a copy away from its owner costs publish seconds and bytes, in update collect too.


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
) -> Draft:
    """Draft a plan whose copies stay for the whole window.

    Args:
        task: the window
        home_LE: [L, E] the copy that counts as home
        quotas_L: per layer [M, E, R] rows of each holder
        holds_LER: [L, E, R] bool, where a copy stands, used or not: what is published and collected
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


# EPLB, the expert-parallel load balancer everyone has: our own implementation of DeepSeek's published description.
#
# One placement with copies for the whole window, per layer, from loads summed over a window: this one's
# (`eplb-oracle`)
# or the previous one's (`eplb-history`). No groups, no nodes: the global variant, which balances best.
#
# Steps, per layer:
# 1. Copies: every expert has one; each of the `slots` x ranks further slots goes to the expert with the largest load
# per
#    copy (`count_copies`).
# 2. Packing: copies, largest load first, each to the lightest rank that has a free slot (`pack`).
# 3. In every micro-step an expert's rows are shared evenly over its copies, in whole rows; the rows that do not
# divide go
#    to the first copies from one that moves on with the micro-step, so that no rank collects them all
# (`share_evenly`).
#
# Two copies of an expert may stand on one rank: they count twice in the share, and once as a holder.
#
# Invariants (asserted by the tests):
# 1. Every expert has a copy; every rank holds exactly home + replica slots copies.
# 2. No copy can be given to another expert so that the largest load per copy falls.
# 3. Shares of an expert differ by at most one row per copy, and add up to its load.
# 4. Skews of DeepSeek's own code on real traces are reproduced within 0.5 %.


def draft_eplb(task: Task, *, predictor: LoadMatrix | None) -> Draft:
    """Draft EPLB's plan of a window.

    Args:
        task: the window
        predictor: the loads the placement is made from; the window's own for the oracle
    """
    load_LE = _checked(task, predictor).load_MLRE.sum(axis=(0, 2))
    copies_LER = np.stack([place(load_E, ranks=task.cluster.ep, slots=task.slots) for load_E in load_LE])
    total_MLE = task.loads.total_MLE()
    quotas = [share_evenly(total_MLE[:, layer], copies_LER[layer]) for layer in range(task.model.layers)]
    holds_LER = copies_LER > 0
    return persistent_draft(task, choose_homes(task, holds_LER), quotas_L=quotas, holds_LER=holds_LER)


def _checked(task: Task, predictor: LoadMatrix | None) -> LoadMatrix:
    if predictor is None:
        raise InfeasiblePlanError(
            f"policy {task.policy!r} places experts by an earlier window's loads; pass history=LoadMatrix(...)"
        )
    found, wanted = (predictor.num_layers, predictor.num_experts), (task.model.layers, task.model.experts)
    if found != wanted:
        raise InfeasiblePlanError(
            f"history has {found[0]} layers of {found[1]} experts, the window {wanted[0]} of {wanted[1]}; "
            "pass the loads of the same model"
        )
    return predictor


def place(load_E: np.ndarray, *, ranks: int, slots: int) -> np.ndarray:
    """[E, R] number of copies of each expert on each rank."""
    experts = len(load_E)
    copies_E = count_copies(load_E, experts + slots * ranks)
    expert_C = np.repeat(np.arange(experts), copies_E)
    rank_C = pack(load_E[expert_C] / copies_E[expert_C], ranks)
    placed_ER = np.zeros((experts, ranks), dtype=np.int64)
    np.add.at(placed_ER, (expert_C, rank_C), 1)
    return placed_ER


def count_copies(load_E: np.ndarray, total: int) -> np.ndarray:
    """[E] copies of each expert, `total` in all: each further one to the largest load per copy, ties to the lowest."""
    copies_E = np.ones(len(load_E), dtype=np.int64)
    for _ in range(total - len(load_E)):
        copies_E[np.argmax(load_E / copies_E)] += 1
    return copies_E


def pack(load_C: np.ndarray, ranks: int) -> np.ndarray:
    """[C] rank of each copy: largest load first, to the lightest rank with a free slot; equally many on each rank."""
    free_R = np.full(ranks, len(load_C) // ranks)
    load_R = np.zeros(ranks)
    rank_C = np.zeros(len(load_C), dtype=np.int64)
    for copy in np.argsort(-load_C, kind="stable"):
        rank = int(np.argmin(np.where(free_R > 0, load_R, np.inf)))
        rank_C[copy] = rank
        free_R[rank] -= 1
        load_R[rank] += load_C[copy]
    return rank_C


def share_evenly(load_ME: np.ndarray, copies_ER: np.ndarray) -> np.ndarray:
    """[M, E, R] whole rows of each expert on each rank, shared evenly over its copies."""
    micro_steps, experts = load_ME.shape
    expert_P, rank_P = np.nonzero(copies_ER)
    expert_C = np.repeat(expert_P, copies_ER[expert_P, rank_P])
    rank_C = np.repeat(rank_P, copies_ER[expert_P, rank_P])
    copies_E = copies_ER.sum(axis=1)
    index_C = np.arange(len(expert_C)) - np.repeat(np.cumsum(copies_E) - copies_E, copies_E)
    whole_ME, rest_ME = np.divmod(load_ME, copies_E)
    turn_MC = (index_C + np.arange(micro_steps)[:, None]) % copies_E[expert_C]
    rows_MC = whole_ME[:, expert_C] + (turn_MC < rest_ME[:, expert_C])
    quota_ERM = np.zeros((experts, copies_ER.shape[1], micro_steps), dtype=np.int64)
    np.add.at(quota_ERM, (expert_C, rank_C), rows_MC.T)
    return quota_ERM.transpose(2, 0, 1)


def choose_homes(task: Task, holds_LER: np.ndarray) -> np.ndarray:
    """[L, E] the copy that counts as home: the owner's where it has one, else the lowest rank's."""
    owner_LE = owner_homes(task)
    at_owner_LE = np.take_along_axis(holds_LER, owner_LE[:, :, None], axis=2)[:, :, 0]
    return np.where(at_owner_LE, owner_LE, holds_LER.argmax(axis=2))


# LPLB: replicas on the edges of a fixed graph between ranks, and a linear programme per micro-step that splits rows.
#
# Our own implementation of DeepSeek's published description. Replicas stay for the whole window; only the split
# follows
# the micro-step. What the description leaves open is decided in the rival's favour: homes stay contiguous or are
# packed
# anew on the window's loads, edges stay inside nodes or one of them leads to the next node, and the cheapest counts.
#
# Steps, per layer:
# 1. Graph: slot j of rank r is an edge to another rank (`link_ranks`). Two slots in nodes of 8: the cube with its
#    diagonals, which has 16 edges. Otherwise rings of growing stride. As a torus, the last slot leads to the next
# node.
# 2. Replicas: each edge takes the heaviest expert of its other end that has no replica yet, by the window's loads.
# 3. Split: `bounds.split_optimum` in every micro-step, rounded to whole rows.
# Charged: copies as in `pricing`, and 0.1 ms of planning per (micro-step, layer), as LPLB reports.
#
# Invariants (asserted by the tests):
# 1. With nodes of equal size every rank has as many edges in as out, none to itself.
# 2. An expert has at most one replica; rounding loses no row and is off the optimum by at most its replicas' halves.


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
    return build_plan(task, draft).seconds.total


def _draft(task: Task, home_LE: np.ndarray, source_RS: np.ndarray) -> Draft:
    total_MLE = task.loads.total_MLE()
    holds_LER = home_LE[:, :, None] == np.arange(task.cluster.ep)
    quotas = []
    for layer, home_E in enumerate(home_LE):
        replicas = choose_replicas(total_MLE[:, layer].sum(axis=0), home_E, source_RS)
        quotas.append(np.stack([split(load_E, home_E, replicas, task.cluster.ep) for load_E in total_MLE[:, layer]]))
        for expert, rank in replicas:
            holds_LER[layer, expert, rank] = True
    return persistent_draft(task, home_LE, quotas_L=quotas, holds_LER=holds_LER)


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


POLICIES = ("static", "eplb-history", "eplb-oracle", "lplb", "reactive", "reactive-free", "balanced")


def draft_baseline(task: Task, *, history: LoadMatrix | None) -> Draft:
    """Draft the plan of the task's policy, one of `POLICIES`.

    Args:
        task: the window
        history: the previous window's loads, which "eplb-history" needs
    """
    drafts: dict[str, Callable[[], Draft]] = {
        "static": lambda: draft_static(task),
        "eplb-history": lambda: draft_eplb(task, predictor=history),
        "eplb-oracle": lambda: draft_eplb(task, predictor=task.loads),
        "lplb": lambda: draft_lplb(task),
        "reactive": lambda: draft_reactive(task, push_ns=REACTIVE_PUSH_NS),
        "reactive-free": lambda: draft_reactive(task, push_ns=0),
        "balanced": lambda: draft_balanced(task),
    }
    return drafts[task.policy]()


def draft_static(task: Task) -> Draft:
    """Contiguous homes, no replica."""
    home_LE = owner_homes(task)
    line_MLC = price_homes(task, home_LE)
    none_MLRS = np.zeros((*line_MLC.shape[:2], task.cluster.ep, 0), dtype=np.int64)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=none_MLRS,
        rep_rows_MLRS=none_MLRS,
        line_MLC=line_MLC,
        closed_MLC=line_MLC,
        static_MLC=line_MLC,
        edges=Edges.none(task.model.layers),
        executable=False,
    )


def draft_reactive(task: Task, *, push_ns: int) -> Draft:
    """Our own micro plan on contiguous homes; weights are pushed in the open instead of pulled ahead."""
    made = [_react(task, layer, push_ns) for layer in range(task.model.layers)]
    home_LE = owner_homes(task)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=np.stack([p.rep_expert_MRS for p in made], axis=1),
        rep_rows_MLRS=np.stack([p.rep_rows_MRS for p in made], axis=1),
        line_MLC=np.stack([p.line_MC for p in made], axis=1),
        closed_MLC=np.stack([p.closed_MC for p in made], axis=1),
        static_MLC=np.stack([p.static_MC for p in made], axis=1),
        edges=Edges.none(task.model.layers),
        executable=False,
    )


def _react(task: Task, layer: int, push_ns: int) -> LayerPlan:
    """Plan one layer with every replica that levels, then keep those that pay for their push."""
    # Here, because the module of `layer_problem` needs this one.
    from equipoise.planner.plan import layer_problem

    problem = layer_problem(task, budget=0)
    # It pushes weights between ranks of one node, whatever host stores hold.
    problem, is_gated = problem._replace(domain_DR=problem.domain_DR[:1], trades_across=0, gated=0), bool(problem.gated)
    load_MRE = np.array(task.loads.load_MLRE[:, layer], order="C")
    tables = task.cost.tables(task.cluster.home_slots(task.model) + task.slots)
    none_EE = np.zeros((0, 0), dtype=np.int64)
    made = plan_layer(load_MRE, owner_homes(task)[layer], none_EE, problem, tables)
    line_MC, has_replicas_M = made.line_MC.copy(), (made.rep_rows_MRS > 0).any(axis=(1, 2))
    line_MC[:, PULL] = has_replicas_M * push_ns
    if not is_gated:
        return made._replace(line_MC=line_MC)
    opened_M, closed_M = (line[:, : RETURN + 1].sum(axis=1) for line in (line_MC, made.closed_MC))
    pays_M = has_replicas_M & (opened_M < closed_M)
    return made._replace(
        rep_expert_MRS=np.where(pays_M[:, None, None], made.rep_expert_MRS, -1),
        rep_rows_MRS=np.where(pays_M[:, None, None], made.rep_rows_MRS, 0),
        line_MC=np.where(pays_M[:, None], line_MC, made.closed_MC),
    )


def draft_balanced(task: Task) -> Draft:
    """Lay all rows of an entry end to end by expert and cut them into one equal part per rank."""
    home_LE = owner_homes(task)
    total_MLE = task.loads.total_MLE()
    quotas = [cut_evenly(total_MLE[:, layer], task.cluster.ep) for layer in range(task.model.layers)]
    expert_MLRS, rows_MLRS = fill_slots(home_LE, quotas)
    static_MLC = price_homes(task, home_LE)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=_price_uniform(task),
        closed_MLC=static_MLC,
        static_MLC=static_MLC,
        edges=Edges.none(task.model.layers),
        slots=task.model.experts,
        persistent=True,
        cross_node=True,
        executable=False,
    )


def cut_evenly(load_ME: np.ndarray, ranks: int) -> np.ndarray:
    """[M, E, R] rows of each expert in each of `ranks` equal parts; parts differ by at most one row."""
    end_ME = np.cumsum(load_ME, axis=1)
    start_ME = end_ME - load_ME
    cut_MR = end_ME[:, -1:] * np.arange(ranks + 1) // ranks
    high = np.minimum(end_ME[:, :, None], cut_MR[:, None, 1:])
    low = np.maximum(start_ME[:, :, None], cut_MR[:, None, :-1])
    return np.maximum(high - low, 0)


def _price_uniform(task: Task) -> np.ndarray:
    """[M, L, COLUMNS] price lines if every rank computed the mean and every source sent everyone the same."""
    cost, ranks = task.cost, task.cluster.ep
    ns_SX = cost.compute_ns_SX(task.cluster.home_slots(task.model))
    slots_ML = level_slots(task.loads.total_MLE(), ranks)
    row_MLR = task.loads.load_MLRE.sum(axis=3)
    flat = row_MLR.reshape(-1, ranks), task.cluster.node_array_R, task.model.top_k, cost.sends == "tokens"
    line_MLC = np.zeros((*row_MLR.shape[:2], COLUMNS), dtype=np.int64)
    for at, links in zip(np.ndindex(*row_MLR.shape[:2]), level_links(*flat), strict=True):
        mean = -(-int(row_MLR[at].sum()) // ranks)
        line_MLC[at][COMPUTE] = interpolate(cost.rows_X, ns_SX[slots_ML[at]], mean)
        line_MLC[at][EXCHANGE] = cost.exchange_ns(links.inside, links.across)
        line_MLC[at][[INSIDE, ACROSS]] = links.all_inside, links.all_across
    return line_MLC
