"""`plan`, `plan_step`, `plan_placement`: make plans from loads. Read this file of the planner first.

Steps of `plan`:
1. Check that loads, cluster and model belong together; estimate unknown loads.
2. Call the policy. "equipoise" plans every layer separately (`layer.plan_layer`), in threads if asked to. Then it
   prices the window's first visit again, because nothing before that visit hides its pulls.
3. Build and check the plan (`assemble.build_plan`).
4. With the objective "seconds", use plain expert parallelism if the plan is not faster.
5. Cut the finished plan into waves, if the options ask for them.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from equipoise.core import Cluster, InfeasiblePlanError, LoadMatrix, LoadsError, ModelShape
from equipoise.core.options import PlanOptions, TransferOptions
from equipoise.core.plan import Bytes, Objective, Plan
from equipoise.core.value import int64_array, require_choice
from equipoise.cost.kernels import price
from equipoise.cost.links import kept_permille
from equipoise.cost.model import Tables
from equipoise.cost.window import Edges
from equipoise.loads.forecast import find_fixes, say_need, wider_groups
from equipoise.loads.memory import WindowMemory, WindowRows, plan_memory
from equipoise.planner.assemble import Draft, WindowTask, build_plan, choose_waves, visits_of
from equipoise.planner.baselines import (
    POLICIES,
    choose_homes,
    draft_baseline,
    layers_draft,
    persistent_draft,
    share_evenly,
)
from equipoise.planner.layer import crossings, layer_problem, plan_layer
from equipoise.planner.relibra import plan_as_relibra
from equipoise.planner.replicas import LayerPlan, LayerProblem

MOST_ROWS = 2**40
"""Most rows of one layer in one micro-step: their products with weights, prices and 2^20 parts fit int64."""
LayerPlanner = Callable[[np.ndarray, np.ndarray, np.ndarray, LayerProblem, Tables], LayerPlan]
"""From loads, starting homes, pairs, problem and prices of one layer to its plan."""


def plan(
    loads: LoadMatrix,
    *,
    cluster: Cluster,
    model: ModelShape,
    slots: int | None = None,
    policy: str = "equipoise",
    objective: Objective = "seconds",
    options: PlanOptions | None = None,
    history: LoadMatrix | None = None,
    forecast: LoadMatrix | None = None,
    pair_LEE: np.ndarray | None = None,
    warm: Plan | None = None,
    planner: LayerPlanner = plan_layer,
) -> Plan:
    """Plan one window.

    Args:
        loads: rows of the window, known before it runs
        cluster: the EP group and its links
        model: the model's shape; its experts and layers must be those of the loads
        slots: replica slots per rank; 1 unless `options.memory_bytes` sets a budget
        policy: "equipoise", or one of `baselines.POLICIES`: static, lpt, eplb-oracle, lplb, relibra, balanced ...
        objective: "seconds" (default) charges every cost; "skew" only levels rows
        options: deeper knobs
        history: the previous window's loads, for "eplb-history"
        forecast: rows of earlier windows that were not known ahead; rows without a route are expected to be like them
        pair_LEE: [L, E, E] co-activation counts, which make the price of crossing nodes tighter
        warm: an earlier plan of the same layers, whose homes the search starts from
        planner: how one layer is planned; the reference gives the same plan, slowly
    """
    options = PlanOptions() if options is None else options
    asked: dict[str, Any] = {"options": options, "policy": policy, "objective": objective}
    _check(loads, cluster=cluster, model=model, forecast=forecast, pair_LEE=pair_LEE, **asked)
    completed, estimated = complete(loads, forecast=forecast)
    check_rows(completed)
    if options.limit_bytes is not None:
        given: dict[str, Any] = {"history": history, "forecast": forecast, "pair_LEE": pair_LEE, "warm": warm}
        given |= {"planner": planner, "policy": policy}
        slots = options.slots_within(model, slots, stage=loads.stage)
        return _plan_within(loads, options, cluster=cluster, model=model, slots=slots, objective=objective, given=given)
    task = WindowTask(
        loads=completed,
        cluster=cluster,
        model=model,
        slots=options.slots_within(model, slots, stage=loads.stage),
        objective=objective,
        options=options,
        policy=policy,
        estimated_share=estimated,
        pair_LEE=pair_LEE,
    )
    if policy == "equipoise":
        return choose_waves(task, _search(task, warm=warm, planner=planner))
    if policy == "relibra":
        task = replace(task, options=replace(options, cross_node=False, max_displaced=None))
        return choose_waves(task, _search(task, warm=None, planner=plan_as_relibra))
    return choose_waves(task, build_plan(task, draft_baseline(task, history=history)))


def _search(task: WindowTask, *, warm: Plan | None, planner: LayerPlanner) -> Plan:
    """Return the fastest plan of those that `planner` makes, in one wave."""
    options, start_LE = task.options, _start(task, warm)
    search: dict[str, Any] = {"pair_LEE": task.pair_LEE, "planner": planner, "is_warm": warm is not None}
    made = build_plan(task, _draft(task, start_LE, budget=_budget(task), **search))
    by_seconds, is_update = task.objective == "seconds", task.loads.stage == "update"
    if options.cross_node and task.cluster.num_ep_nodes > 1 and by_seconds and is_update:
        # Price lines say that crossing pays. The clock decides: a plan is never slower for being allowed to cross.
        inside = replace(task, options=replace(options, cross_node=False))
        other = build_plan(inside, _draft(inside, start_LE, budget=_budget(inside), **search))
        made = min(made, other, key=lambda plan: plan.seconds.total)
    if by_seconds and made.seconds.total > made.static_seconds:
        # Homes stay at their owners; and if replicas lose there, too, nothing is done at all.
        draft = _draft(task, start_LE, budget=0, **search)
        made = build_plan(task, draft)
        if made.seconds.total > made.static_seconds:
            made = build_plan(task, _without_replicas(task, draft))
    return made


def _plan_within(
    loads: LoadMatrix,
    options: PlanOptions,
    *,
    cluster: Cluster,
    model: ModelShape,
    slots: int,
    objective: Objective,
    given: Mapping[str, Any],
) -> Plan:
    """Return the plan asked for if it keeps the limit, else the fastest that does, or raise with the cheapest remedy.

    Args:
        slots: most replica slots per rank
        given: the other arguments of `plan`
    """
    limit = options.limit_bytes
    assert limit is not None
    free = replace(options, limit_bytes=None, memory_bytes=None)
    activations = options.activations or ("recomputed" if options.order == "recompute" else "kept")
    visits_V3 = visits_of(loads.stage, loads.num_micro_steps, loads.num_layers, options)

    def tried(slots: int, objective: Objective) -> tuple[Plan, WindowMemory]:
        made = plan(loads, cluster=cluster, model=model, slots=slots, objective=objective, options=free, **given)
        depth = options.depth
        return made, plan_memory(made, activations=activations, visits_V3=visits_V3, depth=depth)

    # Step 1: the plan asked for; then rows levelled at any cost, and with fewer slots, which take memory themselves.
    # Those of a balancer are allocated already.
    found = [tried(slots, objective)]
    if int(found[0][1].peak_R.max()) <= limit:
        return found[0][0]
    if given["policy"] == "equipoise":
        goals: tuple[Objective, ...] = ("seconds", "skew") if objective == "seconds" else ("skew",)
        fewest = slots if isinstance(options, TransferOptions) else 0
        others = [(fewer, goal) for fewer in range(slots, fewest - 1, -1) for goal in goals]
        found += [tried(fewer, goal) for fewer, goal in others if (fewer, goal) != (slots, objective)]
    fitting = [made for made, memory in found if int(memory.peak_R.max()) <= limit]
    if fitting:
        return min(fitting, key=lambda made: made.seconds.total)
    # Step 2: none fits. Remedies are those of the plan that needs least.
    made, memory = min(found, key=lambda each: int(each[1].peak_R.max()))
    rows = [WindowRows.of(made, depth=options.depth)]
    fixes = [
        *find_fixes(memory, limit=limit, rows=rows, model=model, activations=activations),
        *wider_groups([made.loads], model, now=cluster.ep, activations=activations),
    ]
    tries = (
        f"policy {given['policy']}" if len(found) == 1 else f"{len(found)} plans tried, with {slots} to {fewest} slots"
    )
    raise InfeasiblePlanError(f"{say_need(memory, limit=limit, model=model, fixes=fixes)} ({tries})")


def plan_step(
    windows: Sequence[LoadMatrix],
    *,
    cluster: Cluster,
    model: ModelShape,
    slots: int | None = None,
    policy: str = "equipoise",
    objective: Objective = "seconds",
    options: PlanOptions | None = None,
    history: LoadMatrix | None = None,
    warm: Plan | None = None,
) -> tuple[Plan, ...]:
    """Plan the windows of one step in order, each starting its search from the homes of the one before.

    Every plan is charged with its own publish and collect, because weights return to their owners at each edge.
    Arguments are those of `plan`; `history` and `warm` are of the window before the first.
    """
    if isinstance(windows, LoadMatrix):
        raise InfeasiblePlanError("windows is a LoadMatrix; give a list of them, one per window of the step")
    given: dict[str, Any] = {"cluster": cluster, "model": model, "slots": slots}
    chosen: dict[str, Any] = {"policy": policy, "objective": objective, "options": options}
    plans: list[Plan] = []
    for loads in windows:
        warm, history = plan(loads, history=history, warm=warm, **given, **chosen), loads
        plans.append(warm)
    return tuple(plans)


def plan_placement(
    loads: LoadMatrix,
    held_LER: np.ndarray,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: PlanOptions | None = None,
) -> Plan:
    """Plan a window with experts that are placed already, as an engine's file or another planner decided.

    Nothing is searched. Copies stay for the whole window, each expert's rows are shared evenly over its copies, as
    EPLB's dispatch does, and everything is priced as in every other plan. So a placement can be compared with ours.

    Args:
        loads: of the window
        held_LER: [L, E, R] copies of each expert on each rank, as many on every rank
        cluster, model: as for `plan`
        options: as for `plan`; those that guide a search have no effect
    """
    options = PlanOptions() if options is None else options
    asked: dict[str, Any] = {"options": options, "policy": "static", "objective": "seconds"}
    _check(loads, cluster=cluster, model=model, forecast=None, pair_LEE=None, **asked)
    held_LER = int64_array("held_LER", held_LER, ndim=3, error=InfeasiblePlanError)
    wanted = (loads.num_layers, loads.num_experts, loads.num_ranks)
    if held_LER.shape != wanted:
        raise InfeasiblePlanError(f"held_LER has shape {held_LER.shape}, the loads need {wanted}")
    count_LR = held_LER.sum(axis=1)
    if held_LER.min() < 0 or (held_LER.sum(axis=2) == 0).any() or (count_LR != count_LR[0, 0]).any():
        raise InfeasiblePlanError(
            f"ranks hold {count_LR.min()} to {count_LR.max()} experts of a layer, or an expert has no copy; every rank "
            "must hold as many, and every expert be held"
        )
    completed, estimated = complete(loads)
    check_rows(completed)
    task = WindowTask(
        loads=completed,
        cluster=cluster,
        model=model,
        slots=int(count_LR[0, 0]) - cluster.home_slots(model),
        objective="seconds",
        options=options,
        policy="placed",
        estimated_share=estimated,
        pair_LEE=None,
    )
    total_MLE, holds_LER = completed.total_MLE(), held_LER > 0
    quotas = [share_evenly(total_MLE[:, layer], held_LER[layer]) for layer in range(model.layers)]
    draft = persistent_draft(task, choose_homes(task, holds_LER), quotas_L=quotas, holds_LER=holds_LER)
    return choose_waves(task, build_plan(task, draft))


def complete(loads: LoadMatrix, *, forecast: LoadMatrix | None = None) -> tuple[LoadMatrix, float]:
    """Return loads with unknown rows estimated, and the share of all rows that is an estimate. Known rows stay.

    How many there are, per layer and source rank: where a share c of a micro-step's tokens is known, it has 1 / c times
    its known rows. Where nothing is known, it has as many as the mean of the known micro-steps of that layer and
    source, or of the layer's other sources, or of the forecast, or none. Shares are read in millionths, so every rank
    estimates alike.

    Which experts they choose: the forecast's, or those of all known rows of the layer in the window. A source's few
    known samples say less about its other samples than the whole window does (`benchmarks.coverage`).

    Args:
        forecast: rows of earlier windows of the same layers, from the same sources, whose routes were not known ahead
    """
    if loads.coverage_MLR is None or bool(np.all(loads.coverage_MLR == 1.0)):
        return loads, 0.0
    known_MLR, row_MLR = np.round(loads.coverage_MLR * 10**6).astype(np.int64), loads.load_MLRE.sum(axis=3)
    # Step 1: how many rows each source has in each micro-step.
    # More than can be planned is refused by `check_rows`, as long as sums do not overflow before.
    full_MLR = np.minimum(row_MLR * 10**6 // np.maximum(known_MLR, 1), 2 * MOST_ROWS)
    seen_MLR = known_MLR > 0
    count_LR = seen_MLR.sum(axis=0)
    mean_LR = (full_MLR * seen_MLR).sum(axis=0) // np.maximum(count_LR, 1)
    mean_L1 = (mean_LR.sum(axis=1) // np.maximum((count_LR > 0).sum(axis=1), 1))[:, None]
    if forecast is not None:
        before_LR = forecast.load_MLRE.sum(axis=(0, 3)) // forecast.num_micro_steps
        mean_L1 = np.where((count_LR > 0).any(axis=1)[:, None], mean_L1, before_LR)
    full_MLR = np.where(seen_MLR, full_MLR, np.where(count_LR > 0, mean_LR, mean_L1))
    # Step 2: deal the unknown ones to experts. A layer's sources and micro-steps continue each other's roundings, so
    # that an expert gets its share of the layer's rows to the row.
    part_LE = loads.load_MLRE.sum(axis=(0, 2))
    if forecast is not None:
        before_LE = forecast.load_MLRE.sum(axis=(0, 2))
        part_LE = np.where(before_LE.any(axis=1)[:, None], before_LE, part_LE)
    # Products of 31 and 31 bits fit int64.
    part_LE >>= max(0, int(part_LE.sum(axis=1).max()).bit_length() - 31)
    whole_L11 = np.maximum(part_LE.sum(axis=1), 1)[:, None, None]
    micro_steps, layers, ranks = row_MLR.shape
    unknown_LX = np.maximum(full_MLR - row_MLR, 0).transpose(1, 0, 2).reshape(layers, -1)
    end_LX1 = unknown_LX.cumsum(axis=1)[..., None]
    end_LXE = end_LX1 // whole_L11 * part_LE[:, None] + end_LX1 % whole_L11 * part_LE[:, None] // whole_L11
    added_LXE = np.diff(end_LXE, axis=1, prepend=0)
    full = loads.load_MLRE + added_LXE.reshape(layers, micro_steps, ranks, -1).transpose(1, 0, 2, 3)
    total = int(full.sum())
    share = (total - int(loads.load_MLRE.sum())) / total if total else 0.0
    completed = LoadMatrix(
        full,
        stage=loads.stage,
        padding_MLRE=loads.padding_MLRE,
        filled_MLR=loads.filled_MLR,
        layer_numbers_L=loads.layer_numbers_L,
    )
    return completed, share


def _check(
    loads: LoadMatrix,
    *,
    cluster: Cluster,
    model: ModelShape,
    options: PlanOptions,
    policy: str,
    objective: str,
    forecast: LoadMatrix | None,
    pair_LEE: np.ndarray | None,
) -> None:
    for name, value, kind in (
        ("loads", loads, LoadMatrix),
        ("cluster", cluster, Cluster),
        ("model", model, ModelShape),
        ("options", options, PlanOptions),
    ):
        if not isinstance(value, kind):
            raise InfeasiblePlanError(
                f"{name} is a {type(value).__name__}; it must be a {kind.__name__}, made by eq.{kind.__name__}"
            )
    if loads.num_experts != model.experts or loads.num_layers != model.layers:
        raise LoadsError(
            f"loads have {loads.num_layers} layers of {loads.num_experts} experts, {model.name!r} has {model.layers} "
            f"of {model.experts}; give the loads' own model: ModelShape.preset(..., experts=, layers=) or a config.json"
        )
    if loads.num_ranks != cluster.ep:
        raise LoadsError(
            f"loads have {loads.num_ranks} source ranks, the EP group has {cluster.ep}; they must be equal"
        )
    check_rows(loads)
    cluster.home_slots(model)
    known = ("equipoise", *POLICIES)
    if policy not in known:
        raise InfeasiblePlanError(f"no policy {policy!r}; known: {', '.join(known)}")
    require_choice("objective", objective, Objective, error=InfeasiblePlanError)
    if pair_LEE is not None:
        wanted = (loads.num_layers, loads.num_experts, loads.num_experts)
        pairs = int64_array("pair_LEE", pair_LEE, ndim=3, low=0, error=LoadsError)
        if pairs.shape != wanted:
            raise LoadsError(f"pair_LEE has shape {pairs.shape}, expected {wanted}")
        if not np.array_equal(pairs, pairs.transpose(0, 2, 1)):
            raise LoadsError("pair_LEE must count tokens that chose both experts: symmetric and not negative")
    if forecast is not None and forecast.load_MLRE.shape[1:] != loads.load_MLRE.shape[1:]:
        raise LoadsError(
            f"the forecast has {forecast.num_layers} layers, {forecast.num_ranks} ranks and {forecast.num_experts} "
            f"experts, the window {loads.num_layers}, {loads.num_ranks} and {loads.num_experts}; give rows of earlier "
            "windows of the same layers and sources"
        )


def check_rows(loads: LoadMatrix) -> None:
    """Refuse more rows than the search can multiply in int64, which does not say when it overflows."""
    row_ML = loads.load_MLRE.sum(axis=(2, 3))
    micro_step, layer = (int(i) for i in np.unravel_index(row_ML.argmax(), row_ML.shape))
    if row_ML[micro_step, layer] > MOST_ROWS:
        raise LoadsError(
            f"micro-step {micro_step}, layer index {layer} has {int(row_ML[micro_step, layer])} rows, estimated ones "
            f"included; at most 2^40 ({MOST_ROWS}) can be planned exactly: divide all loads by one number"
        )


def _budget(task: WindowTask) -> int:
    limit = task.options.max_displaced
    return task.model.experts if limit is None else min(limit, task.model.experts)


def _start(task: WindowTask, warm: Plan | None) -> np.ndarray:
    """[L, E] the homes that the search starts from: the warm plan's, or the owners."""
    layers, experts, ranks = task.model.layers, task.model.experts, task.cluster.ep
    if warm is None:
        return np.broadcast_to(np.arange(experts) // (experts // ranks), (layers, experts))
    if warm.home_LE.shape != (layers, experts) or warm.cluster.ep != ranks or warm.persistent:
        kind = "persistent plan" if warm.persistent else "plan"
        raise InfeasiblePlanError(
            f"the warm {kind} has homes of shape {warm.home_LE.shape} on {warm.cluster.ep} ranks; "
            f"this window needs a plan of shape {(layers, experts)} on {ranks} ranks, without persistent replicas"
        )
    return warm.home_LE


def _draft(
    task: WindowTask,
    start_LE: np.ndarray,
    *,
    budget: int,
    pair_LEE: np.ndarray | None,
    planner: LayerPlanner,
    is_warm: bool,
) -> Draft:
    """Plan every layer and stack the results."""
    experts, ranks = task.model.experts, task.cluster.ep
    problem = layer_problem(task, budget=budget, is_warm=is_warm)
    tables = task.cost.tables(experts // ranks + task.slots)
    none_EE = np.zeros((0, 0), dtype=np.int64)

    def inputs_of(layer: int) -> tuple[np.ndarray, np.ndarray]:
        # Copies, because a read-only array would compile the kernels a second time.
        pair_EE = none_EE if pair_LEE is None else np.array(pair_LEE[layer], dtype=np.int64, order="C")
        return np.array(task.loads.load_MLRE[:, layer], order="C"), pair_EE

    def one_layer(layer: int) -> LayerPlan:
        load_MRE, pair_EE = inputs_of(layer)
        return planner(load_MRE, np.array(start_LE[layer]), pair_EE, problem, tables)

    layers = range(task.model.layers)
    if task.options.workers == 1:
        made = [one_layer(layer) for layer in layers]
    else:
        with ThreadPoolExecutor(task.options.workers) as pool:
            made = list(pool.map(one_layer, layers))
    made[0] = _check_first_visit(made[0], *inputs_of(0), problem, tables)
    crossing_L2R = np.zeros((len(made), 2, ranks), dtype=np.int64)
    if len(problem.domain_DR) > 1:
        crossing_L2R = np.stack([crossings(p.rep_expert_MRS, p.home_E, problem.node_R) for p in made])
    return layers_draft(made, cross_node=bool(crossing_L2R.any()), **_crossing_charges(task, crossing_L2R))


def _without_replicas(task: WindowTask, draft: Draft) -> Draft:
    """The same homes, and nothing that is pulled or published for replicas."""
    return replace(
        draft,
        rep_expert_MLRS=np.full_like(draft.rep_expert_MLRS, -1),
        rep_rows_MLRS=np.zeros_like(draft.rep_rows_MLRS),
        line_MLC=draft.closed_MLC,
        edges=Edges.none(task.model.layers),
        moved=Bytes(),
        cross_node=False,
    )


def _check_first_visit(
    first: LayerPlan, load_MRE: np.ndarray, pair_EE: np.ndarray, problem: LayerProblem, tables: Tables
) -> LayerPlan:
    """Price the first visit again: none before it hides its pulls. Drop its replicas if they lose."""
    if first.rep_expert_MRS[0].max(initial=-1) < 0:
        return first
    node_R, line_MC = problem.node_R, first.line_MC.copy()
    keep_N = kept_permille(node_R[first.home_E], int(node_R.max()) + 1, pair_EE, tables.top_k)
    replicas = np.array(first.rep_expert_MRS[0]), np.array(first.rep_rows_MRS[0])
    alone = tables._replace(depth=0)
    total = price(load_MRE[0], first.home_E, node_R, *replicas, keep_N, alone, False, line_MC[0])
    if not problem.gated or total < first.closed_MC[0, :4].sum():
        return first._replace(line_MC=line_MC)
    line_MC[0] = first.closed_MC[0]
    expert_MRS, rows_MRS = first.rep_expert_MRS.copy(), first.rep_rows_MRS.copy()
    expert_MRS[0], rows_MRS[0] = -1, 0
    return first._replace(rep_expert_MRS=expert_MRS, rep_rows_MRS=rows_MRS, line_MC=line_MC)


def _crossing_charges(task: WindowTask, crossing_L2R: np.ndarray) -> dict[str, Any]:
    """What it costs to bring experts to the host stores of other nodes: they follow each layer's displaced ones."""
    cost, edges = task.cost, Edges.none(task.model.layers)
    for layer, most in enumerate(crossing_L2R.max(axis=(1, 2)).tolist()):
        moved_ns = cost.edge_ns(inside_experts=0, across_experts=most, edge="publish")
        edges.ns_2L[0, layer] = moved_ns + cost.refresh_ns(most)
        edges.slow_2L[0, layer] = cost.edge_slow_ns(inside_experts=0, across_experts=most, edge="publish")
    moved = int(crossing_L2R[:, 0].sum()) * cost.edge_bytes("publish")
    return {"edges": edges, "moved": Bytes(edge_across=moved)}
