"""`PlanServer` plans the windows of one balancer: a share of the layers first, then the whole from all shares.

It runs in the planning process alone: this is the one file of the room that imports the planner, and so numba.

Steps of a window:
1. `share`: plan some layers. Every rank does this for other layers, at the same time.
2. `whole`: plan the window as `planner.plan` does, but look up layers that some rank has planned.

A planned layer is kept under a hash of everything the planner looked at. A layer that nobody planned, or that someone
planned from other loads, is planned here.
"""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.options import BalancerOptions
from equipoise.planner import plan
from equipoise.planner.assemble import WindowTask
from equipoise.planner.layer import layer_problem, plan_layer
from equipoise.planner.plan import complete
from equipoise.planner.replicas import LayerPlan
from equipoise.planning.course import WAYS, Way, moved_seconds

Share = bytes
"""Planned layers by key, pickled: a rank that unpickled them would import the planner."""


class PlanServer:
    """Plans one balancer's windows and keeps the last plan, whose homes the next search starts from."""

    def __init__(self, cluster: Cluster, model: ModelShape, options: BalancerOptions) -> None:
        self._cluster, self._model, self._options = cluster, model, options
        self._before: Plan | None = None
        self.num_planned = 0
        """Layers planned here, in all windows."""

    def share(
        self, loads: LoadMatrix, layers: Sequence[int], way: Way = "full", forecast: LoadMatrix | None = None
    ) -> Share:
        """Plan some layers of a window; arguments as in `whole`."""
        found = self._inputs(loads, layers, self._on(way), forecast)
        return pickle.dumps({_key(*inputs): self._plan_layer(*inputs) for inputs in found})

    def whole(
        self,
        loads: LoadMatrix,
        shares: Sequence[Share],
        way: Way = "full",
        correction: float = 1.0,
        forecast: LoadMatrix | None = None,
    ) -> Plan:
        """Plan a window from the shares of all ranks.

        Args:
            way: how much may be planned
            correction: factor on the predicted seconds of exposed transfers; a plan that does not pay with it is not
                used, and less is planned
            forecast: what to expect of rows whose routes are unknown
        """
        known: dict[str, LayerPlan] = {}
        for share in shares:
            known.update(pickle.loads(share))

        def recall(*inputs: Any) -> LayerPlan:
            return known.get(_key(*inputs)) or self._plan_layer(*inputs)

        for tried in WAYS[WAYS.index(way) :]:
            options = self._on(tried)
            made = plan(
                loads,
                cluster=self._cluster,
                model=self._model,
                slots=options.slots,
                objective=options.objective,
                options=options,
                forecast=forecast,
                warm=self._before,
                planner=recall,
            )
            dearer_s = (correction - 1.0) * moved_seconds(made)
            if dearer_s <= 0 or made.seconds.total + dearer_s < made.static_seconds:
                break
        self._before = made
        return made

    def forget(self) -> None:
        """Plan the next window as if it were the first."""
        self._before = None

    def _on(self, way: Way) -> BalancerOptions:
        """The options of a way: homes alone have no replica slots, and `off` moves no home."""
        if way == "full":
            return self._options
        return replace(self._options, slots=0, max_displaced=0 if way == "off" else self._options.max_displaced)

    def _plan_layer(self, *inputs: Any) -> LayerPlan:
        self.num_planned += 1
        return plan_layer(*inputs)

    def _inputs(
        self, loads: LoadMatrix, layers: Sequence[int], options: BalancerOptions, forecast: LoadMatrix | None
    ) -> list[tuple[Any, ...]]:
        """Return what `planner.plan` gives its layer planner for these layers."""
        completed, estimated = complete(loads, forecast=forecast)
        task = WindowTask(
            loads=completed,
            cluster=self._cluster,
            model=self._model,
            slots=options.slots,
            objective=options.objective,
            options=options,
            policy="equipoise",
            estimated_share=estimated,
        )
        experts, ranks = self._model.experts, self._cluster.ep
        limit = options.max_displaced
        problem = layer_problem(task, budget=experts if limit is None else min(limit, experts))
        tables = task.cost.tables(experts // ranks + task.slots)
        owner_E = np.arange(experts) // (experts // ranks)
        none_EE = np.zeros((0, 0), dtype=np.int64)
        return [
            (
                np.array(completed.load_MLRE[:, layer], order="C"),
                np.array(owner_E if self._before is None else self._before.home_LE[layer]),
                none_EE,
                problem,
                tables,
            )
            for layer in layers
        ]


def _key(load_MRE: np.ndarray, start_E: np.ndarray, pair_EE: np.ndarray, problem: Any, tables: Any) -> str:
    hasher = hashlib.sha256()
    for value in (load_MRE, start_E, pair_EE, *problem, *tables):
        array = np.ascontiguousarray(value)
        hasher.update(repr((array.shape, array.dtype.str)).encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()
