"""Expert load balancing by foresight for RL post-training of Mixture-of-Experts models.

The verbs and nouns of the torch-free half, loaded when first used, so that `import equipoise` stays fast:

    routes = eq.read_routes("rollouts.jsonl", model="qwen3-30b-a3b")
    loads  = eq.count_loads(routes, schedule)
    plan   = eq.plan(loads, cluster=cluster, model=model, slots=1)
    result = eq.simulate(loads, ["static", "equipoise", "balanced"], cluster=cluster, model=model)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.core import (
        AdapterError,
        Cluster,
        EquipoiseError,
        InfeasiblePlanError,
        LoadMatrix,
        LoadsError,
        ModelShape,
        Plan,
        RouteCounts,
        Routes,
        RoutesError,
        SampleRoutes,
        Schedule,
        ScheduleError,
        TopologyError,
        TrainingError,
        TransferError,
    )
    from equipoise.core.options import Capacities
    from equipoise.imbalance import imbalance_metrics
    from equipoise.loads import (
        MemoryLimit,
        count_loads,
        count_routes,
        pack_window,
        plan_memory,
        schedule_tokens,
        sketch_counts,
        skew,
    )
    from equipoise.planner import PlanOptions, plan, plan_step
    from equipoise.report import write_report
    from equipoise.routes import diagnose, read_routes, write_routes
    from equipoise.routes.doctor import Delivery, plant_markers, prove_slicing
    from equipoise.sim import StepSetting, simulate

__version__ = "0.2.0"

_HOMES = {
    "read_routes": "equipoise.routes",
    "write_routes": "equipoise.routes",
    "count_routes": "equipoise.loads",
    "diagnose": "equipoise.routes",
    "plant_markers": "equipoise.routes.doctor",
    "prove_slicing": "equipoise.routes.doctor",
    "Delivery": "equipoise.routes.doctor",
    "count_loads": "equipoise.loads",
    "skew": "equipoise.loads",
    "schedule_tokens": "equipoise.loads",
    "sketch_counts": "equipoise.loads",
    "pack_window": "equipoise.loads",
    "MemoryLimit": "equipoise.loads",
    "plan_memory": "equipoise.loads",
    "plan": "equipoise.planner",
    "plan_step": "equipoise.planner",
    "write_report": "equipoise.report",
    "PlanOptions": "equipoise.planner",
    "Capacities": "equipoise.core.options",
    "imbalance_metrics": "equipoise.imbalance",
    "simulate": "equipoise.sim",
    "StepSetting": "equipoise.sim",
}

__all__ = [
    "read_routes",
    "write_routes",
    "count_routes",
    "diagnose",
    "plant_markers",
    "prove_slicing",
    "count_loads",
    "skew",
    "schedule_tokens",
    "sketch_counts",
    "pack_window",
    "plan",
    "plan_step",
    "plan_memory",
    "simulate",
    "imbalance_metrics",
    "write_report",
    "Cluster",
    "ModelShape",
    "Routes",
    "SampleRoutes",
    "RouteCounts",
    "Schedule",
    "LoadMatrix",
    "Plan",
    "PlanOptions",
    "Capacities",
    "MemoryLimit",
    "StepSetting",
    "Delivery",
    "EquipoiseError",
    "RoutesError",
    "ScheduleError",
    "LoadsError",
    "TopologyError",
    "InfeasiblePlanError",
    "TransferError",
    "AdapterError",
    "TrainingError",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "equipoise.core")), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
