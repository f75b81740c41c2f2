"""Try a plan on every window of a step, to say what it would give back. Predicted, nothing runs.

Knows loads and the planner. Does not know terminals.

Steps:
1. Plan each window of each EP group, the search starting from the homes of the window before, as a run would.
2. Per window the slowest group counts. Every plan is charged with its own publish, collect, pulls and returns.

Invariants (asserted by the tests):
1. A trial never takes longer than contiguous expert parallelism: "do nothing" is one of the plans.
2. It is worth it exactly when it saves at least `WORTH` of the seconds.
3. Progress ends at its total, and never runs backwards.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.core.plan import Plan, Seconds
from equipoise.cost.model import Tables, replica_bytes
from equipoise.loads.skew import Distribution, rank_loads, skew_ML
from equipoise.planner import PlanOptions, plan
from equipoise.planner.fast import plan_layer
from equipoise.planner.layer import LayerPlan, LayerProblem
from equipoise.planner.plan import LayerPlanner
from equipoise.sim.prediction import slowest

WORTH = 0.01
"""Share of the seconds that a plan must save to be worth its trouble."""
Progress = Callable[[int, int], None]
"""Called with (layers planned, layers in all)."""
Groups = Sequence[LoadMatrix]
"""One window: the loads of each of its EP groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The plans of one step."""

    slots: int
    """Replica slots per rank; 0: placement alone."""
    buffer_bytes: int
    """Of replica slots per rank: slots x buffers x one expert, weights and, where a window updates, gradients."""
    plans: tuple[tuple[Plan, ...], ...]
    """Per window, one plan per EP group."""

    @property
    def seconds(self) -> tuple[Seconds, ...]:
        """Per window, predicted seconds of its slowest group."""
        return tuple(slowest(p.seconds for p in window) for window in self.plans)

    @property
    def displaced(self) -> int:
        """Experts whose home is not their owner, over all windows and layers."""
        return sum(int(p.displaced_LE.sum()) for window in self.plans for p in window)

    @property
    def replicas(self) -> int:
        """Replicas over all micro-steps and layers."""
        return sum(len(p.replica_table) for window in self.plans for p in window)

    @property
    def estimated_share(self) -> float:
        """Largest share of a window's rows that had to be estimated, because their routes are unknown."""
        return max(p.estimated_share for window in self.plans for p in window)

    def skew_before(self, stage: str) -> Distribution:
        """Skew of the planned loads under contiguous owners."""
        return _distribution(rank_loads(p.loads) for p in self._of(stage))

    def skew_after(self, stage: str) -> Distribution:
        """Skew with the plans."""
        return _distribution(p.rank_load_MLR for p in self._of(stage))

    def _of(self, stage: str) -> list[Plan]:
        return [p for window in self.plans for p in window if p.loads.stage == stage]

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        stages = dict.fromkeys(p.loads.stage for window in self.plans for p in window)
        return {
            "slots": self.slots,
            "buffer_bytes": self.buffer_bytes,
            "displaced": self.displaced,
            "replicas": self.replicas,
            "estimated_share": self.estimated_share,
            "skew": {
                name: {"before": self.skew_before(name).to_dict(), "after": self.skew_after(name).to_dict()}
                for name in stages
            },
        }


def try_plans(
    windows: Sequence[Groups],
    *,
    cluster: Cluster,
    model: ModelShape,
    slots: int,
    progress: Progress | None = None,
) -> Trial:
    """Plan every window of a step.

    Args:
        windows: loads by window and EP group; sources are the ranks of the group
        cluster: the EP group and its links
        model: as many layers as the loads have
        slots: replica slots per rank
        progress: called after each layer
    """
    options, report = PlanOptions(), progress or (lambda done, total: None)
    total = model.layers * sum(len(groups) for groups in windows)
    made: list[tuple[Plan, ...]] = []
    done = 0
    for groups in windows:
        plans: list[Plan] = []
        for group, loads in enumerate(groups):
            warm = made[-1][group] if made and group < len(made[-1]) else None
            planner = _counting(report, first=done + 1, last=done + model.layers, total=total)
            plans.append(
                plan(loads, cluster=cluster, model=model, slots=slots, options=options, warm=warm, planner=planner)
            )
            done += model.layers
            report(done, total)
        made.append(tuple(plans))
    each = max(replica_bytes(model, loads.stage) for groups in windows for loads in groups)
    return Trial(slots=slots, buffer_bytes=slots * (options.depth + 1) * each, plans=tuple(made))


def _counting(report: Progress, *, first: int, last: int, total: int) -> LayerPlanner:
    """`plan_layer` that reports each layer; layers of a second search count no more."""
    steps = count(first)

    def plan_and_report(
        load_MRE: np.ndarray, start_E: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
    ) -> LayerPlan:
        made = plan_layer(load_MRE, start_E, pair_EE, problem, tables)
        report(min(next(steps), last), total)
        return made

    return plan_and_report


def _distribution(loads: Iterable[np.ndarray]) -> Distribution:
    """Skew of every micro-step and layer of several [M, L, R] loads of ranks."""
    return Distribution(np.concatenate([skew_ML(load_MLR) for load_MLR in loads]))
