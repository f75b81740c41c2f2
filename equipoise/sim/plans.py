"""Where a simulation's plans come from: made by a policy as the step goes on, or given.

Knows the planner. Does not know seconds or clocks.

Invariants (asserted by the tests):
1. A policy plans each window of each group and pipeline stage on its own, its search starting from the window before.
2. Given plans are replayed as they are, and refused where their loads are not those of the windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, ModelShape
from equipoise.core.plan import Plan
from equipoise.planner import PlanOptions, plan
from equipoise.planner.estimate import complete
from equipoise.sim.trial import Groups
from equipoise.sim.windows import layers_of

NO_SLOTS = ("static", "balanced")
"""Policies that need no replica slot: one because it has no replica, one because it cannot exist."""


def stage_layers(layers: int, stages: int) -> list[slice]:
    """The MoE layers of each pipeline stage: consecutive, as equal as possible."""
    bounds = [layers * p // stages for p in range(stages + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


class PlanSource(Protocol):
    """Hands out the plans of a step, window after window."""

    policy: str

    @property
    def slots(self) -> int:
        """Replica slots per rank that the policy takes."""

    def plans(self, loads: LoadMatrix, *, window: int, group: int) -> Sequence[Plan]:
        """The plans of one group's window, one per pipeline stage."""


@dataclass(slots=True, kw_only=True)
class PolicyPlans:
    """Plans that a policy makes."""

    policy: str
    slots: int
    cluster: Cluster
    model: ModelShape
    options: PlanOptions
    pipeline_stages: int = 1
    history: LoadMatrix | None = None
    pair_LEE: np.ndarray | None = None
    keeps_plans: bool = True
    """Whether a later window may start from an earlier one's plan; a plan holds its loads, which takes memory."""
    _warm: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """The last plan of each (group, pipeline stage)."""
    _slots: int = field(init=False)

    def __post_init__(self) -> None:
        self._slots = self.slots
        if self.policy in NO_SLOTS:
            self.slots = 0

    def plans(self, loads: LoadMatrix, *, window: int, group: int) -> Sequence[Plan]:
        """Plan one group's window."""
        cuts = stage_layers(self.model.layers, self.pipeline_stages)
        return [self._plan(loads, layers, (group, p)) for p, layers in enumerate(cuts)]

    def _plan(self, loads: LoadMatrix, layers: slice, key: tuple[int, int]) -> Plan:
        part, model, history = loads, self.model, self.history
        if self.pipeline_stages > 1:
            part = layers_of(loads, layers)
            model = model.replace(layer_numbers=model.layer_numbers[layers], hidden_layers=model.hidden_layers)
            history = None if history is None else layers_of(history, layers)
        if self.policy == "eplb-history" and history is None:
            history = part.micro_steps(0, max(1, part.num_micro_steps // 2))
        made = plan(
            part,
            cluster=self.cluster,
            model=model,
            slots=self._slots,
            policy=self.policy,
            options=self.options,
            history=history,
            pair_LEE=None if self.pair_LEE is None else self.pair_LEE[layers],
            warm=self._warm.get(key),
        )
        if self.policy == "equipoise" and self.keeps_plans:
            self._warm[key] = made
        return made


@dataclass(slots=True, kw_only=True)
class GivenPlans:
    """Plans that someone made before."""

    policy: str
    slots: int
    by_place: dict[tuple[int, int], Plan]
    """(window, group) to plan."""

    @classmethod
    def of(cls, plans: Sequence[Plan], windows: Sequence[Groups], *, pipeline_stages: int) -> "GivenPlans":
        """Take plans in the order of windows, and within a window of groups."""
        places = [(w, g) for w, groups in enumerate(windows) for g in range(len(groups))]
        if len(plans) != len(places):
            raise InfeasiblePlanError(
                f"{len(plans)} plans were given for {len(places)} windows and groups; give one each"
            )
        if pipeline_stages > 1:
            raise InfeasiblePlanError(
                f"a given plan covers all layers and cannot be cut into {pipeline_stages} pipeline stages; "
                "name its policy instead"
            )
        names, slots = {p.policy for p in plans}, {p.slots for p in plans}
        if len(names) > 1 or len(slots) > 1:
            raise InfeasiblePlanError(f"plans of one step must be alike, got policies {names} with slots {slots}")
        policy = names.pop()
        kept = 0 if policy in NO_SLOTS else slots.pop()
        return cls(policy=policy, slots=kept, by_place=dict(zip(places, plans, strict=True)))

    def plans(self, loads: LoadMatrix, *, window: int, group: int) -> Sequence[Plan]:
        """The plan given for this place, if it was made for these loads."""
        found = self.by_place[(window, group)]
        if loads.stage != found.loads.stage or not np.array_equal(complete(loads)[0].load_MLRE, found.loads.load_MLRE):
            raise InfeasiblePlanError(
                f"the plan of window {window}, group {group} was made for other loads; plan these, or name its policy"
            )
        return [found]
