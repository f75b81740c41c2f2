"""`Work`: what one EP group has to do in one window, in nanoseconds per rank; a plan translated for replaying.

Steps of `work_of`:
1. Settle every entry: rows and busy slots of each rank, rows of the busiest links (`cost.ranks`).
2. Price them: forward and backward of each rank's experts, attention of each source, one exchange (`cost`).
3. List the transfers: pulls ahead of each visit with their path, returns after it.
4. Publish and collect of each layer are the plan's own; charges in the open come from its seconds.

Knows plans and prices. Does not know the order of things: that is `replay.py`, and `events.py` beside it.

Invariants (asserted by the tests):
1. Of every entry, the busiest rank's forward + backward and the exchanges are the planner's own compute and all-to-all,
   up to the rank that is busiest in one phase alone.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from equipoise.core import Stage
from equipoise.core.plan import Plan, Sends
from equipoise.core.value import Value
from equipoise.cost import CostModel
from equipoise.cost.exchange import kept_permille
from equipoise.cost.model import Tables
from equipoise.cost.ranks import RankRows, level_rows, rank_rows, visit_ns
from equipoise.loads.forecast import Activations
from equipoise.planner.policies import REACTIVE_PLAN_NS, REACTIVE_PUSH_NS
from equipoise.planner.pricing import count_before
from equipoise.sim.clockwork import NANO


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers(Value):
    """Replicas of a window, sorted by entry (micro-step * L + layer); empty where weights do not move in it."""

    start_ML: np.ndarray
    """[M * L + 1] where each entry's replicas begin."""
    rank_P: np.ndarray
    home_P: np.ndarray
    path_P2: np.ndarray
    """[P, 2] 0 peer, 1 host; forward and backward."""
    has_pulls: bool
    """Whether weights are pulled ahead; where not, they are pushed in the open, and only gradients return."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work(Value):
    """One EP group's window on one pipeline stage; all times in nanoseconds."""

    stage: Stage
    forward_MLR: np.ndarray
    """Experts of each rank."""
    backward_MLR: np.ndarray
    """Experts of each rank, zero in recompute."""
    attention_MLR: np.ndarray
    """Attention and shared experts of each rank, and spreading its tokens to rows and combining them, forward."""
    attention_backward_MLR: np.ndarray
    exchange_ML: np.ndarray
    """One all-to-all."""
    is_across_ML: np.ndarray
    """[M, L] bool, whether its busiest link crosses nodes."""
    planning_ML: np.ndarray
    """Planning between router and dispatch, of policies that react."""
    push_ML: np.ndarray
    """Weights pushed in the open, of policies that react."""
    send_M: np.ndarray
    """Hidden states from one pipeline stage to the next."""
    transfers: Transfers
    slowdown_2: np.ndarray
    """[2] thousandths by which a pull from a peer, or from the host, slows the compute beside it."""
    tables: Tables
    edge_ns_2L: np.ndarray
    """[2, L] publish and collect of each layer."""
    edge_slow_2L: np.ndarray
    """[2, L] what they add to the compute beside them."""
    repeats_forward: bool
    """Whether backward repeats the forward pass."""
    rows_MLR: np.ndarray
    """[M, L, R] rows of each rank."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Micro-steps, layers, ranks."""
        micro_steps, layers, ranks = self.forward_MLR.shape
        return micro_steps, layers, ranks

    @property
    def has_backward(self) -> bool:
        """Whether gradients flow."""
        return self.stage == "update"


class _Settled(NamedTuple):
    """What every rank does in a window."""

    rows_MLR: np.ndarray
    busy_MLR: np.ndarray
    inside_ML: np.ndarray
    across_ML: np.ndarray


def work_of(
    plan: Plan,
    *,
    activations: Activations = "kept",
    sends: Sends = "rows",
    pair_LEE: np.ndarray | None = None,
) -> Work:
    """Translate a plan of one window and EP group.

    Args:
        plan: of any policy
        activations: whether the backward pass repeats the forward pass
        sends: what crosses nodes
        pair_LEE: [L, E, E] tokens that chose both experts, with which the planner thins rows that cross nodes
    """
    cost = CostModel.of(plan.cluster, plan.model, stage=plan.loads.stage)
    settled = _settle(plan, pair_LEE, sends)
    tables = cost.tables(int(settled.busy_MLR.max(initial=1)))
    sent_MLR = plan.loads.load_MLRE.sum(axis=3)
    visits = visit_ns(cost, rows_MLR=settled.rows_MLR, busy_MLR=settled.busy_MLR, sent_MLR=sent_MLR)
    planning_ML, push_ML = _open_charges(plan)
    inside_ML, across_ML = settled.inside_ML * tables.inside_ps, settled.across_ML * tables.across_ps
    return Work(
        stage=plan.loads.stage,
        **visits._asdict(),
        exchange_ML=tables.exchange_fixed_ns + np.maximum(inside_ML, across_ML) // 1000,
        is_across_ML=across_ML > inside_ML,
        planning_ML=planning_ML,
        push_ML=push_ML,
        send_M=-(-sent_MLR.max(axis=(1, 2)) // plan.model.top_k) * tables.across_ps // 1000,
        transfers=_transfers(plan),
        slowdown_2=np.array([cost.profile.peer_slowdown_permille, cost.profile.host_slowdown_permille]),
        tables=tables,
        edge_ns_2L=plan.edge_ns_2L,
        edge_slow_2L=plan.edge_slow_2L,
        repeats_forward=activations == "recomputed" and plan.loads.stage == "update",
        rows_MLR=settled.rows_MLR,
    )


def cut(work: Work, *, micro_steps: slice, layers: slice) -> Work:
    """Some micro-steps and layers of a window, as work of their own; published and collected where its edges are."""
    kept_ML = np.arange(work.exchange_ML.size).reshape(work.exchange_ML.shape)[micro_steps, layers]
    arrays = {f.name: getattr(work, f.name)[micro_steps, layers] for f in fields(work) if "_ML" in f.name}
    transfers = work.transfers
    count_ML = np.diff(transfers.start_ML)
    is_kept_P = np.isin(np.repeat(np.arange(len(count_ML)), count_ML), kept_ML)
    chosen = Transfers(
        start_ML=np.concatenate([[0], np.cumsum(count_ML[kept_ML.reshape(-1)])]),
        rank_P=transfers.rank_P[is_kept_P],
        home_P=transfers.home_P[is_kept_P],
        path_P2=transfers.path_P2[is_kept_P],
        has_pulls=transfers.has_pulls,
    )
    has_edges_21 = np.array([[micro_steps.start == 0], [micro_steps.stop == work.shape[0]]])
    edges = {f.name: getattr(work, f.name)[:, layers] * has_edges_21 for f in fields(work) if f.name.endswith("_2L")}
    return replace(work, **arrays, **edges, send_M=work.send_M[micro_steps], transfers=chosen)


def _settle(plan: Plan, pair_LEE: np.ndarray | None, sends: Sends) -> _Settled:
    """What every rank does, layer by layer."""
    load_MLRE, node_R = plan.loads.load_MLRE, plan.cluster.node_array_R
    expert_MLRS, rows_MLRS = slots_of(plan)
    found: list[RankRows] = []
    top_k, forwards = plan.model.top_k, sends == "tokens"
    none_EE = np.zeros((0, 0), dtype=np.int64)
    for layer in range(plan.loads.num_layers):
        # Copies, because a read-only array would compile the kernels a second time.
        load_MRE, home_E = np.array(load_MLRE[:, layer]), np.array(plan.home_LE[layer])
        pair_EE = none_EE if pair_LEE is None else np.array(pair_LEE[layer], dtype=np.int64, order="C")
        keep_N = kept_permille(node_R[home_E], plan.cluster.num_ep_nodes, pair_EE, top_k)
        if plan.policy == "balanced":
            # Tokens choose as many experts together as they do at the owners.
            found.append(level_rows(load_MRE, node_R, top_k=top_k, forwards=forwards, keep_permille=int(keep_N.mean())))
            continue
        slots = np.array(expert_MLRS[:, layer]), np.array(rows_MLRS[:, layer])
        found.append(rank_rows(load_MRE, home_E, node_R, *slots, keep_N, plan.persistent, top_k, forwards))
    return _Settled(*(np.stack(arrays, axis=1) for arrays in zip(*found, strict=True)))


def slots_of(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Replica slots of a plan: ([M, L, R, S] expert, -1 where empty; [M, L, R, S] rows)."""
    table, ranks = plan.replica_table, plan.cluster.ep
    shape_ML = (plan.loads.num_micro_steps, plan.loads.num_layers)
    place_P = table.entry_P * ranks + table.rank_P
    slot_P = count_before(place_P[None, :])[0]
    width = int(slot_P.max(initial=-1)) + 1
    expert = np.full((shape_ML[0] * shape_ML[1] * ranks, width), -1)
    rows = np.zeros_like(expert)
    expert[place_P, slot_P] = table.expert_P
    rows[place_P, slot_P] = table.rows_P
    shape = (*shape_ML, ranks, width)
    return expert.reshape(shape), rows.reshape(shape)


def _transfers(plan: Plan) -> Transfers:
    """Pulls and returns; none where copies stay for the whole window."""
    table = plan.replica_table
    if plan.persistent:
        return _no_transfers(len(table.start_ML) - 1)
    return Transfers(
        start_ML=table.start_ML,
        rank_P=table.rank_P,
        home_P=plan.home_LE[table.entry_P % plan.loads.num_layers, table.expert_P],
        path_P2=table.path_P2,
        has_pulls=plan.itinerary is not None,
    )


def _no_transfers(entries: int) -> Transfers:
    none = np.zeros(0, dtype=np.int64)
    return Transfers(
        start_ML=np.zeros(entries + 1, dtype=np.int64),
        rank_P=none,
        home_P=none,
        path_P2=np.zeros((0, 2), dtype=np.int64),
        has_pulls=False,
    )


def _open_charges(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """([M, L] planning, [M, L] push): what a policy that reacts to the router does in the open."""
    shape_ML = plan.ns_ML.shape
    if plan.policy == "reactive":
        has_replicas_ML = np.diff(plan.replica_table.start_ML).reshape(shape_ML) > 0
        return np.full(shape_ML, REACTIVE_PLAN_NS), has_replicas_ML * REACTIVE_PUSH_NS
    charged_ns = round(plan.seconds.planning * NANO) // max(1, shape_ML[0] * shape_ML[1])
    return np.full(shape_ML, charged_ns), np.zeros(shape_ML, dtype=np.int64)
