"""`Desk`: plans the windows of one balancer, a share of the layers first and then the whole from all shares.

Runs in the worker process alone: this is the one file of the room that imports the planner, and so numba.

Steps of a window:
1. `share`: plan some layers. Every rank does this for other layers, at the same time.
2. `whole`: plan the window as `planner.plan` does, but take a layer that some rank has planned from there.

A planned layer is kept under a key made of everything the planner looked at, so it can never stand for another one:
a layer that nobody planned, or that someone planned from other loads, is planned here.

Invariants (asserted by the tests):
1. `whole` gives the plan of `planner.plan`, bit for bit, with any shares or none.
2. With the shares of all ranks no layer is planned twice.
"""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape, Plan
from equipoise.core.options import BalancerOptions
from equipoise.planner import PlanOptions, plan
from equipoise.planner.assemble import Task
from equipoise.planner.layer import LayerPlan, complete
from equipoise.planner.plan import layer_problem
from equipoise.planner.replicas import plan_layer

Share = bytes
"""Planned layers by key, pickled: ranks pass them on, and one that opened them would import the planner."""


class Desk:
    """Where one balancer's windows are planned; keeps the last plan, whose homes the next search starts from."""

    def __init__(self, cluster: Cluster, model: ModelShape, options: BalancerOptions) -> None:
        self._cluster, self._model, self._slots = cluster, model, options.slots
        self._objective, self._options = options.objective, PlanOptions(**options.planner_figures)
        self._before: Plan | None = None
        self.num_planned = 0
        """Layers planned here, in all windows."""

    def share(self, loads: LoadMatrix, layers: Sequence[int]) -> Share:
        """Plan some layers of a window."""
        return pickle.dumps({_key(*inputs): self._plan_layer(*inputs) for inputs in self._inputs(loads, layers)})

    def whole(self, loads: LoadMatrix, shares: Sequence[Share]) -> Plan:
        """Plan a window from the shares of all ranks."""
        known: dict[str, LayerPlan] = {}
        for share in shares:
            known.update(pickle.loads(share))

        def recall(*inputs: Any) -> LayerPlan:
            return known.get(_key(*inputs)) or self._plan_layer(*inputs)

        self._before = plan(
            loads,
            cluster=self._cluster,
            model=self._model,
            slots=self._slots,
            objective=self._objective,
            options=self._options,
            warm=self._before,
            planner=recall,
        )
        return self._before

    def _plan_layer(self, *inputs: Any) -> LayerPlan:
        self.num_planned += 1
        return plan_layer(*inputs)

    def _inputs(self, loads: LoadMatrix, layers: Sequence[int]) -> list[tuple[Any, ...]]:
        """What `planner.plan` gives its layer planner for these layers."""
        task = self._task(loads)
        experts, ranks = self._model.experts, self._cluster.ep
        limit = self._options.max_displaced
        problem = layer_problem(task, budget=experts if limit is None else min(limit, experts))
        tables = task.cost.tables(experts // ranks + task.slots)
        owner_E = np.arange(experts) // (experts // ranks)
        none_EE = np.zeros((0, 0), dtype=np.int64)
        return [
            (
                np.array(task.loads.load_MLRE[:, layer], order="C"),
                np.array(owner_E if self._before is None else self._before.home_LE[layer]),
                none_EE,
                problem,
                tables,
            )
            for layer in layers
        ]

    def _task(self, loads: LoadMatrix) -> Task:
        completed, estimated = complete(loads)
        return Task(
            loads=completed,
            cluster=self._cluster,
            model=self._model,
            slots=self._options.slots_within(self._model, self._slots, stage=loads.stage),
            objective=self._objective,
            options=self._options,
            policy="equipoise",
            estimated_share=estimated,
        )


def _key(load_MRE: np.ndarray, start_E: np.ndarray, pair_EE: np.ndarray, problem: Any, tables: Any) -> str:
    hasher = hashlib.sha256()
    for value in (load_MRE, start_E, pair_EE, *problem, *tables):
        array = np.ascontiguousarray(value)
        hasher.update(repr((array.shape, array.dtype.str)).encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()
