"""`simulate`: replay an RL step on a described cluster, under one plan or under several policies. No GPU needed.

Steps:
1. Windows: the loads as given, or the same micro-steps in the stages asked for; each is cut into its EP groups.
2. Plans: given, or made by each policy, window after window, one per group and pipeline stage.
3. Each group's window runs on the clock (`replay.py`); a window takes its slowest group.
4. Windows follow one another. A window is planned while what is before it runs, or not (`StepSetting.planning`); while
   it waits for its plan, the planner cannot start on the next one.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.plan import Plan
from equipoise.core.value import require_int
from equipoise.cost import CostModel, Profile
from equipoise.loads import count_step, generate_counts, step_schedules
from equipoise.loads.count import Progress
from equipoise.loads.memory import plan_memory
from equipoise.loads.packing import TokenPolicy
from equipoise.loads.skew import rank_loads
from equipoise.planner import PlanOptions
from equipoise.planner.assemble import visits_of
from equipoise.planner.plan import complete
from equipoise.sim.replay import GroupOutcome, balance_of, bytes_between, plan_work, run_group, timeline_of
from equipoise.sim.result import (
    Groups,
    Memory,
    Parts,
    PolicyResult,
    Simulation,
    TimelineEvent,
    WindowLoads,
    WindowResult,
)
from equipoise.sim.summary import notes_of
from equipoise.sim.windows import (
    PlanSource,
    StepCase,
    StepSetting,
    plan_sources,
    stage_layers,
    stage_options,
    windows_of,
)

DEMO_POLICIES = ("static", "eplb-history", "eplb-oracle", "lplb", "reactive", "equipoise", "balanced")


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
        pair_LEE: [L, E, E] tokens that chose both experts, which thin the rows that cross nodes
        progress: called with (group windows replayed, group windows in all)
    """
    case = StepCase(
        cluster=cluster,
        model=model,
        slots=slots,
        setting=setting or StepSetting(),
        options=options or PlanOptions(),
        history=history,
        pair_LEE=pair_LEE,
    )
    return simulate_case(loads, how, case, stages=stages, progress=progress)


def simulate_case(
    loads: LoadMatrix | Sequence[LoadMatrix | Groups],
    how: str | Plan | Sequence[str | Plan],
    case: StepCase,
    *,
    stages: Sequence[Stage] | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Replay one RL step; arguments as in `simulate`."""
    windows = windows_of(loads, case, stages=stages)
    case = replace(case, setting=_checked(case.setting, windows, case.model))
    setting, options = case.setting, case.options
    sources = plan_sources(how, windows, case)
    done, total = 0, len(sources) * sum(len(groups) for groups in windows)

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return Simulation(
        model=case.model,
        cluster=case.cluster,
        profile=Profile.read(case.cluster.profile),
        setting={**setting.to_dict(), "depth": options.depth, "cross_node": options.cross_node, "slots": case.slots},
        shown=setting.shown,
        windows=tuple(_describe(groups, case) for groups in windows),
        policies=tuple(_run(windows, source, case, report) for source in sources),
        notes=notes_of(windows, sources, case),
    )


def _checked(setting: StepSetting, windows: Sequence[Groups], model: ModelShape) -> StepSetting:
    """Return the setting with a group to show, or raise if what it names does not exist.

    The group is the one asked for, else the one whose busiest ranks have most rows with every expert at its owner.
    """
    shown, count = setting.shown, min(len(groups) for groups in windows)
    if shown.group is None:
        rows_G = [0]
        if count > 1:
            rows_G = [sum(int(rank_loads(groups[g]).max(axis=2).sum()) for groups in windows) for g in range(count)]
        shown = shown._replace(group=int(np.argmax(rows_G)))
    for name, limit in (("window", len(windows)), ("group", count)):
        require_int(f"shown.{name}", getattr(shown, name), low=0, high=limit - 1, error=LoadsError)
    assert shown.group is not None, "chosen above"
    micro_steps = windows[shown.window][shown.group].num_micro_steps
    require_int("shown.micro_step", shown.micro_step, low=0, high=micro_steps - 1, error=LoadsError)
    if setting.pipeline_stages > model.layers:
        raise InfeasiblePlanError(
            f"{setting.pipeline_stages} pipeline stages cannot share {model.layers} MoE layers; use fewer stages"
        )
    return replace(setting, shown=shown)


def _describe(groups: Groups, case: StepCase) -> WindowLoads:
    """Describe what the shown group computes in a window."""
    assert case.setting.shown.group is not None, "chosen by _checked"
    loads = complete(groups[case.setting.shown.group])[0]
    tokens = loads.load_MLRE.sum() / (loads.num_micro_steps * loads.num_layers * loads.num_ranks)
    return WindowLoads(
        stage=loads.stage,
        micro_steps=loads.num_micro_steps,
        groups=len(groups),
        tokens_per_rank=float(tokens) / case.model.top_k,
        load_LE=loads.total_MLE().sum(axis=0),
        before=balance_of(rank_loads(loads)),
    )


def _run(windows: Sequence[Groups], source: PlanSource, case: StepCase, report: Callable[[], None]) -> PolicyResult:
    """Replay the whole step under one source of plans."""
    setting, shown = case.setting, case.setting.shown
    running_s, timeline = setting.rollout_s, tuple[TimelineEvent, ...]()
    results: list[WindowResult] = []
    memories: list[Memory] = []
    for w, groups in enumerate(windows):
        # Step 1: what of planning is not hidden by what runs before the window. Other policies plan nothing, or are
        # charged while the window runs.
        waited_s = 0.0
        if source.policy == "equipoise":
            cost = CostModel.of(case.cluster, case.model)
            planning_s = setting.planning_s + max(cost.foresight_ns(loads) for loads in groups) / 1e9
            waited_s = max(0.0, planning_s - (running_s if setting.planning == "hidden" else 0.0))
        # Step 2: every group; work and plans are kept of the shown one alone, to save memory.
        outcomes: list[GroupOutcome] = []
        for g, loads in enumerate(groups):
            plans = source.plans(loads, window=w, group=g)
            outcome = _run_group(plans, waited_s, case)
            if g == shown.group:
                shown_plans, shown_outcome = plans, outcome
            outcomes.append(replace(outcome, works=()))
            report()
        # Step 3: the window's result. While it waited, the planner was busy with its plan.
        results.append(_window(outcomes, shown_plans, setting))
        running_s = results[-1].seconds.total - waited_s
        memories.append(_memory(shown_plans, case))
        if w == shown.window and setting.timeline_layers:
            first = shown_outcome.works[0]
            timeline = timeline_of(first, micro_step=shown.micro_step, layers=setting.timeline_layers)
    worst = {f.name: np.max([getattr(m, f.name) for m in memories], axis=0) for f in fields(Memory)}
    return PolicyResult(
        policy=source.policy,
        slots=source.slots,
        windows=tuple(results),
        memory=Memory(**worst),
        given=Parts(rollout=setting.rollout_s, other=setting.other_s),
        timeline=timeline,
    )


def _run_group(plans: Sequence[Plan], planning_s: float, case: StepCase) -> GroupOutcome:
    works = [
        plan_work(
            plan,
            options=stage_options(case.options, p, len(plans)),
            activations=case.setting.activations,
            sends=case.setting.sends,
            pair_LEE=None if case.pair_LEE is None else case.pair_LEE[layers],
        )
        for p, (plan, layers) in enumerate(zip(plans, stage_layers(case.model.layers, len(plans)), strict=True))
    ]
    outcome = run_group(plans, works, planning_s=planning_s)
    if outcome.waves == 1:
        return outcome
    plain = _run_group([replace(plan, waves=1) for plan in plans], planning_s, case)
    return replace(outcome, waves_saved_s=plain.seconds.total - outcome.seconds.total)


def _window(outcomes: Sequence[GroupOutcome], shown_plans: Sequence[Plan], setting: StepSetting) -> WindowResult:
    group_s_G = np.array([outcome.seconds.total for outcome in outcomes])
    slowest = int(group_s_G.argmax())
    micro_step = min(setting.shown.micro_step, shown_plans[0].loads.num_micro_steps - 1)
    return WindowResult(
        seconds=outcomes[slowest].seconds,
        slowest=slowest,
        group_s_G=group_s_G,
        rank_s_CGX=np.stack([outcome.rank_s_CX for outcome in outcomes], axis=1),
        paths=outcomes[slowest].paths,
        waves=outcomes[slowest].waves,
        waves_saved_s=outcomes[slowest].waves_saved_s,
        after=balance_of(np.concatenate([plan.rank_load_MLR for plan in shown_plans], axis=1)),
        byte_RR=bytes_between(shown_plans, micro_step, sends=setting.sends, activations=setting.activations),
    )


def _memory(plans: Sequence[Plan], case: StepCase) -> Memory:
    """Count the bytes per rank of the shown group in one window."""
    model, found = case.model, []
    for q, plan in enumerate(plans):
        micro_steps, layers = plan.loads.num_micro_steps, plan.loads.num_layers
        options = stage_options(case.options, q, len(plans))
        visits_V3 = visits_of(plan.loads.stage, micro_steps, layers, options)
        activations = case.setting.activations
        found.append(plan_memory(plan, activations=activations, visits_V3=visits_V3, depth=options.depth))
    layers = max(plan.loads.num_layers for plan in plans)
    fixed = [memory.slots_bytes + memory.page_bytes for memory in found]
    return Memory(
        experts_bytes=layers * case.cluster.home_slots(model) * model.expert_bytes,
        replicas_bytes=max(memory.slots_bytes for memory in found),
        row_page_bytes=max(memory.page_bytes for memory in found),
        received_bytes_X=np.concatenate([m.peak_R - bytes_ for m, bytes_ in zip(found, fixed, strict=True)]),
        limit_bytes=case.cluster.memory_bytes,
    )


def demo_step(*, layers: int = 8, ranks: int = 16) -> tuple[ModelShape, tuple[LoadMatrix, ...]]:
    """Return model and windows of one generated step of Qwen3-30B-A3B shape, with a few of its layers."""
    model = ModelShape.preset("qwen3-30b-a3b", layers=layers)
    counts = generate_counts(model, samples=8 * ranks, mean_tokens=4096)
    schedules = step_schedules(
        counts.tokens_B, ranks=ranks, samples_per_micro_step=1, policy=TokenPolicy(last_token="drop")
    )
    return model, count_step(counts, schedules, ep=ranks)


def simulate_demo(*, progress: Progress | None = None) -> Simulation:
    """Simulate the demo on two H200 nodes under every policy: what `--demo` and `python -m equipoise.sim` show."""
    model, windows = demo_step()
    cluster = Cluster.preset("h200", ep=windows[0].num_ranks)
    return simulate(windows, DEMO_POLICIES, cluster=cluster, model=model, progress=progress)
