"""From a policy's decisions to a checked `Plan`: itinerary, slots, replica table, window edges, seconds and bytes.

All policies end here, so all are charged alike: seconds are those of the clock (`cost.clock`).
1. `build_itinerary` lists the (micro-step, phase, layer) visits in execution order and assigns buffers ahead, like
   registers.
2. `build_plan` adds the replica table with a path for each pull, prices the window's edges, and asks the clock.
3. `choose_waves` cuts the finished plan into waves, and asks the clock again.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, ModelShape
from equipoise.core.options import PlanOptions
from equipoise.core.plan import PATHS, Bytes, Itinerary, Objective, Plan, ReplicaTable
from equipoise.core.window import Stage
from equipoise.cost import CostModel
from equipoise.cost.clock import replay
from equipoise.cost.kernels import (
    ACROSS,
    HOST_PULLS,
    INSIDE,
    PEER_PULLS,
)
from equipoise.cost.window import Edges, ExpertLinks, edge_links, price_edges
from equipoise.cost.work import Decision, works_of

FORWARD, BACKWARD = 0, 1
TRIED_WAVES = (1, 2, 3, 4)
"""Waves that `auto` compares."""


def visits_of(stage: Stage, micro_steps: int, layers: int, options: PlanOptions) -> np.ndarray:
    """[V, 3] visits as (micro-step, phase, layer) in execution order."""
    ends = np.cumsum(options.chunk_layers or (layers,)).tolist()
    if ends[-1] != layers:
        raise InfeasiblePlanError(f"PlanOptions.chunk_layers add up to {ends[-1]} layers; the window has {layers}")
    forwards = _forward_passes(micro_steps, options)
    backwards = [(m, BACKWARD, len(ends) - 1 - chunk) for m, _, chunk in forwards]
    if stage == "recompute":
        passes = forwards
    else:
        # Warm-up forwards, then one forward and one backward in turn, then the backwards left.
        ahead = min(_passes_ahead(options), len(forwards))
        in_turn = zip(forwards[ahead:], backwards, strict=False)
        passes = [*forwards[:ahead], *(one for pair in in_turn for one in pair), *backwards[len(forwards) - ahead :]]
    visits: list[tuple[int, int, int]] = []
    for micro_step, phase, chunk in passes:
        through = range(ends[chunk - 1] if chunk else 0, ends[chunk])
        visits.extend((micro_step, phase, layer) for layer in (through if phase == FORWARD else reversed(through)))
    return np.array(visits, dtype=np.int64).reshape(-1, 3)


def _forward_passes(micro_steps: int, options: PlanOptions) -> list[tuple[int, int, int]]:
    """(micro-step, phase, chunk) of all forward passes: groups of micro-steps pass one chunk after the other."""
    group = options.chunk_group or options.pipeline_stages
    starts = range(0, micro_steps, group)
    chunks = range(max(len(options.chunk_layers), 1))
    return [(m, FORWARD, c) for at in starts for c in chunks for m in range(at, min(at + group, micro_steps))]


def _passes_ahead(options: PlanOptions) -> int:
    """Forward passes that a pipeline stage runs before its first backward takes turns with them."""
    if options.order != "1f1b":
        return 0
    behind, chunks = options.pipeline_stages - 1 - options.pipeline_stage, len(options.chunk_layers)
    if chunks < 2:
        return behind
    return 2 * behind + (chunks - 1) * (options.chunk_group or options.pipeline_stages)


def build_itinerary(stage: Stage, needs_ML: np.ndarray, options: PlanOptions) -> Itinerary:
    """Build the itinerary of a window.

    Args:
        stage: recompute or update
        needs_ML: [M, L] bool, whether any rank holds a replica there
        options: execution order and depth
    """
    micro_steps, layers = needs_ML.shape
    visits_V3 = visits_of(stage, micro_steps, layers, options)
    pulls_V = needs_ML[visits_V3[:, 0], visits_V3[:, 2]]
    buffer_V, ready_from_V, resident_V = assign(visits_V3, pulls_V, depth=options.depth)
    return Itinerary(
        depth=options.depth,
        micro_step_V=visits_V3[:, 0],
        phase_V=visits_V3[:, 1],
        layer_V=visits_V3[:, 2],
        pulls_V=pulls_V,
        buffer_V=buffer_V,
        ready_from_V=ready_from_V,
        resident_V=resident_V,
    )


def assign(visits_V3: np.ndarray, pulls_V: np.ndarray, *, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Assign buffers: (buffer_V, ready_from_V, resident_V).

    A visit takes the buffer its replicas are still in (from its own forward visit, if nothing overwrote it), else the
    one that has been idle longest.
    """
    count = len(visits_V3)
    buffer_V, ready_from_V = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    resident_V = np.zeros(count, dtype=np.bool_)
    holds: list[tuple[int, int] | None] = [None] * (depth + 1)
    last_use = [-1] * (depth + 1)
    for v in np.flatnonzero(pulls_V).tolist():
        key = (int(visits_V3[v, 0]), int(visits_V3[v, 2]))
        if key in holds:
            buffer = holds.index(key)
            resident_V[v] = True
        else:
            # The buffer idle longest can be filled earliest.
            buffer = min(range(depth + 1), key=lambda b: (last_use[b], b))
            holds[buffer] = key
        buffer_V[v] = buffer
        ready_from_V[v] = v if resident_V[v] else max(last_use[buffer] + 1, v - depth, 0)
        last_use[buffer] = v
    return buffer_V, ready_from_V, resident_V


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTask:
    """What is being planned."""

    loads: LoadMatrix
    cluster: Cluster
    model: ModelShape
    slots: int
    objective: Objective
    options: PlanOptions
    policy: str
    estimated_share: float = 0.0
    pair_LEE: np.ndarray | None = None
    """[L, E, E] tokens that chose both experts, which thin the rows that cross nodes."""

    cost: CostModel = field(init=False)
    """Prices of this window's stage."""

    def __post_init__(self) -> None:
        options = self.options
        cost = CostModel.of(
            self.cluster,
            self.model,
            stage=self.loads.stage,
            depth=options.depth,
            sends=options.sends,
            transport=options.transport,
        )
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
    """[M, L, COLUMNS] the same homes without replicas."""
    edges: Edges
    """What is published and collected beyond displaced experts; all there is where copies stay."""
    moved: Bytes = field(default_factory=Bytes)
    """Bytes a policy moves beyond the price lines and edges."""
    slots: int | None = None
    """Replica slots that the policy takes for itself, where it does not keep to the task's."""
    persistent: bool = False
    cross_node: bool = False
    executable: bool = True


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


def home_links(home_LE: np.ndarray, cluster: Cluster) -> ExpertLinks:
    """Count displaced experts per link."""
    return edge_links(home_LE[:, :, None] == np.arange(cluster.ep), cluster.node_array_R)


def build_plan(task: WindowTask, draft: Draft) -> Plan:
    """Assemble and check the plan of one window; its seconds are the clock's (`cost.clock`)."""
    table, edges = _replica_table(task, draft), _edges(task, draft)
    needs_ML = np.diff(table.start_ML).reshape(draft.line_MLC.shape[:2]) > 0
    itinerary = build_itinerary(task.loads.stage, needs_ML & draft.executable, task.options)
    experts, ranks = task.model.experts, task.cluster.ep
    owner_LE = np.tile(np.arange(experts) // (experts // ranks), (task.model.layers, 1))
    decided = Decision(task.policy, draft.home_LE, table, edges, draft.persistent)
    static = Decision("static", owner_LE, ReplicaTable.empty(needs_ML.size), Edges.none(task.model.layers))
    works = works_of(task.cost, task.loads, itinerary, [decided, static], pair_LEE=task.pair_LEE)
    seconds, static_seconds = (replay([work]).seconds for work in works)
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
        seconds=seconds,
        bytes=_bytes(task, draft),
        static_seconds=static_seconds.total,
        edge_ns_2L=edges.ns_2L,
        edge_slow_2L=edges.slow_2L,
        itinerary=itinerary if draft.executable else None,
        estimated_share=task.estimated_share,
        cross_node=draft.cross_node,
        persistent=draft.persistent,
    )


def choose_waves(task: WindowTask, made: Plan) -> Plan:
    """Cut a finished plan into as many waves as the options say, or as many as the clock finds fastest.

    The plan keeps its homes and replicas, and is compared with contiguous expert parallelism in one wave.
    """
    waves = task.options.waves
    tried = TRIED_WAVES if waves == "auto" else (waves,)
    if waves == "auto" and task.cluster.num_ep_nodes == 1:
        # Ranks of one node read rows where they are, all at once, unless told otherwise.
        tried = (1,)
    if tried == (made.waves,):
        return made
    itinerary = made.itinerary
    if itinerary is None:
        itinerary = build_itinerary(task.loads.stage, np.zeros(made.ns_ML.shape, dtype=np.bool_), task.options)
    decisions = [Decision.of(replace(made, waves=count)) for count in tried]
    works = works_of(task.cost, task.loads, itinerary, decisions, pair_LEE=task.pair_LEE)
    found = {count: replay([work]).seconds for count, work in zip(tried, works, strict=True)}
    # The fewest of equally fast ones.
    best = min(found, key=lambda count: found[count].total)
    return replace(made, waves=best, seconds=found[best])


def _edges(task: WindowTask, draft: Draft) -> Edges:
    """Each layer's publish and collect."""
    if draft.persistent:
        return draft.edges
    links = home_links(draft.home_LE, task.cluster)
    displaced = price_edges(task.cost, links, links)
    return Edges(draft.edges.ns_2L + displaced.ns_2L, draft.edges.slow_2L + displaced.slow_2L)


def _bytes(task: WindowTask, draft: Draft) -> Bytes:
    parts, cost = draft.line_MLC.reshape(-1, draft.line_MLC.shape[-1]).sum(axis=0), task.cost
    model, per_edge = cost.model, cost.edge_bytes("publish") + cost.edge_bytes("collect")
    exchanges = 4 if cost.stage == "update" else 2
    displaced = (0, 0) if draft.persistent else home_links(draft.home_LE, task.cluster)[2:]
    returned = returned_far = 0
    if cost.stage == "update" and not draft.persistent:
        # Pulled from the host, forward and backward, are those of other nodes.
        returned_far = int(parts[HOST_PULLS]) // 2 * model.expert_bytes
        returned = int((draft.rep_expert_MLRS >= 0).sum()) * model.expert_bytes - returned_far
    return Bytes(
        peer=int(parts[PEER_PULLS]) * model.expert_bytes + returned,
        host=int(parts[HOST_PULLS]) * model.expert_bytes,
        edge_inside=displaced[0] * per_edge + draft.moved.edge_inside,
        edge_across=displaced[1] * per_edge + draft.moved.edge_across + returned_far,
        all_to_all_inside=int(parts[INSIDE]) * model.row_bytes * exchanges,
        all_to_all_across=int(parts[ACROSS]) * model.row_bytes * exchanges,
    )


def _replica_table(task: WindowTask, draft: Draft) -> ReplicaTable:
    """All replicas in (micro-step, layer, rank, slot) order, with a path for each."""
    micro_steps, layers, ranks, slots = draft.rep_expert_MLRS.shape
    held = (draft.rep_expert_MLRS >= 0) & (draft.rep_rows_MLRS > 0)
    per_entry = held.reshape(micro_steps * layers, -1).sum(axis=1)
    rank_MLRS = np.broadcast_to(np.arange(ranks)[:, None], (micro_steps, layers, ranks, slots))
    expert_P, rank_P, node_R = draft.rep_expert_MLRS[held], rank_MLRS[held], task.cluster.node_array_R
    # From a peer, unless only the host store of the node has the weights.
    _, layer_P, _, _ = np.nonzero(held)
    is_far_P = node_R[rank_P] != node_R[draft.home_LE[layer_P, expert_P]]
    path_P = np.where(is_far_P & draft.executable, PATHS.index("host"), PATHS.index("peer"))
    return ReplicaTable(
        start_ML=np.concatenate([[0], np.cumsum(per_entry)]),
        expert_P=expert_P,
        rank_P=rank_P,
        rows_P=draft.rep_rows_MLRS[held],
        path_P2=np.stack([path_P, path_P], axis=1),
    )
