"""`WindowReport`: what one window was promised, what it moved on this rank, and what training waited for.

Knows plans and counters. Does not know how a report is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from equipoise.core import Plan
from equipoise.planning.background import Planned
from equipoise.runtime.counters import Counters

_COUNTS = ("pulls", "returns", "publishes", "collects", "on_demand")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """One window of one rank, from its plan to its last transfer."""

    digest: str
    """Of the plan; the same on all ranks."""
    predicted_s: float
    """Predicted seconds of the MoE part with the plan."""
    static_s: float
    """Predicted seconds under contiguous expert parallelism."""
    displaced: int
    """Experts, over all layers, that computed elsewhere than at their owner."""
    replicas: int
    """Replicas of all micro-steps, layers and ranks."""
    planning_s: float
    """Planning in the background."""
    waited_s: float
    """What training waited for the plan."""
    counts: Mapping[str, int]
    """Pulls, returns, publishes, collects and on-demand visits of this rank."""
    bytes: Mapping[str, int]
    """Bytes that reached this rank, by path."""
    exposed_s: Mapping[str, float]
    """Seconds this rank stood still for transfers, by path."""


class Tally:
    """Counters of an engine where a window began."""

    def __init__(self, counters: Counters | None) -> None:
        """Remember the counters as they are now; None where there is no engine."""
        self._counters = counters
        self._before = _copy(counters)

    def report(self, planned: Planned) -> WindowReport:
        """Say what has been counted since."""
        moved = {
            name: {key: value - self._before[name].get(key, 0) for key, value in now.items()}
            for name, now in _copy(self._counters).items()
        }
        plan: Plan = planned.plan
        return WindowReport(
            digest=plan.digest(),
            predicted_s=plan.seconds.total,
            static_s=plan.static_seconds,
            displaced=int(plan.displaced_LE.sum()),
            replicas=len(plan.replica_table),
            planning_s=planned.planning_s,
            waited_s=planned.waited_s,
            **moved,
        )


def _copy(counters: Counters | None) -> dict[str, dict[str, Any]]:
    if counters is None:
        return {"counts": {}, "bytes": {}, "exposed_s": {}}
    counts = {name: getattr(counters, name) for name in _COUNTS}
    return {"counts": counts, "bytes": dict(counters.bytes), "exposed_s": dict(counters.exposed_s)}
