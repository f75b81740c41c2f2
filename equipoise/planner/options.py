"""`PlanOptions`: the deeper knobs of the planner. The one dial users turn is `slots`.

Knows no loads. Config is never changed after construction; unknown names are errors, because this is a dataclass.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from equipoise.core import InfeasiblePlanError, ModelShape, Stage
from equipoise.core.plan import Sends
from equipoise.core.value import require_int
from equipoise.cost.model import replica_bytes

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
