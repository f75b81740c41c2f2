"""`PlanOptions`: the deeper knobs of the planner. The one dial users turn is `slots`.

Knows no loads. Config is never changed after construction; unknown names are errors, because this is a dataclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.loads import Stage
from equipoise.core.model import ModelShape
from equipoise.core.plan import Objective, Sends
from equipoise.core.value import require_int

# `BalancerOptions`: how windows are planned and transfers bounded. The one dial users turn is `slots`.


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


Order = Literal["plain", "recompute", "1f1b"]
"""Execution order of the update stage: every forward, then every backward of a micro-step (`plain`); the same with the
forward repeated inside backward (`recompute`); or pipelined, one forward, one backward (`1f1b`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How to plan."""

    gate: bool = True
    """Use replicas only in micro-steps and layers where they pay; the skew objective opens the gate."""
    max_displaced: int | None = None
    """Most experts per layer whose home may leave the owner; 0 keeps homes at owners, None sets no limit."""
    cross_node: bool = False
    """In recompute windows, take replicas from any node where that pays: needs a host store that holds every expert."""
    sends: Sends = "rows"
    """What crosses nodes in an all-to-all: every row, or a token once per node."""
    memory_bytes: int | None = None
    """Bytes per rank for replicas, instead of `slots`: weights and, in updates, gradients on their way home."""
    effort: int = 1
    """Search effort: 2 looks about twice as long for better homes."""
    workers: int = 1
    """Threads that share out the layers; the plan does not depend on it."""
    depth: int = 1
    """Visits ahead that pulls may start; depth + 1 buffers are needed."""
    order: Order = "plain"
    pipeline_stage: int = 0
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        for name in ("gate", "cross_node"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise InfeasiblePlanError(f"PlanOptions.{name} is {getattr(self, name)!r}; it must be True or False")
        lowest = {"effort": 1, "workers": 1, "depth": 1, "pipeline_stage": 0, "pipeline_stages": 1}
        optional = {"max_displaced": 0, "memory_bytes": 0}
        given = {name: low for name, low in optional.items() if getattr(self, name) is not None}
        for name, low in {**lowest, **given}.items():
            value = require_int(f"PlanOptions.{name}", getattr(self, name), low=low, error=InfeasiblePlanError)
            object.__setattr__(self, name, value)
        if self.pipeline_stage >= self.pipeline_stages:
            raise InfeasiblePlanError(
                f"PlanOptions.pipeline_stage is {self.pipeline_stage}; there are {self.pipeline_stages} stages from 0"
            )
        for name, allowed in (("order", Order), ("sends", Sends)):
            if getattr(self, name) not in get_args(allowed):
                raise InfeasiblePlanError(
                    f"PlanOptions.{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(allowed))}"
                )

    def slots_within(self, model: ModelShape, slots: int | None, *, stage: Stage) -> int:
        """Replica slots per rank: as asked for, or as many as the byte budget holds in depth + 1 buffers."""
        if self.memory_bytes is None:
            wanted = 1 if slots is None else slots
            return require_int("slots", wanted, low=0, error=InfeasiblePlanError)
        if slots is not None:
            raise InfeasiblePlanError(
                f"give slots or PlanOptions.memory_bytes, not both (slots={slots}, memory_bytes={self.memory_bytes})"
            )
        return self.memory_bytes // ((self.depth + 1) * replica_bytes(model, stage))


def replica_bytes(model: ModelShape, stage: Stage) -> int:
    """Bytes one replica slot takes in one buffer: the weights, and in updates the gradient on its way home."""
    return model.expert_bytes * (2 if stage == "update" else 1)
