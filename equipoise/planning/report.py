"""`WindowReport`: what a plan promised for one window, what this rank moved, and how long training waited."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from equipoise.core.plan import Plan
from equipoise.layer.dispatch import FilledRows
from equipoise.layer.experts import Window
from equipoise.planning.background import Planned
from equipoise.transfer.waits import Counters

_COUNTS = ("pulls", "returns", "publishes", "collects", "on_demand")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    """Seconds of planning, in the background."""
    waited_s: float
    """Seconds that training waited for the plan."""
    counts: Mapping[str, int]
    """Pulls, returns, publishes, collects and on-demand visits of this rank."""
    bytes: Mapping[str, int]
    """Bytes that reached this rank, by path."""
    exposed_s: Mapping[str, float]
    """Seconds this rank waited for transfers, by path."""
    realised_s: float = 0.0
    """Seconds from begin to end on this rank, attention and all."""
    estimated_share: float = 0.0
    """Share of the planned rows that were estimated, because nobody knew their routes; the same on all ranks."""
    way: str = "full"
    """How much was planned: `full`, `placement` or `off`."""
    dispatch: str = "exchanged"
    """`prepared` where all dispatches were made ahead, else `exchanged` and why; the same on all ranks."""
    waves: int = 1
    """In which rows travelled, while experts of other waves computed; 1: all at once."""
    dispatch_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of tokens this rank sent in forward, `across` and `inside` nodes: `direct`, or what that would have been,
    and `two_level` where tokens went that way."""
    filled_rows: int = 0
    """Rows of this rank's free tokens without a route, which the window gave the least loaded experts."""
    planned_ML: np.ndarray | None = None
    """[M, L] rows that the plan gave this rank; None where nothing was planned."""
    arrived_ML: np.ndarray | None = None
    """[M, L] rows that arrived at this rank; -1 where a layer did not run."""

    counted_LE: np.ndarray | None = None
    """[L, E] rows of this rank's own tokens, as they were routed; None where all dispatches were made ahead."""

    @property
    def is_as_planned(self) -> bool:
        """Whether every layer got exactly the planned rows in every micro-step."""
        planned, arrived = self.planned_ML, self.arrived_ML
        return planned is not None and arrived is not None and np.array_equal(planned, arrived)


class WindowMeter:
    """Remembers the counters at a window's beginning, to report what the window alone has moved."""

    def __init__(self, counters: Counters, planned: Planned, window: Window) -> None:
        self._counters, self._planned, self._window = counters, planned, window
        self._before, self._begin_s = _snapshot(counters), time.monotonic()

    @property
    def plan(self) -> Plan:
        """The window's plan."""
        return self._planned.plan

    @property
    def filled(self) -> Mapping[tuple[int, int], FilledRows]:
        """The window's filled tokens."""
        return self._planned.filled

    def report(self) -> WindowReport:
        """Return the report of the window up to now."""
        moved: dict[str, Any] = {
            name: {key: value - self._before[name].get(key, 0) for key, value in now.items()}
            for name, now in _snapshot(self._counters).items()
        }
        plan = self._planned.plan
        filled_MLR = plan.loads.filled_MLR
        return WindowReport(
            **moved,
            digest=plan.digest(),
            predicted_s=plan.seconds.total,
            static_s=plan.static_seconds,
            displaced=int(plan.displaced_LE.sum()),
            replicas=len(plan.replica_table),
            planning_s=self._planned.planning_s,
            waited_s=self._planned.waited_s,
            realised_s=time.monotonic() - self._begin_s,
            estimated_share=plan.estimated_share,
            way=self._planned.way,
            dispatch=self._planned.dispatch,
            waves=plan.waves,
            dispatch_bytes=dict(self._window.sent_bytes),
            filled_rows=0 if filled_MLR is None else int(filled_MLR[:, :, self._window.rank].sum()),
            planned_ML=plan.rank_load_MLR[:, :, self._window.rank] if plan.itinerary is not None else None,
            arrived_ML=self._window.arrived_ML,
            counted_LE=self._counted(),
        )

    def _counted(self) -> np.ndarray | None:
        counted = self._window.counted
        if len(counted) < self.plan.loads.num_layers:
            return None
        counted_LE: np.ndarray = torch.stack([counted[layer] for layer in sorted(counted)]).cpu().numpy()
        return counted_LE


def _snapshot(counters: Counters) -> dict[str, dict[str, Any]]:
    counts = {name: getattr(counters, name) for name in _COUNTS}
    return {"counts": counts, "bytes": dict(counters.bytes), "exposed_s": dict(counters.exposed_s)}
