"""`BalancerOptions`: how windows are planned and transfers bounded. The one dial users turn is `slots`.

Knows no loads. Importing it imports neither numba nor torch, because training processes do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from equipoise.core.plan import Objective, Sends


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerOptions:
    """What a balancer needs to know beyond the model and the cluster; the planner checks what it is given of it."""

    slots: int = 1
    """Replica slots per rank; 0 for placement alone."""
    objective: Objective = "seconds"
    """`seconds` charges every cost and may decide to do nothing; `skew` levels rows whatever it costs."""
    max_displaced: int | None = None
    """Most experts per layer whose home may leave the owner; None sets no limit."""
    order: Literal["plain", "recompute", "1f1b"] = "plain"
    """Execution order of the update stage, see `planner.options`."""
    cross_node: bool = False
    """In recompute windows, take replicas from any node; the host store of every node then holds all experts."""
    sends: Sends = "rows"
    """What crosses nodes in every exchange, for the planner's prices: `tokens` where an engine sends them once per node
    both ways (DeepEP). Our two-level dispatch does so one way only: `rows`."""
    depth: int = 1
    """Visits that pulls may run ahead."""
    pipeline_stage: int = 0
    pipeline_stages: int = 1
    budget_bytes: int | None = None
    """Most bytes per rank for replica buffers, mailboxes and outbox together."""
    store_bytes: int | None = None
    """Most bytes of host memory per node for the host store, which holds all routed experts of the model."""
    timeout_s: float = 60.0
    """Bound on every wait of a transfer."""
    grad_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of accumulated gradients; None: as the weights. Example: `float32` for Megatron's `main_grad` of bf16 weights."""
    path: Literal["plan", "peer", "host"] = "plan"
    """Which way pulls go: as the plan says, or all of them by one path."""
    buffers: Literal["auto", "separate", "arena"] = "auto"
    """`arena`: home and replica slots of a layer are one tensor, and one grouped product covers both; `auto`: an arena
    where experts are on a CUDA device."""
    is_checked: bool = False
    """Keep a checksum of every expert in the host store, and compare it before a pull."""
    is_prepared: bool = True
    """Make every dispatch of a window ahead where all routes are known; False where other routes may come than those
    submitted. Then each layer sorts its rows and exchanges counts, and follows whatever comes."""
    prepared_bytes: int = 8 << 30
    """Most bytes of host memory per rank for the dispatches of one window; beyond it layers exchange counts."""
    planning_timeout_s: float = 300.0
    """Bound on planning one window and on every exchange of it; the first one may have to compile the planner."""

    @property
    def planner_figures(self) -> Mapping[str, Any]:
        """The fields of `PlanOptions` that are set here."""
        names = ("max_displaced", "cross_node", "sends", "order", "depth", "pipeline_stage", "pipeline_stages")
        return {name: getattr(self, name) for name in names}

    @property
    def transfer_figures(self) -> Mapping[str, Any]:
        """The fields of `TransferOptions` that are set here."""
        names = ("slots", "depth", "budget_bytes", "store_bytes", "timeout_s", "path", "buffers", "is_checked")
        return {name: getattr(self, name) for name in names}
