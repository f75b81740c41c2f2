"""Baselines: the balancers a user could pick instead, on the same loads, slots and cost model as the planner.

    static          contiguous expert parallelism: homes at owners, no replica
    lpt             homes by longest processing time first over this window's loads, no replica
    eplb-history    EPLB placed by the previous window's loads
    eplb-oracle     EPLB placed by this window's own loads
    lplb            fixed replica edges, a linear programme per micro-step
    eplb-oracle-blind, lplb-blind    the same copies and quotas, dispatched without asking where a token is
    relibra         reordered homes, then replicas inside nodes per micro-step: `relibra.py`, made like our own plans
    reactive        our micro plan on contiguous homes with exact loads, known only after the router. Charged as UltraEP
                    reports: 0.08 ms of planning per (micro-step, layer), 0.255 ms of weight push (the middle of 0.19 to
                    0.32) where replicas are used. Its gate knows these charges.
    reactive-free   the same with both at zero, so that weights travel for nothing: no such system can exist
    balanced        every rank has the mean load, whatever the routes: the ceiling. It takes as many slots as it likes,
                    sends a uniform all-to-all and moves no weight.

Each policy makes a `Draft`; `assemble.build_plan` checks and charges it like any other plan. EPLB and LPLB are our own
implementations of DeepSeek's published descriptions. Rows of an expert go to the copy on their own rank, then to copies
in their own node, then elsewhere, as far as the copies' quotas allow (`core.split`): the descriptions do not say which
copy a token takes, and nearest first never crosses nodes more often. Only `lpt` and `relibra` can be executed as they
are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, sparse

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix
from equipoise.core.plan import Bytes
from equipoise.core.split import BLIND
from equipoise.core.value import numbered
from equipoise.cost.kernels import COMPUTE, PULL, RETURN
from equipoise.cost.window import Edges, ExpertLinks, edge_links, price_edges, price_level, price_window
from equipoise.cost.work import REACTIVE_PUSH_NS
from equipoise.planner.assemble import Draft, WindowTask, build_plan, home_slots_of
from equipoise.planner.layer import layer_problem, plan_layer
from equipoise.planner.replicas import LayerPlan

POLICIES = (
    "static",
    "lpt",
    "eplb-history",
    "eplb-oracle",
    "eplb-oracle-blind",
    "lplb",
    "lplb-blind",
    "relibra",
    "reactive",
    "reactive-free",
    "balanced",
)


def draft_baseline(task: WindowTask, *, history: LoadMatrix | None) -> Draft:
    """Draft the plan of the task's policy, one of `POLICIES` but "relibra", which plans layer by layer.

    Args:
        task: the window
        history: the previous window's loads, which "eplb-history" needs
    """
    drafts: dict[str, Callable[[], Draft]] = {
        "static": lambda: replace(homes_draft(task, owner_homes(task)), executable=False),
        "lpt": lambda: homes_draft(task, packed_homes(task)),
        "eplb-history": lambda: draft_eplb(task, predictor=history),
        "eplb-oracle": lambda: draft_eplb(task, predictor=task.loads),
        "lplb": lambda: draft_lplb(task),
        "reactive": lambda: draft_reactive(task, push_ns=REACTIVE_PUSH_NS),
        "reactive-free": lambda: draft_reactive(task, push_ns=0),
        "balanced": lambda: draft_balanced(task),
    }
    return drafts[task.policy.removesuffix("-blind")]()


def packed_homes(task: WindowTask) -> np.ndarray:
    """[L, E] homes by longest processing time first; of equally light ranks, one of the lightest node."""
    load_LE, node_R = task.loads.load_MLRE.sum(axis=(0, 2)), task.cluster.node_array_R
    return np.stack([pack(load_E, task.cluster.ep, node_R=node_R) for load_E in load_LE])


def homes_draft(task: WindowTask, home_LE: np.ndarray) -> Draft:
    """These homes, no replica."""
    line_MLC = price_window(task.cost, task.loads, home_LE)
    none_MLRS = np.zeros((*line_MLC.shape[:2], task.cluster.ep, 0), dtype=np.int64)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=home_slots_of(home_LE, task.cluster.ep),
        rep_expert_MLRS=none_MLRS,
        rep_rows_MLRS=none_MLRS,
        line_MLC=line_MLC,
        closed_MLC=line_MLC,
        edges=Edges.none(task.model.layers),
    )


def draft_reactive(task: WindowTask, *, push_ns: int) -> Draft:
    """Our own micro plan on contiguous homes; weights are pushed in the open instead of pulled ahead."""
    made = [_react(task, layer, push_ns) for layer in range(task.model.layers)]
    return layers_draft(made, edges=Edges.none(task.model.layers), executable=False)


def layers_draft(made: Sequence[LayerPlan], **more: Any) -> Draft:
    """Stack the plans of all layers; `more` is what else a draft has."""
    home_LE = np.stack([p.home_E for p in made])
    return Draft(
        home_LE=home_LE,
        home_slot_LE=home_slots_of(home_LE, made[0].rep_expert_MRS.shape[1]),
        rep_expert_MLRS=np.stack([p.rep_expert_MRS for p in made], axis=1),
        rep_rows_MLRS=np.stack([p.rep_rows_MRS for p in made], axis=1),
        line_MLC=np.stack([p.line_MC for p in made], axis=1),
        closed_MLC=np.stack([p.closed_MC for p in made], axis=1),
        **more,
    )


def _react(task: WindowTask, layer: int, push_ns: int) -> LayerPlan:
    """Plan one layer with every replica that levels, then keep those that pay for their push."""
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


def draft_balanced(task: WindowTask) -> Draft:
    """Lay all rows of an entry end to end by expert and cut them into one equal part per rank."""
    home_LE = owner_homes(task)
    total_MLE = task.loads.total_MLE()
    quotas = [cut_evenly(total_MLE[:, layer], task.cluster.ep) for layer in range(task.model.layers)]
    expert_MLRS, rows_MLRS = fill_slots(home_LE, quotas)
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=price_level(task.cost, task.loads),
        closed_MLC=price_window(task.cost, task.loads, home_LE),
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


def owner_homes(task: WindowTask) -> np.ndarray:
    """[L, E] contiguous homes: every expert at its owner."""
    per_rank = task.cluster.home_slots(task.model)
    return np.tile(np.arange(task.model.experts) // per_rank, (task.model.layers, 1))


def persistent_draft(
    task: WindowTask,
    home_LE: np.ndarray,
    *,
    quotas_L: Sequence[np.ndarray],
    holds_LER: np.ndarray,
) -> Draft:
    """Draft a plan whose copies stay for the whole window.

    Compute and all-to-all of every (micro-step, layer) are priced as in every other plan. Weights are published to
    every copy that is not on its owner. In update windows the gradient of every such copy is collected, and the owner
    adds them up; in recompute windows only the weights of experts that left their owner return. Both hide behind the
    layers.

    Args:
        task: the window
        home_LE: [L, E] the copy that counts as home
        quotas_L: per layer [M, E, R] rows of each holder
        holds_LER: [L, E, R] bool, which rank has a copy, used or not: what is published and collected
    """
    expert_MLRS, rows_MLRS = fill_slots(home_LE, quotas_L)
    is_blind = task.policy in BLIND
    return Draft(
        home_LE=home_LE,
        home_slot_LE=count_before(home_LE),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=price_window(task.cost, task.loads, home_LE, expert_MLRS, rows_MLRS, in_proportion=is_blind),
        closed_MLC=price_window(task.cost, task.loads, home_LE),
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
        slot_P = numbered(m_P * ranks + r_P)
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
    return np.stack([numbered(value_X) for value_X in value_LX])


def copy_edges(task: WindowTask, holds_LER: np.ndarray) -> Edges:
    """Publishing and collecting copies that stay, and adding up what is collected."""
    cost = task.cost
    edges = price_edges(cost, *_edges(task, holds_LER))
    if task.loads.stage == "update":
        # The busiest owner adds up all of its experts' copies but the first of each.
        layers, _, ranks = holds_LER.shape
        most_L = (holds_LER.sum(axis=2) - 1).reshape(layers, ranks, -1).sum(axis=2).max(axis=1)
        edges.ns_2L[1] += cost.add_ns(cost.edge_bytes("collect")) * most_L
    return edges


def copy_bytes(task: WindowTask, holds_LER: np.ndarray) -> Bytes:
    """Bytes that publishing and collecting these copies move."""
    inside = across = 0
    for edge, links in zip(("publish", "collect"), _edges(task, holds_LER), strict=True):
        inside += links.all_inside * task.cost.edge_bytes(edge)
        across += links.all_across * task.cost.edge_bytes(edge)
    return Bytes(edge_inside=inside, edge_across=across)


def _edges(task: WindowTask, holds_LER: np.ndarray) -> tuple[ExpertLinks, ExpertLinks]:
    """Copies over the links at publish and at collect."""
    owner_E = owner_homes(task)[0]
    at_owner_LE = holds_LER[:, np.arange(len(owner_E)), owner_E]
    publish = edge_links(holds_LER, task.cluster.node_array_R)
    if task.loads.stage == "update":
        return publish, publish
    # One copy of each expert that left its owner returns: the lowest rank's.
    lowest_LER = np.cumsum(holds_LER, axis=2) == 1
    return publish, edge_links(holds_LER & lowest_LER & ~at_owner_LE[:, :, None], task.cluster.node_array_R)


def draft_eplb(task: WindowTask, *, predictor: LoadMatrix | None) -> Draft:
    """Draft EPLB's plan of a window: one placement with copies, by loads summed over a window.

    No groups, no nodes: the global variant, which balances best. Per layer:
    1. Every expert has one copy; each of the `slots` x ranks further slots goes to the expert with the largest load per
       copy (`count_copies`).
    2. Copies, largest load first, each go to the lightest rank that has a free slot (`pack`). Two copies of an expert
       on one rank count twice in the share, and once as a holder.
    3. In every micro-step an expert's rows are shared evenly over its copies; the rows that do not divide go to the
       first copies from one that moves on with the micro-step, so that no rank collects them all (`share_evenly`).

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


def _checked(task: WindowTask, predictor: LoadMatrix | None) -> LoadMatrix:
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


def pack(load_C: np.ndarray, ranks: int, *, node_R: np.ndarray | None = None) -> np.ndarray:
    """[C] rank of each copy: largest load first, to the lightest rank with a free slot; equally many on each rank.

    Of equally light ranks the lowest takes it, or where nodes are given, the lowest of the lightest node.
    """
    group_R = np.zeros(ranks, dtype=np.int64) if node_R is None else node_R
    free_R, load_R = np.full(ranks, len(load_C) // ranks), np.zeros(ranks)
    load_N = np.zeros(int(group_R.max()) + 1)
    rank_C = np.zeros(len(load_C), dtype=np.int64)
    for copy in np.argsort(-load_C, kind="stable"):
        rank = int(np.lexsort((load_N[group_R], load_R, free_R == 0))[0])
        rank_C[copy] = rank
        free_R[rank] -= 1
        load_R[rank] += load_C[copy]
        load_N[group_R[rank]] += load_C[copy]
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


def choose_homes(task: WindowTask, holds_LER: np.ndarray) -> np.ndarray:
    """[L, E] the copy that counts as home: the owner's where it has one, else the lowest rank's."""
    owner_LE = owner_homes(task)
    at_owner_LE = np.take_along_axis(holds_LER, owner_LE[:, :, None], axis=2)[:, :, 0]
    return np.where(at_owner_LE, owner_LE, holds_LER.argmax(axis=2))


EVEN_MASKS, ODD_MASKS = (1, 2), (4, 7)
"""Cube with diagonals: ranks of even parity take from the ends of two of their four edges, odd ones of the others."""


def draft_lplb(task: WindowTask) -> Draft:
    """Draft LPLB's plan of a window: replicas on the edges of a fixed graph, split by a linear programme.

    What the description leaves open is decided in the rival's favour: homes are contiguous or packed by the window's
    loads, edges stay inside nodes or one of them leads to the next node, and the cheapest counts. Per layer:
    1. Slot j of rank r is an edge to another rank (`link_ranks`): the cube with its diagonals for two slots in nodes of
       8, else rings of growing stride. As a torus, the last slot leads to the next node.
    2. Each edge takes the heaviest expert of its other end that has no replica yet (`choose_replicas`).
    3. `split_optimum` splits rows in every micro-step, rounded to whole rows.
    """
    graphs = [link_ranks(task.cluster, task.slots)]
    if task.cluster.num_ep_nodes > 1 and task.slots > 1:
        graphs.append(link_ranks(task.cluster, task.slots, torus=True))
    homes = owner_homes(task), packed_homes(task)
    drafts = [_draft(task, home_LE, source_RS) for home_LE in homes for source_RS in graphs]
    return min(drafts, key=lambda draft: _value(task, draft))


def _value(task: WindowTask, draft: Draft) -> float:
    """What is minimised: seconds, or the busiest ranks alone."""
    if task.objective == "skew":
        return float(draft.line_MLC[..., COMPUTE].sum())
    return build_plan(task, draft).seconds.total


def _draft(task: WindowTask, home_LE: np.ndarray, source_RS: np.ndarray) -> Draft:
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
        return place_R[:, None] ^ np.where(is_odd, ODD_MASKS, EVEN_MASKS)
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


class SplitOptimum(NamedTuple):
    """The best split of rows over given replicas."""

    top: float
    """Rows of the busiest rank."""
    rows_P: np.ndarray
    """[P] rows each replica takes, in the order given; fractions are possible."""


def split_optimum(
    load_E: np.ndarray, home_E: np.ndarray, replicas: Sequence[tuple[int, int]], *, ranks: int
) -> SplitOptimum:
    """Find the split over given replicas that makes the busiest rank least loaded, by a linear programme (HiGHS).

    Rows may be split in whole rows without loss: the least busiest rank in whole rows is the optimum rounded up,
    because the split is a flow and a flow with whole capacities has whole solutions.

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
