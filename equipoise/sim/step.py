"""`simulate`: replay an RL step on a described cluster, under one plan or under several policies. No GPU needed.

Steps:
1. Windows: the loads as given, or the same micro-steps in the stages asked for; each cut into its EP groups.
2. Plans: given, or made by each policy, window after window, one per group and pipeline stage.
3. Each group's window is replayed on a clock (`group.py`); a window takes its slowest group.
4. Windows follow one another; planning hides behind what runs before, or not (`StepSetting.planning`). A window that
   stands still for its plan hides nothing meanwhile: the planner takes up the next one only then.

Knows loads, plans and the order of a step. Does not know files or terminals; prices are `cost`'s alone.

Invariants (asserted by the tests):
1. For one pipeline stage a window's parts are the plan's own predicted seconds, but for what a clock sees and a price
   list does not: pulls that hide longer and slow what runs beside them, returns that must be home after attention, and
   publish and collect, which hide behind waits for these, too.
2. A step takes its windows, the slowest group of each, and what was given for rollout and the rest.
3. No policy's busiest rank has fewer rows than `balanced`'s, which is the mean. For one pipeline stage `balanced` is
   then never slower in compute than one whose ranks all have rows in equally many experts; a rank with its rows in
   fewer experts than the others may be a little faster than the mean rank. A single rank computes as `balanced` does.
4. Same input, same result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.options import replica_bytes
from equipoise.core.plan import Plan
from equipoise.core.value import require_int, require_kind
from equipoise.cost import Profile
from equipoise.loads import count_step, generate_counts, step_schedules
from equipoise.loads.forecast import received_bytes_MLR
from equipoise.loads.packing import TokenPolicy
from equipoise.loads.skew import rank_loads
from equipoise.planner import PlanOptions
from equipoise.planner.baselines import POLICIES
from equipoise.planner.layer import complete
from equipoise.sim.replay import GroupOutcome, balance_of, bytes_between, plan_work, run_group, timeline_of
from equipoise.sim.result import (
    Groups,
    Memory,
    Parts,
    PolicyResult,
    Progress,
    Simulation,
    TimelineEvent,
    WindowLoads,
    WindowResult,
)
from equipoise.sim.summary import notes_of
from equipoise.sim.windows import (
    GivenPlans,
    PlanSource,
    PolicyPlans,
    StepSetting,
    stage_layers,
    stage_options,
    windows_of,
)

NO_EVENTS: tuple[TimelineEvent, ...] = ()
NO_MEMORY = Memory(experts_bytes=0, replicas_bytes=0, received_bytes_X=np.zeros(1, dtype=np.int64), limit_bytes=0)
FORESEES = ("equipoise",)
"""Policies whose windows are planned before they run; others plan nothing, or are charged while they run."""


def simulate(
    loads: LoadMatrix | Sequence[LoadMatrix | Groups],
    how: str | Plan | Sequence[str | Plan] = "equipoise",
    *,
    cluster: Cluster,
    model: ModelShape,
    slots: int = 1,
    stages: Sequence[Stage] | None = None,
    setting: StepSetting | None = None,
    options: PlanOptions | None = None,
    history: LoadMatrix | None = None,
    pair_LEE: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Replay one RL step.

    Args:
        loads: the windows of the step; a matrix over several times `cluster.ep` source ranks is cut into EP groups, and
            a window may also be given as a sequence of matrices, one per group
        how: a policy or several to compare ("equipoise", "static", "balanced", ...), or plans, one per window
        cluster: the EP group and its links
        model: the model's shape; its experts and layers must be those of the loads
        slots: replica slots per rank, where policies plan
        stages: which stages to replay; a stage without windows of its own replays the micro-steps of the other one in
            one window. As the loads have it by default
        setting: the step around the experts
        options: deeper knobs of planning
        history: an earlier step's loads, for "eplb-history"; by default it knows the first half of each window
        pair_LEE: [L, E, E] tokens that chose both experts, with which the planner thins rows that cross nodes
        progress: called with (group windows replayed, group windows in all)
    """
    require_kind("cluster", cluster, Cluster, error=InfeasiblePlanError)
    require_kind("model", model, ModelShape, error=InfeasiblePlanError)
    windows = windows_of(loads, cluster=cluster, model=model, stages=stages)
    setting, options = _resolved(setting or StepSetting(), windows), options or PlanOptions()
    step = _Step(windows, cluster, model, setting, options, pair_LEE)
    step.check()
    sources = _sources(how, step, slots=slots, history=history)
    knows = history is not None, pair_LEE is not None
    report = _Counting(progress, total=len(sources) * sum(len(groups) for groups in windows))
    return Simulation(
        model=model,
        cluster=cluster,
        profile=Profile.read(cluster.profile),
        setting={**setting.to_dict(), "depth": options.depth, "cross_node": options.cross_node, "slots": slots},
        shown=setting.shown,
        windows=tuple(step.describe(groups) for groups in windows),
        policies=tuple(step.run(source, report) for source in sources),
        notes=notes_of(windows, sources, cluster=cluster, setting=setting, options=options, knows=knows),
    )


def _resolved(setting: StepSetting, windows: Sequence[Groups]) -> StepSetting:
    """The setting with a group to show: the one asked for, else the one whose busiest ranks have most rows."""
    if setting.shown.group is not None:
        return setting
    count = min(len(groups) for groups in windows)
    group = 0
    if count > 1:
        group = int(np.argmax([sum(_busiest_rows(groups[g]) for groups in windows) for g in range(count)]))
    return replace(setting, shown=setting.shown._replace(group=group))


def _busiest_rows(loads: LoadMatrix) -> int:
    """Rows of the busiest rank, every expert at its owner, over all micro-steps and layers."""
    return int(rank_loads(loads).max(axis=2).sum())


def _sources(
    how: str | Plan | Sequence[str | Plan], step: "_Step", *, slots: int, history: LoadMatrix | None
) -> list[PlanSource]:
    """Where the plans come from: one source per policy, or one for all plans given."""
    given = list(how) if isinstance(how, Sequence) and not isinstance(how, str) else [how]
    strange = [one for one in given if not isinstance(one, str | Plan)]
    if strange:
        raise InfeasiblePlanError(f"{strange[0]!r} cannot be simulated; give names of policies, or plans")
    plans = [one for one in given if isinstance(one, Plan)]
    if plans and len(plans) < len(given):
        raise InfeasiblePlanError("plans and names of policies were given together; simulate one kind at a time")
    if not given:
        raise InfeasiblePlanError("nothing to simulate; give a policy's name or the plans of the windows")
    if plans:
        return [GivenPlans.of(plans, step.windows, pipeline_stages=step.setting.pipeline_stages)]
    names = [one for one in given if isinstance(one, str)]
    _check_policies(names, step.model, history)
    return [
        PolicyPlans(
            policy=name,
            slots=require_int("slots", slots, low=0, error=InfeasiblePlanError),
            cluster=step.cluster,
            model=step.model,
            options=replace(step.options, sends=step.setting.sends),
            pipeline_stages=step.setting.pipeline_stages,
            history=history,
            pair_LEE=step.pair_LEE,
            keeps_plans=len(step.windows) > 1,
        )
        for name in names
    ]


def _check_policies(names: Sequence[str], model: ModelShape, history: LoadMatrix | None) -> None:
    """Raise before the first policy is replayed for what would stop a later one."""
    if len(set(names)) < len(names):
        raise InfeasiblePlanError(f"a policy is named twice in {', '.join(names)}; name each once")
    known = ("equipoise", *POLICIES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InfeasiblePlanError(f"no policy {unknown[0]!r}; known: {', '.join(known)}")
    if history is not None and (history.num_layers, history.num_experts) != (model.layers, model.experts):
        raise LoadsError(
            f"history has {history.num_layers} layers of {history.num_experts} experts, the step {model.layers} of "
            f"{model.experts}; give the loads of an earlier step of the same model"
        )


class _Counting:
    """Progress over group windows."""

    def __init__(self, progress: Progress | None, *, total: int) -> None:
        self._progress, self._total, self._done = progress or (lambda done, total: None), total, 0

    def __call__(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Step:
    """The step that all policies replay."""

    windows: Sequence[Groups]
    cluster: Cluster
    model: ModelShape
    setting: StepSetting
    options: PlanOptions
    pair_LEE: np.ndarray | None

    def check(self) -> None:
        """Raise if what shall be shown or piped does not exist."""
        shown, stages = self.setting.shown, self.setting.pipeline_stages
        limits = (("window", len(self.windows)), ("group", min(len(groups) for groups in self.windows)))
        for name, limit in limits:
            require_int(f"shown.{name}", getattr(shown, name), low=0, high=limit - 1, error=LoadsError)
        micro_steps = self._shown_group(self.windows[shown.window]).num_micro_steps
        require_int("shown.micro_step", shown.micro_step, low=0, high=micro_steps - 1, error=LoadsError)
        if stages > self.model.layers:
            raise InfeasiblePlanError(
                f"{stages} pipeline stages cannot share {self.model.layers} MoE layers; use fewer stages"
            )

    def _shown_group(self, groups: Groups) -> LoadMatrix:
        group = self.setting.shown.group
        assert group is not None, "resolved before the step was made"
        return groups[group]

    def describe(self, groups: Groups) -> WindowLoads:
        """What the shown group computes in a window."""
        loads = complete(self._shown_group(groups))[0]
        tokens = loads.load_MLRE.sum() / (loads.num_micro_steps * loads.num_layers * loads.num_ranks)
        return WindowLoads(
            stage=loads.stage,
            micro_steps=loads.num_micro_steps,
            groups=len(groups),
            tokens_per_rank=float(tokens) / self.model.top_k,
            load_LE=loads.total_MLE().sum(axis=0),
            before=balance_of(rank_loads(loads)),
        )

    def run(self, source: PlanSource, report: "_Counting") -> PolicyResult:
        """Replay the whole step under one source of plans."""
        before_s, results, memory, timeline = self.setting.rollout_s, [], NO_MEMORY, NO_EVENTS
        for w in range(len(self.windows)):
            waited_s = self._planning_s(source, before_s)
            outcomes, shown = self._run_window(source, w, waited_s, report)
            results.append(self._window(outcomes, shown.plans))
            # While it waited, the planner was busy with its plan.
            before_s = results[-1].seconds.total - waited_s
            memory = worst(memory, self._memory(source, shown))
            if w == self.setting.shown.window and self.setting.timeline_layers:
                timeline = self._timeline(shown.outcome)
        return PolicyResult(
            policy=source.policy,
            slots=source.slots,
            windows=tuple(results),
            memory=memory,
            given=Parts(rollout=self.setting.rollout_s, other=self.setting.other_s),
            timeline=timeline,
        )

    def _run_window(
        self, source: PlanSource, window: int, planning_s: float, report: "_Counting"
    ) -> tuple[list[GroupOutcome], "_Shown"]:
        """Replay every group; work and plans are kept of the shown one alone, to save memory."""
        outcomes, shown = [], None
        cuts = stage_layers(self.model.layers, self.setting.pipeline_stages)
        for g, loads in enumerate(self.windows[window]):
            plans = source.plans(loads, window=window, group=g)
            works = [
                plan_work(
                    plan,
                    options=stage_options(self.options, p, len(plans)),
                    activations=self.setting.activations,
                    sends=self.setting.sends,
                    pair_LEE=None if self.pair_LEE is None else self.pair_LEE[layers],
                )
                for p, (plan, layers) in enumerate(zip(plans, cuts, strict=True))
            ]
            outcome = run_group(plans, works, planning_s=planning_s)
            if g == self.setting.shown.group:
                shown = _Shown(plans, outcome)
            outcomes.append(replace(outcome, works=()))
            report()
        assert shown is not None, "the shown group was checked to exist"
        return outcomes, shown

    def _planning_s(self, source: PlanSource, before_s: float) -> float:
        """Seconds of planning that a window waits for, given how long what is before it runs."""
        if source.policy not in FORESEES:
            return 0.0
        hidden_s = before_s if self.setting.planning == "hidden" else 0.0
        return max(0.0, self.setting.planning_s - hidden_s)

    def _window(self, outcomes: Sequence[GroupOutcome], shown_plans: Sequence[Plan]) -> WindowResult:
        group_s_G = np.array([outcome.seconds.total for outcome in outcomes])
        slowest = int(group_s_G.argmax())
        micro_step = min(self.setting.shown.micro_step, shown_plans[0].loads.num_micro_steps - 1)
        rank_load_MLR = np.concatenate([plan.rank_load_MLR for plan in shown_plans], axis=1)
        return WindowResult(
            seconds=outcomes[slowest].seconds,
            slowest=slowest,
            group_s_G=group_s_G,
            rank_s_CGX=np.stack([outcome.rank_s_CX for outcome in outcomes], axis=1),
            paths=outcomes[slowest].paths,
            after=balance_of(rank_load_MLR),
            byte_RR=bytes_between(
                shown_plans, micro_step, sends=self.setting.sends, activations=self.setting.activations
            ),
        )

    def _timeline(self, outcome: GroupOutcome) -> tuple[TimelineEvent, ...]:
        shown = self.setting.shown
        return timeline_of(
            outcome.works[0],
            micro_step=shown.micro_step,
            layers=self.setting.timeline_layers,
        )

    def _memory(self, source: PlanSource, shown: "_Shown") -> Memory:
        """Bytes per rank of the shown group in one window."""
        model, plans = self.model, shown.plans
        stage, kept, works = plans[0].loads.stage, self.setting.activations, shown.outcome.works
        # One forward, one backward: the first stage has as many micro-steps in flight as there are stages.
        received_QR = [
            received_bytes_MLR(work.rows_MLR, stage, model, kept, in_flight=len(works) - q).max(axis=(0, 1))
            for q, work in enumerate(works)
        ]
        layers = max(plan.loads.num_layers for plan in plans)
        copies = layers if plans[0].persistent else self.options.depth + 1
        return Memory(
            experts_bytes=layers * self.cluster.home_slots(model) * model.expert_bytes,
            replicas_bytes=source.slots * copies * replica_bytes(model, stage),
            received_bytes_X=np.concatenate(received_QR),
            limit_bytes=self.cluster.memory_bytes,
        )


class _Shown(NamedTuple):
    """The shown group of a window."""

    plans: Sequence[Plan]
    outcome: GroupOutcome


def worst(one: Memory, other: Memory) -> Memory:
    """The larger of each figure: what a rank needs over two windows."""
    return Memory(**{f.name: np.maximum(getattr(one, f.name), getattr(other, f.name)) for f in fields(Memory)})


# A generated step to show the simulator with: what `--demo` and `python -m equipoise.sim` replay.


DEMO_POLICIES = ("static", "eplb-history", "eplb-oracle", "lplb", "reactive", "equipoise", "balanced")


def demo_step(*, layers: int = 8, ranks: int = 16) -> tuple[ModelShape, tuple[LoadMatrix, ...]]:
    """The model and the windows of one generated step of Qwen3-30B-A3B shape, with a few of its layers."""
    model = ModelShape.preset("qwen3-30b-a3b", layers=layers)
    counts = generate_counts(model, samples=8 * ranks, mean_tokens=4096)
    schedules = step_schedules(
        counts.tokens_B, ranks=ranks, samples_per_micro_step=1, policy=TokenPolicy(last_token="drop")
    )
    return model, count_step(counts, schedules, ep=ranks)


def simulate_demo(*, progress: Progress | None = None) -> Simulation:
    """Simulate the demo on two H200 nodes under every policy."""
    model, windows = demo_step()
    cluster = Cluster.preset("h200", ep=windows[0].num_ranks)
    return simulate(windows, DEMO_POLICIES, cluster=cluster, model=model, progress=progress)
