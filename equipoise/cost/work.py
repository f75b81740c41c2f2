"""`Work`: what every rank does in a window under one decision, in nanoseconds; what the clock runs.

`works_of` makes it from loads, homes and replicas: rows and busy slots of every rank and the rows of the busiest links
(`window.rank_work`), their prices, in waves where the decision has several (`waves.py`), what policies that react are
charged, and the transfers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from equipoise.core import LoadMatrix, Stage
from equipoise.core.plan import Itinerary, Plan, ReplicaTable, slot_rows
from equipoise.core.split import BLIND
from equipoise.core.value import Value, numbered
from equipoise.cost.links import kept_permille
from equipoise.cost.model import CostModel, Tables
from equipoise.cost.waves import LayerNs, WaveRows, in_waves
from equipoise.cost.window import Edges, RankWork, level_work, rank_work, visit_ns

REACTIVE_PLAN_NS, REACTIVE_PUSH_NS = 80_000, 255_000
"""Planning of one (micro-step, layer) and one weight push of `reactive`, as UltraEP reports (0.19 to 0.32 ms)."""
LPLB_PLAN_NS = 100_000
"""One linear programme of `lplb`, as LPLB reports."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers(Value):
    """Replicas of a window, sorted by entry (micro-step * L + layer); empty where weights do not move in it."""

    start_ML: np.ndarray
    """[M * L + 1] where each entry's replicas begin."""
    rank_P: np.ndarray
    home_P: np.ndarray
    path_P2: np.ndarray
    """[P, 2] 0 peer, 1 host; forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work(Value):
    """What one EP group does in a window on one pipeline stage; all times in nanoseconds."""

    stage: Stage
    itinerary: Itinerary
    """Visits in execution order; a visit pulls weights where its `pulls_V` says so."""
    forward_MLR: np.ndarray
    """Experts of each rank."""
    backward_MLR: np.ndarray
    """Experts of each rank, zero in recompute."""
    attention_MLR: np.ndarray
    """Attention and shared experts of each rank, and spreading its tokens to rows and combining them, forward."""
    attention_backward_MLR: np.ndarray
    exchange_ML: np.ndarray
    """An all-to-all before experts, which waits for all of it; in waves, only for the first wave's part."""
    tail_ML2: np.ndarray
    """[M, L, 2] by phase: an all-to-all after experts; in waves, what is left of it when the last rank is done."""
    hidden_ML2: np.ndarray
    """[M, L, 2] by phase: the rest of both, beside the experts; 0 with one wave."""
    is_across_ML: np.ndarray
    """[M, L] bool, whether its busiest link crosses nodes."""
    planning_ML: np.ndarray
    """Planning between router and dispatch, of policies that react."""
    push_ML: np.ndarray
    """Weights pushed between router and dispatch, of policies that react."""
    send_M: np.ndarray
    """Hidden states from one pipeline stage to the next."""
    transfers: Transfers
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


class Decision(NamedTuple):
    """What one policy decided for a window."""

    policy: str
    """Who decided: "balanced" computes the mean on every rank, "reactive" and "lplb" plan just before dispatch."""
    home_LE: np.ndarray
    """[L, E] home rank of each expert."""
    replicas: ReplicaTable
    edges: Edges
    """Publish and collect of each layer."""
    persistent: bool = False
    """Replicas stay for the whole window, so nothing is pulled or returned in it."""
    waves: int = 1
    rows_MLRS: np.ndarray | None = None
    """[M, L, R, S] rows of every rank's slots, where there are several waves; None: waves are level."""

    @classmethod
    def of(cls, plan: Plan) -> "Decision":
        """Read a plan."""
        edges, rows_MLRS = Edges(plan.edge_ns_2L, plan.edge_slow_2L), None
        if plan.waves > 1 and plan.policy != "balanced":
            rows_XRS = slot_rows(plan, 0, plan.ns_ML.size)
            rows_MLRS = rows_XRS.reshape(*plan.ns_ML.shape, *rows_XRS.shape[1:])
        return cls(plan.policy, plan.home_LE, plan.replica_table, edges, plan.persistent, plan.waves, rows_MLRS)


def works_of(
    cost: CostModel,
    loads: LoadMatrix,
    itinerary: Itinerary,
    decisions: Sequence[Decision],
    *,
    pair_LEE: np.ndarray | None = None,
    repeats_forward: bool = False,
) -> list[Work]:
    """Price what every rank does in a window, under each of several decisions.

    Args:
        cost: prices of the window's stage
        loads: rows of the window, all of them known
        itinerary: visits in execution order
        decisions: what is compared; all of them run the same visits
        pair_LEE: [L, E, E] tokens that chose both experts, which thin the rows that cross nodes
        repeats_forward: whether the backward pass repeats the forward pass

    Returns: one `Work` for each decision
    """
    shape_ML = (loads.num_micro_steps, loads.num_layers)
    tables, sent_MLR = cost.tables(1), loads.load_MLRE.sum(axis=3)
    works = []
    # Step 1: rows and busy slots of every rank, and the rows of the busiest links.
    for decision, found in zip(decisions, _rank_works(cost, loads, decisions, pair_LEE), strict=True):
        policy, home_LE, replicas, edges, persistent, waves, rows_MLRS = decision
        rows_MLR, busy_MLR, *links_ML = (np.stack(arrays, axis=1) for arrays in zip(*found, strict=True))
        # Step 2: their prices.
        visits = visit_ns(cost, rows_MLR=rows_MLR, busy_MLR=busy_MLR, sent_MLR=sent_MLR)
        inside_ps_ML, across_ps_ML, *wave_ps_ML = (
            rows_ML * ps for rows_ML, ps in zip(links_ML, 2 * (tables.inside_ps, tables.across_ps), strict=True)
        )
        whole_ML = np.maximum(inside_ps_ML, across_ps_ML) // 1000
        layers = LayerNs.whole(visits, tables.exchange_fixed_ns + whole_ML)
        if waves > 1:
            level = WaveRows.level(rows_MLR, busy_MLR, waves)
            rows = level if rows_MLRS is None else WaveRows.of(rows_MLRS, waves)
            layers = in_waves(cost, visits, whole_ML, np.maximum(*wave_ps_ML) // 1000, rows)
        # Step 3: charges between router and dispatch, of policies that plan there.
        has_replicas_ML = np.diff(replicas.start_ML).reshape(shape_ML) > 0
        charges = {"reactive": (REACTIVE_PLAN_NS, REACTIVE_PUSH_NS), "lplb": (LPLB_PLAN_NS, 0)}
        plan_ns, push_ns = charges.get(policy.removesuffix("-blind"), (0, 0))
        # Step 4: transfers, none where copies stay for the whole window.
        moving = ReplicaTable.empty(len(replicas.start_ML) - 1) if persistent else replicas
        works.append(
            Work(
                stage=loads.stage,
                itinerary=itinerary,
                **layers._asdict(),
                attention_MLR=visits.attention_MLR,
                attention_backward_MLR=visits.attention_backward_MLR,
                is_across_ML=across_ps_ML > inside_ps_ML,
                planning_ML=np.full(shape_ML, plan_ns),
                push_ML=has_replicas_ML * push_ns,
                send_M=-(-sent_MLR.max(axis=(1, 2)) // cost.model.top_k) * tables.across_ps // 1000,
                transfers=Transfers(
                    start_ML=moving.start_ML,
                    rank_P=moving.rank_P,
                    home_P=home_LE[moving.entry_P % loads.num_layers, moving.expert_P],
                    path_P2=moving.path_P2,
                ),
                tables=tables,
                edge_ns_2L=edges.ns_2L,
                edge_slow_2L=edges.slow_2L,
                repeats_forward=repeats_forward,
                rows_MLR=rows_MLR,
            )
        )
    return works


def _rank_works(
    cost: CostModel, loads: LoadMatrix, decisions: Sequence[Decision], pair_LEE: np.ndarray | None
) -> list[list[RankWork]]:
    """For each decision the rows of every rank, layer by layer."""
    cluster, top_k, by_tokens = cost.cluster, cost.model.top_k, cost.sends == "tokens"
    node_R, none_EE = cluster.node_array_R, np.zeros((0, 0), dtype=np.int64)
    shape_MLR = (loads.num_micro_steps, loads.num_layers, cluster.ep)
    slots = [replica_slots(decision.replicas, shape_MLR) for decision in decisions]
    found: list[list[RankWork]] = [[] for _ in decisions]
    for layer in range(loads.num_layers):
        # Copies, because a read-only array would compile the kernels a second time; of loads one for all decisions.
        load_MRE = np.array(loads.load_MLRE[:, layer])
        pair_EE = none_EE if pair_LEE is None else np.array(pair_LEE[layer], dtype=np.int64, order="C")
        for decision, slots_2, works in zip(decisions, slots, found, strict=True):
            home_E = np.array(decision.home_LE[layer])
            keep_N = kept_permille(node_R[home_E], cluster.num_ep_nodes, pair_EE, top_k)
            if decision.policy == "balanced":
                # Tokens choose as many experts together as they do at the owners.
                mean_keep = int(keep_N.mean())
                given: dict[str, Any] = {"top_k": top_k, "forwards": by_tokens, "waves": decision.waves}
                works.append(level_work(load_MRE, node_R, **given, keep_permille=mean_keep))
            else:
                held = (np.array(array_MLRS[:, layer]) for array_MLRS in slots_2)
                is_blind = decision.policy in BLIND
                how = (is_blind, top_k, by_tokens, decision.waves)
                works.append(rank_work(load_MRE, home_E, node_R, *held, keep_N, *how))
    return found


def replica_slots(replicas: ReplicaTable, shape_MLR: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Replica slots of a window: ([M, L, R, S] expert, -1 where empty; [M, L, R, S] rows)."""
    place_P = replicas.entry_P * shape_MLR[2] + replicas.rank_P
    slot_P = numbered(place_P)
    width = int(slot_P.max(initial=-1)) + 1
    expert_XS = np.full((int(np.prod(shape_MLR)), width), -1)
    rows_XS = np.zeros_like(expert_XS)
    expert_XS[place_P, slot_P] = replicas.expert_P
    rows_XS[place_P, slot_P] = replicas.rows_P
    return expert_XS.reshape(*shape_MLR, width), rows_XS.reshape(*shape_MLR, width)
