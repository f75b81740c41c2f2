"""What the node benchmark runs: windows of real routes, and the plan of every policy, as a balancer can execute it.

A plan whose copies stay for the whole window (EPLB, LPLB) is executed with the same copies in every micro-step. They
are pulled ahead like any replica, and layers read rows through mapped memory, so that rivals use the same kernels.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

import equipoise as eq
from benchmarks.traces import FOLDER, Trace, read_traces
from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.options import PlanOptions
from equipoise.cost.window import Edges, price_window
from equipoise.planner.assemble import Draft, WindowTask, build_plan, home_slots_of
from equipoise.planner.baselines import fill_slots

MICRO_STEPS, LAYERS = 4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCase:
    """One window of one EP group."""

    name: str
    model: ModelShape
    routes_MLRTK: np.ndarray
    """[M, L, R, T, K] experts of every token."""
    stage: str = "update"
    is_checkpointed: bool = False
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the EP group."""
        return int(self.routes_MLRTK.shape[2])

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


def build_cases(folder: Path = FOLDER, *, ranks: int, tokens: int) -> list[NodeCase]:
    """Windows of three layer shapes; every micro-step of the ESFT ones is another domain."""
    *domains, gpt = read_traces(folder)
    esft = np.stack([_tokens(one, ranks=ranks, tokens=tokens) for one in domains])
    lite = ModelShape.preset("deepseek-v2-lite", layers=LAYERS)
    # Two layers of 64 experts side by side, the first four choices of each: Qwen3's 128 experts and top-8.
    wide = np.concatenate([esft[..., ::2, :4], esft[..., 1::2, :4] + 64], axis=-1)
    qwen = ModelShape.preset("qwen3-30b-a3b", layers=LAYERS)
    oss = np.stack([_tokens(gpt, ranks=ranks, tokens=tokens, start=m * ranks * tokens) for m in range(MICRO_STEPS)])
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
    """[M, L, R, T, K] a few layers, spread over the model."""
    at = np.linspace(1, ids_MRTLK.shape[3] - 1, LAYERS).astype(int)
    return ids_MRTLK[:, :, :, at].transpose(0, 3, 1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What ranks run."""

    name: str
    plan: Plan | None
    """None: layers sort their rows and exchange counts, every expert at its owner."""
    routes_MLRTK: np.ndarray
    rows: str = "auto"
    """How prepared rows travel, see `BalancerOptions.rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """A case with the plans of its policies."""

    case: NodeCase
    policies: list[Policy]
    cluster: Cluster
    is_bare: bool = False
    """Routed experts alone, without attention."""


def policies_of(case: NodeCase, cluster: Cluster) -> list[Policy]:
    """Every policy of a case, planned with the cluster's profile."""
    loads, uniform = case.loads(case.routes_MLRTK), case.uniform()
    given: dict[str, Any] = {"cluster": cluster, "model": case.model}
    owners = PlanOptions(max_displaced=0)

    def ours(slots: int, objective: Any) -> Plan:
        return eq.plan(loads, slots=slots, objective=objective, **given)

    made = {
        "static": None,
        "static, prepared": eq.plan(loads, slots=0, options=owners, **given),
        "eplb-oracle": executable(eq.plan(loads, slots=1, policy="eplb-oracle", **given)),
        "lplb": executable(eq.plan(loads, slots=1, policy="lplb", **given)),
        "equipoise, 0 slots": ours(0, "seconds"),
        "equipoise, 1 slot": ours(1, "seconds"),
        "equipoise, 2 slots": ours(2, "seconds"),
        "equipoise, 1 slot, skew": ours(1, "skew"),
    }
    level = eq.plan(case.loads(uniform), slots=0, options=owners, **given)
    policies = [Policy(name=name, plan=plan, routes_MLRTK=case.routes_MLRTK) for name, plan in made.items()]
    policies.append(Policy(name="uniform", plan=None, routes_MLRTK=uniform))
    return [*policies, Policy(name="uniform, prepared", plan=level, routes_MLRTK=uniform)]


def exchanges_of(case: NodeCase, cluster: Cluster) -> list[Policy]:
    """Three ways of the same rows in a level layer: sorted and counted in the layer, prepared, and mapped."""
    uniform = case.uniform()
    level = eq.plan(
        case.loads(uniform), cluster=cluster, model=case.model, slots=0, options=PlanOptions(max_displaced=0)
    )
    return [
        Policy(name="plain", plan=None, routes_MLRTK=uniform),
        Policy(name="prepared", plan=level, routes_MLRTK=uniform, rows="collective"),
        Policy(name="mapped", plan=level, routes_MLRTK=uniform),
    ]


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
    expert_MLRS, rows_MLRS = fill_slots(home_LE, quotas)
    slots = expert_MLRS.shape[3]
    task = WindowTask(
        loads=made.loads,
        cluster=made.cluster,
        model=made.model,
        slots=slots,
        objective=made.objective,
        options=PlanOptions(),
        policy=made.policy,
    )
    draft = Draft(
        home_LE=home_LE,
        home_slot_LE=home_slots_of(home_LE, ranks),
        rep_expert_MLRS=expert_MLRS,
        rep_rows_MLRS=rows_MLRS,
        line_MLC=price_window(task.cost, task.loads, home_LE, expert_MLRS, rows_MLRS),
        closed_MLC=price_window(task.cost, task.loads, home_LE),
        edges=Edges.none(made.model.layers),
    )
    return build_plan(task, draft)


def recomputed(case: NodeCase) -> NodeCase:
    """The same window as a recompute stage."""
    return replace(case, name=f"{case.name}, recompute", stage="recompute")


def checkpointed(case: NodeCase) -> NodeCase:
    """The same window with activation checkpointing."""
    return replace(case, name=f"{case.name}, checkpointing", is_checkpointed=True)
