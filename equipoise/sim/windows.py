"""The windows of a simulated step and their plans: which stages run, which EP groups each has, and who plans them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.options import Activations
from equipoise.core.plan import Plan, Sends
from equipoise.core.value import Value, require_choice, require_int, require_kind
from equipoise.planner import PlanOptions, plan
from equipoise.planner.baselines import POLICIES
from equipoise.planner.plan import complete
from equipoise.sim.result import Groups, Shown

Planning = Literal["hidden", "exposed"]
"""`hidden`: a window is planned while what is before it runs (rollout, or the window before, once that has its own
plan), and only what is left then counts; `exposed`: all of it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetting:
    """The step around the experts."""

    pipeline_stages: int = 1
    """Pipeline stages (one forward, one backward); each has its own ranks and an equal share of the layers."""
    activations: Activations = "kept"
    """Whether the backward pass repeats the forward pass of a layer (`recomputed`)."""
    rollout_s: float = 0.0
    """Seconds of rollout, measured or assumed: part of the step, and planning can hide behind them."""
    other_s: float = 0.0
    """Seconds per step of what is not simulated: optimizer, embedding, head, gradient reduction."""
    planning: Planning = "hidden"
    planning_s: float = 0.0
    """Seconds that planning one window takes."""
    sends: Sends = "tokens"
    """What crosses nodes; plans are made for it, whatever `PlanOptions.sends` says."""
    shown: Shown = field(default_factory=Shown)
    """Whose arrays and timeline the result holds."""
    timeline_layers: int = 4
    """Layers of the shown micro-step that the timeline holds; 0: no timeline."""

    def __post_init__(self) -> None:
        for name, low in (("pipeline_stages", 1), ("timeline_layers", 0)):
            require_int(f"StepSetting.{name}", getattr(self, name), low=low, error=InfeasiblePlanError)
        for name in ("rollout_s", "other_s", "planning_s"):
            require_seconds(f"StepSetting.{name}", getattr(self, name))
        for name, allowed in (("activations", Activations), ("planning", Planning), ("sends", Sends)):
            require_choice(f"StepSetting.{name}", getattr(self, name), allowed, error=InfeasiblePlanError)

    def to_dict(self) -> dict[str, Any]:
        """Return every field, for JSON."""
        return {**asdict(self), "shown": self.shown._asdict()}


def require_seconds(name: str, value: float) -> None:
    """Raise, naming `name`, if the value is no number of seconds."""
    if not 0 <= value < float("inf"):
        raise InfeasiblePlanError(f"{name} is {value}; it must be a number of seconds, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCase(Value):
    """All that a simulation is given besides loads and policies; each field as in `simulate`."""

    cluster: Cluster
    model: ModelShape
    slots: int = 1
    setting: StepSetting = field(default_factory=StepSetting)
    options: PlanOptions = field(default_factory=PlanOptions)
    history: LoadMatrix | None = None
    pair_LEE: np.ndarray | None = None

    def __post_init__(self) -> None:
        require_kind("cluster", self.cluster, Cluster, error=InfeasiblePlanError)
        require_kind("model", self.model, ModelShape, error=InfeasiblePlanError)


def windows_of(
    loads: LoadMatrix | Sequence[LoadMatrix | Groups], case: StepCase, *, stages: Sequence[Stage] | None
) -> list[Groups]:
    """Return the windows to replay, each a sequence of EP groups; arguments as in `simulate`."""
    cluster = case.cluster
    if not isinstance(loads, LoadMatrix | Sequence):
        raise LoadsError(f"loads are a {type(loads).__name__}; give a LoadMatrix, or a list of them, one per window")
    given = [loads] if isinstance(loads, LoadMatrix) else list(loads)
    if not given:
        raise LoadsError("no windows were given; a simulation needs the loads of at least one")
    windows: list[Groups] = []
    for window in given:
        if not isinstance(window, LoadMatrix):
            windows.append(window)
        elif window.num_ranks % cluster.ep:
            raise LoadsError(
                f"the loads have {window.num_ranks} source ranks, which do not fill EP groups of {cluster.ep}; "
                "give an EP width that divides them, or schedule the samples for it"
            )
        else:
            windows.append(window.split_groups(cluster.ep))
        _check_groups(windows[-1], cluster, case.model)
    return windows if stages is None else [w for stage in stages for w in _in_stage(windows, stage)]


def _check_groups(groups: Groups, cluster: Cluster, model: ModelShape) -> None:
    if not len(groups):
        raise LoadsError("a window without EP groups was given; give at least one matrix")
    loads = groups[0]
    if not isinstance(loads, LoadMatrix):
        raise LoadsError(
            f"a window holds a {type(loads).__name__}; give a LoadMatrix, or one for each of its EP groups"
        )
    found, wanted = (loads.num_layers, loads.num_experts), (model.layers, model.experts)
    if found != wanted:
        raise LoadsError(
            f"loads have {found[0]} layers of {found[1]} experts, {model.name!r} has {wanted[0]} of {wanted[1]}; "
            "override them with ModelShape.preset(..., experts=, layers=) or fix the loads"
        )
    if loads.num_ranks != cluster.ep:
        raise LoadsError(
            f"loads of an EP group have {loads.num_ranks} source ranks, the group has {cluster.ep}; they must be equal"
        )


def layers_of(loads: LoadMatrix, layers: slice) -> LoadMatrix:
    """Return some layers of a window."""
    kept = {name: getattr(loads, name) for name in ("padding_MLRE", "coverage_MLR", "filled_MLR")}
    numbers = loads.layer_numbers_L
    return LoadMatrix(
        loads.load_MLRE[:, layers],
        stage=loads.stage,
        layer_numbers_L=None if numbers is None else numbers[layers],
        **{name: array[:, layers] for name, array in kept.items() if array is not None},
    )


def joined(windows: Sequence[LoadMatrix], stage: Stage) -> LoadMatrix:
    """Join all micro-steps of several windows in one."""
    first = windows[0]

    def together(name: str, empty: float) -> np.ndarray | None:
        arrays = [getattr(window, name) for window in windows]
        if all(array is None for array in arrays):
            return None
        shape = 4 if name.endswith("E") else 3
        filled = [
            np.full(w.load_MLRE.shape[:shape], empty, dtype=type(empty)) if a is None else a
            for w, a in zip(windows, arrays, strict=True)
        ]
        return np.concatenate(filled)

    return LoadMatrix(
        np.concatenate([window.load_MLRE for window in windows]),
        stage=stage,
        padding_MLRE=together("padding_MLRE", 0),
        coverage_MLR=together("coverage_MLR", 1.0),
        filled_MLR=together("filled_MLR", 0),
        layer_numbers_L=first.layer_numbers_L,
    )


def _in_stage(windows: Sequence[Groups], stage: Stage) -> list[Groups]:
    if stage not in get_args(Stage):
        raise LoadsError(f"stages names {stage!r}; they are {', '.join(get_args(Stage))}")
    own = [groups for groups in windows if groups[0].stage == stage]
    if own:
        return own
    counts = {len(groups) for groups in windows}
    if len(counts) > 1:
        raise LoadsError(f"windows have {sorted(counts)} EP groups; give windows of the same groups")
    return [[joined([groups[g] for groups in windows], stage) for g in range(counts.pop())]]


NO_SLOTS = ("static", "lpt", "balanced")
"""Policies that need no replica slot: one because it has no replica, one because it cannot exist."""


def stage_layers(layers: int, stages: int) -> list[slice]:
    """Return the MoE layers of each pipeline stage: consecutive, as equal as possible."""
    bounds = [layers * p // stages for p in range(stages + 1)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def stage_options(options: PlanOptions, stage: int, stages: int) -> PlanOptions:
    """Return the planning options of one pipeline stage."""
    return options if stages == 1 else replace(options, order="1f1b", pipeline_stage=stage, pipeline_stages=stages)


@dataclass(slots=True, kw_only=True)
class PolicyPlans:
    """Plans that a policy makes."""

    policy: str
    slots: int
    """Replica slots per rank that the policy takes."""
    case: StepCase
    keeps_plans: bool = True
    """Whether a later window may start from an earlier one's plan; a plan holds its loads, which takes memory."""
    _warm: dict[tuple[int, int], Plan] = field(default_factory=dict)
    """The last plan of each (group, pipeline stage)."""

    def plans(self, loads: LoadMatrix, *, window: int, group: int) -> Sequence[Plan]:
        """Plan one group's window; returns one plan per pipeline stage."""
        cuts = stage_layers(self.case.model.layers, self.case.setting.pipeline_stages)
        return [self._plan(loads, layers, (group, p)) for p, layers in enumerate(cuts)]

    def _plan(self, loads: LoadMatrix, layers: slice, key: tuple[int, int]) -> Plan:
        case, stages = self.case, self.case.setting.pipeline_stages
        part, model, history = loads, case.model, case.history
        if stages > 1:
            part = layers_of(loads, layers)
            model = model.replace(layer_numbers=model.layer_numbers[layers], hidden_layers=model.hidden_layers)
            history = None if history is None else layers_of(history, layers)
        if self.policy == "eplb-history" and history is None:
            history = part.micro_steps(0, max(1, part.num_micro_steps // 2))
        options = replace(case.options, sends=case.setting.sends, activations=case.setting.activations)
        if self.policy != "equipoise":
            # Others are shown as they are, whether they keep a limit or not.
            options = replace(options, limit_bytes=None)
        made = plan(
            part,
            cluster=case.cluster,
            model=model,
            slots=self.slots,
            policy=self.policy,
            options=stage_options(options, key[1], stages),
            history=history,
            pair_LEE=None if case.pair_LEE is None else case.pair_LEE[layers],
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
        """Return the plan given for this place, or raise if it was made for other loads."""
        found = self.by_place[(window, group)]
        if loads.stage != found.loads.stage or not np.array_equal(complete(loads)[0].load_MLRE, found.loads.load_MLRE):
            raise InfeasiblePlanError(
                f"the plan of window {window}, group {group} was made for other loads; plan these, or name its policy"
            )
        return [found]


PlanSource = PolicyPlans | GivenPlans
"""Hands out the plans of a step, window after window."""


def plan_sources(how: str | Plan | Sequence[str | Plan], windows: Sequence[Groups], case: StepCase) -> list[PlanSource]:
    """Return a source per policy, or one for all plans given; raise now for what would stop a later window."""
    given = list(how) if isinstance(how, Sequence) and not isinstance(how, str) else [how]
    strange = [one for one in given if not isinstance(one, str | Plan)]
    if strange:
        raise InfeasiblePlanError(f"{strange[0]!r} cannot be simulated; give names of policies, or plans")
    plans, names = [one for one in given if isinstance(one, Plan)], [one for one in given if isinstance(one, str)]
    if plans and names:
        raise InfeasiblePlanError("plans and names of policies were given together; simulate one kind at a time")
    if not given:
        raise InfeasiblePlanError("nothing to simulate; give a policy's name or the plans of the windows")
    if plans:
        return [GivenPlans.of(plans, windows, pipeline_stages=case.setting.pipeline_stages)]
    if len(set(names)) < len(names):
        raise InfeasiblePlanError(f"a policy is named twice in {', '.join(names)}; name each once")
    known = ("equipoise", *POLICIES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InfeasiblePlanError(f"no policy {unknown[0]!r}; known: {', '.join(known)}")
    slots, history, model = case.slots, case.history, case.model
    require_int("slots", slots, low=0, error=InfeasiblePlanError)
    if history is not None and (history.num_layers, history.num_experts) != (model.layers, model.experts):
        raise LoadsError(
            f"history has {history.num_layers} layers of {history.num_experts} experts, the step {model.layers} of "
            f"{model.experts}; give the loads of an earlier step of the same model"
        )
    return [
        PolicyPlans(policy=name, slots=0 if name in NO_SLOTS else slots, case=case, keeps_plans=len(windows) > 1)
        for name in names
    ]
