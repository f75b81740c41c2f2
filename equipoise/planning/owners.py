"""`OwnersOnly`: the planner of a disabled balancer. Every expert computes at its owner, and every row goes there.

Knows no load and needs none. No process, no thread, no communication.
"""

from collections import deque

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.errors import InfeasiblePlanError
from equipoise.core.plan import Bytes, ReplicaTable, Seconds
from equipoise.planning.background import Planned
from equipoise.planning.rows import RankRows, WindowRoutes


class OwnersOnly:
    """Plans nothing: every expert computes at its owner. No process, no thread, no communication."""

    def __init__(self, *, cluster: Cluster, model: ModelShape) -> None:
        self._cluster, self._model = cluster, model
        self._windows: deque[RankRows] = deque()

    def submit(self, rows: RankRows, routes: WindowRoutes) -> None:
        """Take this rank's rows of the next window; only its number of micro-steps matters."""
        self._windows.append(rows)

    def take(self) -> Planned:
        """Return contiguous homes without replicas."""
        if not self._windows:
            raise InfeasiblePlanError("no window was submitted; submit its routes before it begins")
        rows = self._windows.popleft()
        plan = owners_plan(len(rows.load_MLE), cluster=self._cluster, model=self._model)
        return Planned(plan, planning_s=0.0, waited_s=0.0)

    def close(self) -> None:
        """Do nothing: nothing was opened."""


def owners_plan(micro_steps: int, *, cluster: Cluster, model: ModelShape) -> Plan:
    """A plan that knows no load: every expert's home is its owner, and every row goes home."""
    shape_ML = (micro_steps, model.layers)
    place_LE = np.tile(np.arange(model.experts), (model.layers, 1))
    home_slots = cluster.home_slots(model)
    return Plan(
        loads=LoadMatrix(np.zeros((*shape_ML, cluster.ep, model.experts), dtype=np.int64)),
        cluster=cluster,
        model=model,
        policy="static",
        objective="seconds",
        slots=0,
        home_LE=place_LE // home_slots,
        home_slot_LE=place_LE % home_slots,
        replica_table=ReplicaTable.empty(micro_steps * model.layers),
        ns_ML=np.zeros(shape_ML, dtype=np.int64),
        closed_ns_ML=np.zeros(shape_ML, dtype=np.int64),
        seconds=Seconds(),
        bytes=Bytes(),
        static_seconds=0.0,
    )
