"""What the planner's benchmarks share: clusters, generated loads, and one line of their table."""

import time
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Plan
from equipoise.loads.generator import generate_counts
from equipoise.planner import PlanOptions, plan
from tests.planner.bounds import node_bound_ML

Row = dict[str, Any]
ROWS = PlanOptions(sends="rows")
"""Every row crosses nodes on its own, unless a benchmark says otherwise."""


def cluster_of(ranks: int) -> Cluster:
    """H200 nodes of 8."""
    return Cluster.preset("h200", nodes=-(-ranks // 8), ranks_per_node=8, ep=ranks)


def mean_skew(made: Plan) -> float:
    """Mean over micro-steps and layers of busiest over mean rank."""
    load_MLR = made.rank_load_MLR
    return float((load_MLR.max(axis=-1) / np.maximum(load_MLR.mean(axis=-1), 1e-300)).mean())


def row_of(table: str, trace: str, made: Plan, plan_s: float, *, tokens: int, peak_mb: int = 0) -> Row:
    """One line of the table."""
    bound_ML = node_bound_ML(made.loads, made.home_LE, made.cluster)
    return {
        "table": table,
        "trace": trace,
        "EP": made.cluster.ep,
        "experts": made.loads.num_experts,
        "M": made.loads.num_micro_steps,
        "L": made.loads.num_layers,
        "tokens": tokens,
        "slots": made.slots,
        "policy": made.policy,
        "skew": round(mean_skew(made), 5),
        "node_bound": round(float(bound_ML.mean()), 5),
        "predicted_ms": made.seconds.total * 1e3,
        "static_ms": made.static_seconds * 1e3,
        "plan_ms": plan_s * 1e3,
        "peak_MB": peak_mb,
    }


def timed(loads: LoadMatrix, **arguments: Any) -> tuple[Plan, float]:
    """Plan and take the time."""
    arguments = {"options": ROWS, **arguments}
    start = time.perf_counter()
    made = plan(loads, **arguments)
    return made, time.perf_counter() - start


def generated_loads(
    model: ModelShape, *, micro_steps: int, ranks: int, mean_tokens: int, step: int = 0, domains: int = 4, seed: int = 0
) -> LoadMatrix:
    """One generated sample per micro-step and source rank."""
    counts = generate_counts(
        model,
        samples=micro_steps * ranks,
        mean_tokens=mean_tokens,
        length_sigma=0.3,
        step=step,
        domains=domains,
        seed=seed,
    )
    shape = (micro_steps, ranks, model.layers, model.experts)
    return LoadMatrix(counts.count_BLE.reshape(shape).transpose(0, 2, 1, 3))
