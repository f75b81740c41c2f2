"""From decisions to a checked `Plan`: slots, replica table, paths, window edges, seconds and bytes.

All policies end here, so all are charged alike. A `Draft` holds what a policy decided and each (micro-step, layer)'s
price line; nothing here decides anything but the path of a pull.

Knows cost and core. Does not know how homes or replicas were chosen.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Bytes, Objective, Plan, ReplicaTable, Seconds
from equipoise.cost import CostModel
from equipoise.cost.kernels import (
    ACROSS,
    COMPUTE,
    EXCHANGE,
    HOST_PULLS,
    INSIDE,
    PEER_PULLS,
    PULL,
    RETURN,
    choose_paths,
)
from equipoise.planner.itinerary import build_itinerary
from equipoise.planner.options import PlanOptions

NS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is being planned."""

    loads: LoadMatrix
    cluster: Cluster
    model: ModelShape
    slots: int
    objective: Objective
    options: PlanOptions
    policy: str
    estimated_share: float = 0.0

    cost: CostModel = field(init=False)
    """Prices of this window's stage."""

    def __post_init__(self) -> None:
        options = self.options
        cost = CostModel.of(self.cluster, self.model, stage=self.loads.stage, depth=options.depth, sends=options.sends)
        object.__setattr__(self, "cost", cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a policy decided for one window."""

    home_LE: np.ndarray
    home_slot_LE: np.ndarray
    rep_expert_MLRS: np.ndarray
    """[M, L, R, S] expert of each replica slot; -1: empty."""
    rep_rows_MLRS: np.ndarray
    line_MLC: np.ndarray
    """[M, L, COLUMNS] price lines."""
    closed_MLC: np.ndarray
    static_MLC: np.ndarray
    charges: Seconds = field(default_factory=Seconds)
    """Seconds a policy pays beyond the price lines and edges."""
    moved: Bytes = field(default_factory=Bytes)
    """Bytes a policy moves beyond the price lines and edges."""
    slots: int | None = None
    """Replica slots that the policy takes for itself, where it does not keep to the task's."""
    persistent: bool = False
    cross_node: bool = False
    executable: bool = True


class Links(NamedTuple):
    """Experts over the busiest link at a window edge, and over all links."""

    inside: int
    across: int
    all_inside: int
    all_across: int


def home_slots_of(home_LE: np.ndarray, ranks: int) -> np.ndarray:
    """[L, E] slot of each expert: its owner's slot if it stays at home, else the rank's freed slots, by expert id."""
    layers, experts = home_LE.shape
    per_rank = experts // ranks
    owner_E, own_slot_E = np.arange(experts) // per_rank, np.arange(experts) % per_rank
    slot_LE = np.broadcast_to(own_slot_E, (layers, experts)).copy()
    for layer in range(layers):
        home_E = home_LE[layer]
        away = np.flatnonzero(home_E != owner_E)
        # Sorted by (home, id), newcomers meet the freed slots sorted by (rank, slot): as many of one as of the other.
        newcomers = away[np.argsort(home_E[away], kind="stable")]
        slot_LE[layer, newcomers] = own_slot_E[away]
    return slot_LE


def edge_links(home_LE: np.ndarray, cluster: Cluster) -> Links:
    """Count displaced experts per link over all layers."""
    ranks, experts = cluster.ep, home_LE.shape[1]
    owner = np.broadcast_to(np.arange(experts) // (experts // ranks), home_LE.shape)
    node_R = cluster.node_array_R
    away = home_LE != owner
    across = node_R[home_LE] != node_R[owner]
    busiest, everything = [], []
    for chosen in (away & ~across, away & across):
        sent = np.bincount(owner[chosen], minlength=ranks)
        received = np.bincount(home_LE[chosen], minlength=ranks)
        busiest.append(int(max(sent.max(), received.max())))
        everything.append(int(chosen.sum()))
    return Links(*busiest, *everything)


def build_plan(task: Task, draft: Draft) -> Plan:
    """Assemble and check the plan of one window."""
    cost = task.cost
    links = edge_links(draft.home_LE, task.cluster) if not draft.persistent else Links(0, 0, 0, 0)
    table = _replica_table(task, draft)
    needs_ML = np.diff(table.start_ML).reshape(draft.line_MLC.shape[:2]) > 0
    return Plan(
        loads=task.loads,
        cluster=task.cluster,
        model=task.model,
        policy=task.policy,
        objective=task.objective,
        slots=task.slots if draft.slots is None else draft.slots,
        home_LE=draft.home_LE,
        home_slot_LE=draft.home_slot_LE,
        replica_table=table,
        ns_ML=draft.line_MLC[..., :4].sum(axis=-1),
        closed_ns_ML=draft.closed_MLC[..., :4].sum(axis=-1),
        seconds=_seconds(draft, links, cost),
        bytes=_bytes(draft, links, cost),
        static_seconds=_line_seconds(draft.static_MLC, Seconds()).total,
        itinerary=build_itinerary(task.loads.stage, needs_ML, task.options) if draft.executable else None,
        estimated_share=task.estimated_share,
        cross_node=draft.cross_node,
        persistent=draft.persistent,
    )


def _seconds(draft: Draft, links: Links, cost: CostModel) -> Seconds:
    edges = {
        edge: cost.edge_ns(inside_experts=links.inside, across_experts=links.across, edge=edge) * NS
        for edge in ("publish", "collect")
    }
    extra = draft.charges
    edges = {edge: seconds + getattr(extra, edge) for edge, seconds in edges.items()}
    return replace(_line_seconds(draft.line_MLC, extra), **edges)


def _line_seconds(line_MLC: np.ndarray, extra: Seconds) -> Seconds:
    """Seconds of price lines, each part added up in nanoseconds first, so that equal lines give equal seconds."""
    parts = line_MLC.reshape(-1, line_MLC.shape[-1]).sum(axis=0)
    return replace(
        extra,
        compute=int(parts[COMPUTE]) * NS + extra.compute,
        all_to_all=int(parts[EXCHANGE]) * NS + extra.all_to_all,
        pull=int(parts[PULL]) * NS + extra.pull,
        return_=int(parts[RETURN]) * NS + extra.return_,
    )


def _bytes(draft: Draft, links: Links, cost: CostModel) -> Bytes:
    parts = draft.line_MLC.reshape(-1, draft.line_MLC.shape[-1]).sum(axis=0)
    model, per_edge = cost.model, cost.edge_bytes("publish") + cost.edge_bytes("collect")
    exchanges = 4 if cost.stage == "update" else 2
    returned = 0
    if cost.stage == "update" and not draft.persistent:
        returned = int((draft.rep_expert_MLRS >= 0).sum()) * model.expert_bytes
    return Bytes(
        peer=int(parts[PEER_PULLS]) * model.expert_bytes + returned,
        host=int(parts[HOST_PULLS]) * model.expert_bytes,
        edge_inside=links.all_inside * per_edge + draft.moved.edge_inside,
        edge_across=links.all_across * per_edge + draft.moved.edge_across,
        all_to_all_inside=int(parts[INSIDE]) * model.row_bytes * exchanges,
        all_to_all_across=int(parts[ACROSS]) * model.row_bytes * exchanges,
    )


def _replica_table(task: Task, draft: Draft) -> ReplicaTable:
    """All replicas in (micro-step, layer, rank, slot) order, with a path for each."""
    micro_steps, layers, ranks, slots = draft.rep_expert_MLRS.shape
    held = (draft.rep_expert_MLRS >= 0) & (draft.rep_rows_MLRS > 0)
    per_entry = held.reshape(micro_steps * layers, -1).sum(axis=1)
    path_MLRS2 = np.zeros((*held.shape, 2), dtype=np.int64)
    if draft.executable and held.any():
        tables = task.cost.tables(task.cluster.home_slots(task.model))
        row_MLR, node_R = task.loads.load_MLRE.sum(axis=3), task.cluster.node_array_R
        path_MLRS2 = choose_paths(row_MLR, np.array(draft.home_LE), node_R, np.array(draft.rep_expert_MLRS), tables)
    rank_MLRS = np.broadcast_to(np.arange(ranks)[:, None], (micro_steps, layers, ranks, slots))
    return ReplicaTable(
        start_ML=np.concatenate([[0], np.cumsum(per_entry)]),
        expert_P=draft.rep_expert_MLRS[held],
        rank_P=rank_MLRS[held],
        rows_P=draft.rep_rows_MLRS[held],
        path_P2=path_MLRS2[held],
    )
