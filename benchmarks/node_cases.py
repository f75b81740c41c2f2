"""What the node benchmark runs: windows of real routes, and the plan of every policy, as a balancer can execute it.

A plan whose copies stay for the whole window (EPLB, LPLB) is executed with the same copies in every micro-step. They
are pulled ahead like any replica, and layers read rows through mapped memory, so that rivals use the same kernels. LPLB
has the split of the window's own rows, and rows of both take the nearest copy first. `reactive` knows no route ahead:
it plans between router and dispatch, pulls in the open, and its layers sort and count their rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

import equipoise as eq
from benchmarks.traces import FOLDER, Trace, read_traces
from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.options import PlanOptions
from equipoise.cost import CostModel
from equipoise.cost.clock import replay
from equipoise.cost.window import Edges, price_window
from equipoise.cost.work import Decision, replica_slots, works_of
from equipoise.planner.assemble import Draft, WindowTask, build_plan, home_slots_of
from equipoise.planner.baselines import fill_slots

MICRO_STEPS, LAYERS = 8, 4
FEW = (256, 1024)
"""Tokens of a rank in micro-steps that are small."""
DISTINCT = 4
"""Micro-steps with tokens of their own, as many as the traces have; a window runs them in turn until it is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCase:
    """One window of one EP group."""

    name: str
    model: ModelShape
    routes_MLRTK: np.ndarray
    """[M, L, R, T, K] experts of every token."""
    stage: Any = "update"
    is_checkpointed: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the EP group."""
        return int(self.routes_MLRTK.shape[2])

    @property
    def tokens(self) -> int:
        """Of a rank in a micro-step."""
        return int(self.routes_MLRTK.shape[3])

    def loads(self, routes_MLRTK: np.ndarray) -> LoadMatrix:
        """Count rows."""
        micro_steps, layers, ranks = routes_MLRTK.shape[:3]
        flat = routes_MLRTK.reshape(micro_steps * layers * ranks, -1)
        counts = [np.bincount(line, minlength=self.model.experts) for line in flat]
        return LoadMatrix(np.array(counts).reshape(micro_steps, layers, ranks, -1), stage=self.stage)

    def uniform(self) -> np.ndarray:
        """[M, L, R, T, K] routes of the same size that load every expert alike."""
        shape, experts = self.routes_MLRTK.shape, self.model.experts
        order_E = np.random.default_rng(0).permutation(experts).astype(np.int16)
        return (
            order_E[np.arange(np.prod(shape[2:])).reshape(shape[2:]) % experts][None, None]
            .repeat(shape[0], axis=0)
            .repeat(shape[1], axis=1)
        )

    def forced(self) -> np.ndarray:
        """[M, L, R, T, K] routes of the same size as Megatron's `--moe-router-force-load-balancing` draws them.

        Every token takes K experts at random, so that groups of rows are level in the mean and none fills its tiles.
        """
        shape, experts, rng = self.routes_MLRTK.shape, self.model.experts, np.random.default_rng(1)
        drawn = np.empty(shape, dtype=np.int16)
        for at in np.ndindex(shape[:3]):
            scores_TE = rng.random((shape[3], experts), dtype=np.float32)
            drawn[at] = np.argpartition(scores_TE, shape[4], axis=1)[:, : shape[4]]
        return drawn


def build_cases(folder: Path = FOLDER, *, ranks: int, tokens: int) -> list[NodeCase]:
    """Windows of three layer shapes; every micro-step of the ESFT ones is another domain."""
    *domains, gpt = read_traces(folder)
    esft = np.stack([_tokens(one, ranks=ranks, tokens=tokens) for one in domains])
    lite = ModelShape.preset("deepseek-v2-lite", layers=LAYERS)
    # Two layers of 64 experts side by side, the first four choices of each: Qwen3's 128 experts and top-8.
    wide = np.concatenate([esft[..., ::2, :4], esft[..., 1::2, :4] + 64], axis=-1)
    qwen = ModelShape.preset("qwen3-30b-a3b", layers=LAYERS)
    oss = np.stack([_tokens(gpt, ranks=ranks, tokens=tokens, start=m * ranks * tokens) for m in range(DISTINCT)])
    shapes = [
        ("ESFT, DeepSeek-V2-Lite", lite, _layers(esft)),
        ("ESFT, Qwen3-30B-A3B", qwen, _layers(wide)),
        ("gpt-oss-20b", ModelShape.preset("gpt-oss-20b", layers=LAYERS), _layers(oss)),
    ]
    return [NodeCase(name=f"{name}, EP{ranks}", model=model, routes_MLRTK=ids) for name, model, ids in shapes]


def _tokens(trace: Trace, *, ranks: int, tokens: int, start: int = 0) -> np.ndarray:
    """[R, T, L, K] consecutive tokens for each rank; a trace that is too short repeats each rank's part."""
    have = min((len(trace.ids_TLK) - start) // ranks, tokens)
    part = trace.ids_TLK[start : start + ranks * have].astype(np.int16).reshape(ranks, have, *trace.ids_TLK.shape[1:])
    return part[:, np.arange(tokens) % have]


def _layers(ids_MRTLK: np.ndarray) -> np.ndarray:
    """[M, L, R, T, K] a few layers, spread over the model, and micro-steps in turn."""
    at = np.linspace(1, ids_MRTLK.shape[3] - 1, LAYERS).astype(int)
    in_turn = np.arange(MICRO_STEPS) % len(ids_MRTLK)
    return ids_MRTLK[in_turn][:, :, :, at].transpose(0, 3, 1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What ranks run."""

    name: str
    plan: Plan | None
    """None: layers sort their rows and exchange counts, every expert at its owner."""
    routes_MLRTK: np.ndarray
    rows: str = "auto"
    """How prepared rows travel, see `BalancerOptions.rows`."""
    is_live: bool = False
    """Planned again in the open, between router and dispatch; layers sort and count their rows."""
    predicted: dict[str, float] = field(default_factory=dict)
    """Seconds by part, see `predict`; none where the cost model does not know the way of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """A case with the plans of its policies."""

    case: NodeCase
    policies: list[Policy]
    cluster: Cluster
    key: str = ""
    """By which the command line chooses it."""
    is_bare: bool = False
    """Routed experts alone, without attention."""

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"{self.case.name}, experts alone" if self.is_bare else self.case.name


def policies_of(case: NodeCase, cluster: Cluster) -> list[Policy]:
    """Every policy of a case, planned with the cluster's profile."""
    loads, uniform, forced = case.loads(case.routes_MLRTK), case.uniform(), case.forced()
    given: dict[str, Any] = {"cluster": cluster, "model": case.model}
    rows = PlanOptions(sends="rows")
    owners = replace(rows, max_displaced=0)

    def ours(slots: int, objective: Any) -> Plan:
        return eq.plan(loads, slots=slots, objective=objective, options=rows, **given)

    made = {
        "static": None,
        "static, prepared": eq.plan(loads, slots=0, options=owners, **given),
        "eplb-oracle": executable(eq.plan(loads, slots=1, policy="eplb-oracle", options=rows, **given)),
        "lplb": executable(eq.plan(loads, slots=1, policy="lplb", options=rows, **given)),
        "equipoise, 0 slots": ours(0, "seconds"),
        "equipoise, 1 slot": ours(1, "seconds"),
        "equipoise, 2 slots": ours(2, "seconds"),
        "equipoise, 1 slot, skew": ours(1, "skew"),
    }
    level, drawn = (eq.plan(case.loads(ids), slots=0, options=owners, **given) for ids in (uniform, forced))
    live = in_the_open(eq.plan(loads, slots=1, policy="reactive", options=rows, **given))
    policies = [Policy(name=name, plan=plan, routes_MLRTK=case.routes_MLRTK) for name, plan in made.items()]
    policies.append(Policy(name="reactive", plan=live, routes_MLRTK=case.routes_MLRTK, is_live=True))
    policies.append(Policy(name="uniform", plan=None, routes_MLRTK=uniform))
    policies.append(Policy(name="uniform, prepared", plan=level, routes_MLRTK=uniform))
    policies.append(Policy(name="uniform at random, prepared", plan=drawn, routes_MLRTK=forced))
    return [with_prediction(policy, case) for policy in policies]


def exchanges_of(case: NodeCase, cluster: Cluster) -> list[Policy]:
    """Three ways of the same rows in a level layer: sorted and counted in the layer, prepared, and mapped."""
    uniform = case.uniform()
    level = eq.plan(
        case.loads(uniform),
        cluster=cluster,
        model=case.model,
        slots=0,
        options=PlanOptions(max_displaced=0, sends="rows"),
    )
    mapped = Policy(name="mapped", plan=level, routes_MLRTK=uniform)
    return [
        Policy(name="plain", plan=None, routes_MLRTK=uniform),
        Policy(name="prepared", plan=level, routes_MLRTK=uniform, rows="collective"),
        with_prediction(mapped, case),
    ]


def crossings_of(case: NodeCase, cluster: Cluster) -> list[Policy]:
    """Policies of a group that is declared as several nodes: rows by collectives, and mapped inside nodes."""
    given: dict[str, Any] = {"cluster": cluster, "model": case.model}
    loads = case.loads(case.routes_MLRTK)
    static = eq.plan(loads, slots=0, options=PlanOptions(max_displaced=0, sends="rows"), **given)
    # Levels rows whatever it costs: the sizes are too small to pay, and what is shown is that nothing changes.
    ours = eq.plan(loads, slots=1, objective="skew", options=PlanOptions(sends="rows"), **given)
    made = [
        Policy(name=name, plan=plan, routes_MLRTK=case.routes_MLRTK, rows="collective")
        for name, plan in (("static", None), ("static, prepared", static), ("equipoise, 1 slot, skew", ours))
    ]
    return [*made, *(replace(one, name=f"{one.name}, mapped inside nodes", rows="mapped") for one in made[1:])]


def predict(plan: Plan, case: NodeCase) -> dict[str, float]:
    """Seconds of a window by part, on the mean rank, so that parts add up; attention is measured apart.

    experts    products and activations
    exchange   rows to their slots and back, tokens spread and combined, the steps and links between ranks
    waiting    for the busiest rank of each visit
    exposed    transfers that nothing hides, and opening and closing the window
    accumulate gradients added to those of earlier micro-steps
    """
    cost = CostModel.of(plan.cluster, case.model, stage=case.stage)
    assert plan.itinerary is not None, "only plans that can be executed are predicted"
    edges = Edges(plan.edge_ns_2L, plan.edge_slow_2L)
    decision = Decision("equipoise", plan.home_LE, plan.replica_table, edges)
    (work,) = works_of(cost, plan.loads, plan.itinerary, [decision], repeats_forward=case.is_checkpointed)
    seconds, forward = replay([work]).seconds, cost.forward_alone
    moved_s = seconds.pull + seconds.return_ + seconds.publish + seconds.collect
    # A forward pass that is repeated moves and computes its rows again.
    again = int(case.is_checkpointed)
    visit_MLR = (1 + again) * work.forward_MLR + work.backward_MLR
    order_ns = cost.ordering_ns(work.rows_MLR) + again * forward.ordering_ns(work.rows_MLR)
    sent_MLR = plan.loads.load_MLRE.sum(axis=3)
    send_ns = cost.sending_ns(sent_MLR) + again * forward.sending_ns(sent_MLR)
    busiest = (1 + again) * work.forward_MLR.max(axis=2) + work.backward_MLR.max(axis=2)
    added = (plan.loads.num_micro_steps - 1) * case.model.layers if case.stage == "update" else 0
    return {
        "experts": float((visit_MLR - order_ns).mean(axis=2).sum()) / 1e9,
        "exchange": float((order_ns + send_ns).mean(axis=2).sum()) / 1e9 + seconds.all_to_all,
        "waiting": float((busiest - visit_MLR.mean(axis=2)).sum()) / 1e9,
        "exposed": moved_s + cost.profile.window_fixed_ns / 1e9,
        "accumulate": added * cost.add_ns(plan.home_slots * case.model.expert_bytes) / 1e9,
    }


def with_prediction(policy: Policy, case: NodeCase) -> Policy:
    """The same with its predicted parts, where rows go a way that the cost model prices."""
    if policy.plan is None or policy.is_live:
        return policy
    return replace(policy, predicted=predict(policy.plan, case))


def in_the_open(made: Plan) -> Plan:
    """The plan of `reactive` as one that can be executed: a forward visit pulls when it begins, not ahead."""
    loads = made.loads
    shape_MLR = (loads.num_micro_steps, loads.num_layers, made.cluster.ep)
    plan = executed(made, made.home_LE, *replica_slots(made.replica_table, shape_MLR))
    assert plan.itinerary is not None, "made above to be executed"
    visits_V = np.arange(len(plan.itinerary))
    ready_V = np.where(plan.itinerary.phase_V == 0, visits_V, plan.itinerary.ready_from_V)
    return replace(plan, itinerary=replace(plan.itinerary, ready_from_V=ready_V))


def executable(made: Plan) -> Plan:
    """A plan whose copies stay, as one whose homes are a permutation and whose other copies are replicas."""
    experts, ranks = made.model.experts, made.cluster.ep
    home_LE, quotas = np.empty_like(made.home_LE), []
    for layer in range(made.loads.num_layers):
        quota_MER = np.stack([made.split_RER(m, layer).sum(axis=0) for m in range(made.loads.num_micro_steps)])
        holds_ER = quota_MER.any(axis=0)
        holds_ER[np.arange(experts), made.home_LE[layer]] = True
        # Give every rank as many homes as it owns experts, wherever possible on a rank that has a copy.
        place_X = np.repeat(np.arange(ranks), made.home_slots)
        expert_E, at_E = linear_sum_assignment(-(quota_MER.sum(axis=0) * 2.0 + holds_ER)[:, place_X])
        home_LE[layer, expert_E] = place_X[at_E]
        quotas.append(quota_MER)
    return executed(made, home_LE, *fill_slots(home_LE, quotas))


def executed(made: Plan, home_LE: np.ndarray, expert_MLRS: np.ndarray, rows_MLRS: np.ndarray) -> Plan:
    """A rival's decisions as a plan whose replicas live for one micro-step."""
    task = WindowTask(
        loads=made.loads,
        cluster=made.cluster,
        model=made.model,
        slots=expert_MLRS.shape[3],
        objective=made.objective,
        options=PlanOptions(sends="rows"),
        policy=made.policy,
    )
    draft = Draft(
        home_LE=home_LE,
        home_slot_LE=home_slots_of(home_LE, made.cluster.ep),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=price_window(task.cost, task.loads, home_LE, expert_MLRS, rows_MLRS),
        closed_MLC=price_window(task.cost, task.loads, home_LE),
        edges=Edges.none(made.model.layers),
    )
    return build_plan(task, draft)


def plan_works(
    folder: Path, *, ranks: int, tokens: int, profile: str | None, keys: list[str], show: Callable[[str], None]
) -> list[NodeWork]:
    """Plan the chosen cases; all of them where no key is given."""
    chosen = {} if profile is None else {"profile": profile}

    def cluster(nodes: int, ep: int) -> Cluster:
        return Cluster.preset("h200", nodes=nodes, ranks_per_node=ep // nodes, ep=ep, **chosen)

    whole, half = cluster(1, ranks), cluster(1, ranks // 2)
    lite, qwen, oss = build_cases(folder, ranks=ranks, tokens=tokens)
    few = build_cases(folder, ranks=ranks // 2, tokens=tokens)[0]
    # NCCL joins ranks of one GPU by sockets: a small window is enough to show that nothing changes.
    short = replace(lite, name=f"{lite.name}, two nodes", routes_MLRTK=lite.routes_MLRTK[:2, :, :, : tokens // 8])
    small = {size: _cut(lite, size) for size in FEW}
    every: dict[str, tuple[NodeCase, Cluster, Callable[[NodeCase, Cluster], list[Policy]]]] = {
        "exchange": (lite, whole, exchanges_of),
        "lite": (lite, whole, policies_of),
        "qwen": (qwen, whole, policies_of),
        "oss": (oss, whole, policies_of),
        "recompute": (recomputed(lite), whole, policies_of),
        "checkpointing": (checkpointed(lite), whole, policies_of),
        "half": (few, half, policies_of),
        "nodes": (short, cluster(2, ranks), crossings_of),
        **{f"lite-{size}": (case, whole, policies_of) for size, case in small.items()},
    }
    works = []
    for key in keys or list(every):
        case, on, make = every[key]
        show(f"planning {key}: {case.name}")
        works.append(NodeWork(case=case, policies=make(case, on), cluster=on, key=key, is_bare=key == "exchange"))
    return works


def _cut(case: NodeCase, tokens: int) -> NodeCase:
    """The same window with fewer tokens in each micro-step."""
    return replace(case, name=f"{case.name}, {tokens:,} tokens", routes_MLRTK=case.routes_MLRTK[:, :, :, :tokens])


def recomputed(case: NodeCase) -> NodeCase:
    """The same window as a recompute stage."""
    return replace(case, name=f"{case.name}, recompute", stage="recompute")


def checkpointed(case: NodeCase) -> NodeCase:
    """The same window with activation checkpointing."""
    return replace(case, name=f"{case.name}, checkpointing", is_checkpointed=True)
