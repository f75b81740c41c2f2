"""Price the imbalance of one RL step inside a trainer, from the routes it already holds, as scalars for its logger.

1. Read: a verl batch, slime's samples, or anything else that `read_routes` takes.
2. Count: samples are packed by a token budget into micro-steps of the EP group, as trainers pack them.
3. Price: expert layers with experts at their owners, and with even ranks, on the described cluster.

Nothing of the trainer changes, no kernel is touched and no plan is made.
"""

from typing import Any, Literal

import numpy as np

from equipoise.core import Cluster, ModelShape
from equipoise.loads import count_step, step_schedules
from equipoise.routes import read_routes
from equipoise.sim.analysis import analyze_loads


def imbalance_metrics(
    batch: Any,
    *,
    model: ModelShape | str,
    cluster: Cluster,
    token_budget: int,
    format: str | None = None,
    sends: Literal["rows", "tokens"] = "tokens",
) -> dict[str, float]:
    """Return what uneven experts cost in the update of one step: predicted seconds and shares, measured skew.

    Args:
        batch: what the trainer holds: a verl DataProto or TensorDict, slime's samples, a path
        model: the model that was rolled out, or its preset
        cluster: EP group, device and links of the training
        token_budget: tokens per rank and micro-step, as the trainer packs
        format: the batch's format; recognised if left out
        sends: what crosses nodes: a token once per node (DeepEP), or every row (Megatron's alltoall)
    """
    shape = ModelShape.preset(model) if isinstance(model, str) else model
    routes = read_routes(batch, model=shape, format=format)
    lengths = np.array([sample.num_tokens for sample in routes])
    schedules = step_schedules(lengths, ranks=cluster.ep, token_budget=token_budget, recompute=False)
    found = analyze_loads(count_step(routes, schedules), model=shape, cluster=cluster, slots=None, sends=sends)
    seconds, skew = found.seconds, found.stages["update"].skew.dispatched
    return {
        "equipoise/lost_pct": 100 * seconds.share(seconds.lost_seconds),
        "equipoise/lost_s": seconds.lost_seconds,
        "equipoise/expert_s": seconds.now.total,
        "equipoise/skew_mean": skew.mean,
        "equipoise/skew_max": skew.max,
        "equipoise/coverage": found.coverage,
    }
