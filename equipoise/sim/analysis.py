"""`analyze_loads`: seconds lost in one step and what a plan would give back, skew by layer and EP width, memory.

The short form of `simulate`, shown by `equipoise analyze`. Steps:
1. Cut every window into EP groups of consecutive source ranks. Any other width of expert parallelism is shown by its
   skew alone, as if the same rows met there.
2. Plan each window of each group under `static`, `balanced` and, if asked for, `equipoise`, the search starting from
   the homes of the window before, as a run would. Seconds are the plans' own, by the clock of `cost.clock`, which
   `simulate` uses too; unknown routes are estimated, the same under every policy.
3. A window takes its slowest group.

`Analysis.to_dict()`, written by `equipoise analyze` as JSON:
    format      "equipoise-analysis-2"
    model, cluster, ep, layer_numbers, micro_steps, rows
    schedule    how samples became micro-steps, in words; empty if the loads were given
    coverage    share of forwarded tokens whose experts are known
    padding     share of the rows that are padding
    filled      share of the rows, of last and padding tokens, whose experts no route says: the least loaded ones
    sends       what was assumed to cross nodes: "rows", or "tokens", once per node
    profile     device, kind ("measured" or "derived"): whose figures the seconds are predicted with
    stages      for each stage: skew (see `SkewSummary.to_dict`), widths {EP width: mean, p50, p95, max}, seconds
    seconds     the stages together. Always predicted, of expert layers alone:
                now, balanced, planned   each {compute, all_to_all, transfers, total}; all_to_all is null where source
                                         ranks are not those of the EP group
                lost, saved              {seconds, share}, a share of now: now - balanced, 0 at least; now - planned
                planned and saved are null without a plan
    plan        null, or slots, buffer_bytes (replica slots and boxes per rank), row_page_bytes (rows that ranks of one
                node read in place, per rank), displaced and replicas (how many), worth_it, estimated_share, and skew
                {stage: before, after} of the planned loads
    no_plan     why there is no plan; null if there is one
    memory      see `MemoryForecast.to_dict`; place.group beside it names the EP group
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any, get_args

import numpy as np

from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.options import Activations, balance_bytes
from equipoise.core.plan import Plan, Seconds, Sends
from equipoise.core.value import Value
from equipoise.cost import Profile
from equipoise.cost.clock import replay
from equipoise.loads.count import Progress
from equipoise.loads.forecast import MemoryForecast, forecast_memory
from equipoise.loads.memory import plan_memory
from equipoise.loads.skew import Distribution, SkewSummary, rank_loads, skew, skew_ML
from equipoise.planner import PlanOptions, plan
from equipoise.planner.layer import plan_layer
from equipoise.planner.plan import complete
from equipoise.planner.replicas import LayerPlan
from equipoise.sim.replay import plan_work
from equipoise.sim.result import WORTH, Groups

WIDTHS = (8, 16, 32, 64)
"""EP widths that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted seconds of a window, a stage or a step, in expert layers alone."""

    now: Seconds
    """Every expert at its owner."""
    balanced: Seconds
    """If every rank were level, at no cost."""
    planned: Seconds | None = None
    """With a plan, every cost charged; None where none was made."""
    has_all_to_all: bool = True
    """Whether source ranks are known, so that the all-to-all is priced."""

    @property
    def lost_seconds(self) -> float:
        """What perfect balance would give back; 0 where level ranks exchange more than they compute less."""
        return max(0.0, self.now.total - self.balanced.total)

    @property
    def saved_seconds(self) -> float:
        """What the plan gives back; 0 without one."""
        return 0.0 if self.planned is None else self.now.total - self.planned.total

    def share(self, seconds: float) -> float:
        """Return seconds as a share of those taken now."""
        return seconds / self.now.total if self.now.total else 0.0

    def __add__(self, other: "Prediction") -> "Prediction":
        both_planned = self.planned is not None and other.planned is not None
        return Prediction(
            now=add_seconds([self.now, other.now]),
            balanced=add_seconds([self.balanced, other.balanced]),
            planned=add_seconds([p for p in (self.planned, other.planned) if p]) if both_planned else None,
            has_all_to_all=self.has_all_to_all and other.has_all_to_all,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON; a part that is not priced is null."""
        return {
            "now": self._parts(self.now),
            "balanced": self._parts(self.balanced),
            "planned": None if self.planned is None else self._parts(self.planned),
            "lost": {"seconds": self.lost_seconds, "share": self.share(self.lost_seconds)},
            "saved": None
            if self.planned is None
            else {"seconds": self.saved_seconds, "share": self.share(self.saved_seconds)},
        }

    def _parts(self, seconds: Seconds) -> dict[str, float | None]:
        return {
            "compute": seconds.compute,
            "all_to_all": seconds.all_to_all if self.has_all_to_all else None,
            "transfers": transfer_seconds(seconds),
            "total": seconds.total,
        }


def transfer_seconds(seconds: Seconds) -> float:
    """Return the seconds of moving experts that nothing hides: pull, return, publish, collect."""
    return seconds.pull + seconds.return_ + seconds.publish + seconds.collect


def add_seconds(parts: Iterable[Seconds]) -> Seconds:
    """Add up seconds, part by part."""
    found = list(parts)
    return Seconds(**{f.name: sum(getattr(s, f.name) for s in found) for f in fields(Seconds)})


def slowest_group(plans: Sequence[Plan]) -> Seconds:
    """Return the seconds of a window's slowest group; groups are compared with attention, as in `simulate`."""
    if len(plans) == 1:
        return plans[0].seconds
    return max((replay([plan_work(p)]) for p in plans), key=lambda done: done.total).seconds


def predict(groups: Groups, *, cluster: Cluster, model: ModelShape, sends: Sends = "tokens") -> Prediction:
    """Predict one window as it is, and with every rank level.

    Args:
        groups: the window's loads, one matrix per EP group; sources that are not the group's ranks leave compute alone
        cluster: the EP group and its links
        model: as many layers as the loads have
        sends: what crosses nodes
    """
    options = PlanOptions(sends=sends)
    has_all_to_all = all(loads.num_ranks == cluster.ep for loads in groups)
    if not has_all_to_all:
        groups = [_at_one_source(complete(loads)[0], cluster.ep) for loads in groups]
    now, balanced = (
        slowest_group(
            [plan(loads, cluster=cluster, model=model, slots=0, policy=policy, options=options) for loads in groups]
        )
        for policy in ("static", "balanced")
    )
    if not has_all_to_all:
        now, balanced = replace(now, all_to_all=0.0), replace(balanced, all_to_all=0.0)
    return Prediction(now=now, balanced=balanced, has_all_to_all=has_all_to_all)


def _at_one_source(loads: LoadMatrix, ranks: int) -> LoadMatrix:
    """Put all rows at the first of `ranks` sources: who computes a row does not depend on its source."""
    micro_steps, layers, _, experts = loads.load_MLRE.shape
    gathered = np.zeros((micro_steps, layers, ranks, experts), dtype=np.int64)
    gathered[:, :, 0] = loads.load_MLRE.sum(axis=2)
    return LoadMatrix(gathered, stage=loads.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The plans of one step."""

    slots: int
    """Replica slots per rank; 0: placement alone."""
    buffer_bytes: int
    """Per rank: replica slots (slots x buffers x one expert, weights and, where a window updates, gradients), and
    boxes for experts whose homes change."""
    row_page_bytes: int
    """Per rank: rows that ranks of one node read where they are."""
    plans: tuple[tuple[Plan, ...], ...]
    """Per window, one plan per EP group."""

    @property
    def seconds(self) -> tuple[Seconds, ...]:
        """Per window, predicted seconds of its slowest group."""
        return tuple(slowest_group(window) for window in self.plans)

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
        """Return the skew of the planned loads with every expert at its owner."""
        return _distribution(rank_loads(p.loads) for p in self._of(stage))

    def skew_after(self, stage: str) -> Distribution:
        """Return the skew with the plans."""
        return _distribution(p.rank_load_MLR for p in self._of(stage))

    def _of(self, stage: str) -> list[Plan]:
        return [p for window in self.plans for p in window if p.loads.stage == stage]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        stages = dict.fromkeys(p.loads.stage for window in self.plans for p in window)
        return {
            "slots": self.slots,
            "buffer_bytes": self.buffer_bytes,
            "row_page_bytes": self.row_page_bytes,
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
    sends: Sends = "tokens",
    progress: Progress | None = None,
) -> Trial:
    """Plan every window of a step.

    Args, beside those of `predict`:
        windows: loads by window and EP group; sources are the ranks of the group
        slots: replica slots per rank
        progress: called after each layer
    """
    options, report = PlanOptions(sends=sends), progress or (lambda done, total: None)
    total = model.layers * sum(len(groups) for groups in windows)
    given: dict[str, Any] = {"cluster": cluster, "model": model, "slots": slots, "options": options}
    made: list[tuple[Plan, ...]] = []
    done = 0
    for groups in windows:
        plans: list[Plan] = []
        for group, loads in enumerate(groups):
            steps, last = count(done + 1), done + model.layers

            def plan_and_report(*layer: Any, steps: Iterator[int] = steps, last: int = last) -> LayerPlan:
                planned: LayerPlan = plan_layer(*layer)
                # Layers that are planned a second time count no more.
                report(min(next(steps), last), total)
                return planned

            warm = made[-1][group] if made and group < len(made[-1]) else None
            plans.append(plan(loads, warm=warm, planner=plan_and_report, **given))
            done = last
            report(done, total)
        made.append(tuple(plans))
    stages = {loads.stage for groups in windows for loads in groups}
    return Trial(
        slots=slots,
        # A balancer allocates boxes whether a plan moves something or not.
        buffer_bytes=max(balance_bytes(model, cluster=cluster, slots=slots, stage=stage) for stage in stages),
        row_page_bytes=max(plan_memory(planned).page_bytes for plans in made for planned in plans),
        plans=tuple(made),
    )


def _distribution(loads: Iterable[np.ndarray]) -> Distribution:
    """Return the skew of every micro-step and layer of several [M, L, R] loads of ranks."""
    return Distribution(np.concatenate([skew_ML(load_MLR) for load_MLR in loads]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageAnalysis(Value):
    """One stage of the step."""

    skew: SkewSummary
    widths: tuple[tuple[int, Distribution], ...]
    """(EP width, skew of the same micro-steps at that width)."""
    seconds: Prediction

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON."""
        return {
            "skew": self.skew.to_dict(),
            "widths": {str(ep): distribution.to_dict() for ep, distribution in self.widths},
            "seconds": self.seconds.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis(Value):
    """Everything said about one step."""

    model: ModelShape
    cluster: Cluster
    profile: Profile
    layer_numbers: tuple[int, ...]
    micro_steps: int
    """Of all windows together."""
    sends: Sends
    """What was assumed to cross nodes."""
    rows: int
    """Dispatched in all windows and layers together, padding included."""
    coverage: float
    padding: float
    filled: float
    stages: dict[Stage, StageAnalysis]
    trial: Trial | None
    no_trial: str
    """Why there is no trial; empty if there is one."""
    memory: MemoryForecast
    memory_group: int
    """EP group of the memory's peak."""
    schedule: str = ""
    """How samples became micro-steps, in words; empty if the loads were given."""

    @property
    def seconds(self) -> Prediction:
        """Seconds of the whole step."""
        first, *rest = (stage.seconds for stage in self.stages.values())
        return sum(rest, first)

    @property
    def worth_it(self) -> bool:
        """Whether the plan saves enough to be worth its trouble."""
        return self.trial is not None and self.seconds.share(self.seconds.saved_seconds) >= WORTH

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `equipoise analyze` writes."""
        memory = self.memory.to_dict()
        return {
            "format": "equipoise-analysis-2",
            "model": self.model.name,
            "cluster": self.cluster.name,
            "ep": self.cluster.ep,
            "layer_numbers": list(self.layer_numbers),
            "micro_steps": self.micro_steps,
            "rows": self.rows,
            "coverage": self.coverage,
            "padding": self.padding,
            "filled": self.filled,
            "schedule": self.schedule,
            "sends": self.sends,
            "profile": {"device": self.profile.device, "kind": self.profile.kind},
            "stages": {name: stage.to_dict() for name, stage in self.stages.items()},
            "seconds": self.seconds.to_dict(),
            "plan": None if self.trial is None else {**self.trial.to_dict(), "worth_it": self.worth_it},
            "no_plan": self.no_trial or None,
            "memory": {**memory, "place": {**memory["place"], "group": self.memory_group}},
        }


def analyze_loads(
    windows: Sequence[LoadMatrix],
    *,
    model: ModelShape,
    cluster: Cluster,
    slots: int | None = 1,
    memory_gib: float | None = None,
    activations: Activations = "kept",
    sends: Sends = "tokens",
    progress: Progress | None = None,
) -> Analysis:
    """Analyse the windows of one step.

    Args:
        windows: loads of the step
        model: the model whose routes were counted
        cluster: EP group, device and links
        slots: replica slots per rank of the plan that is tried; 0 for placement alone, None for no plan
        memory_gib: memory a rank has left after weights, gradients and optimizer, GiB
        activations: kept for the backward pass, or recomputed
        sends: what crosses nodes: every row, or a token once per node
        progress: called with (layers planned, layers in all)
    """
    shape = _check(windows, model)
    groups = [_groups(window, cluster.ep) for window in windows]
    # Memory: the worst of all windows and groups.
    flat = [(w, g, loads) for w, window in enumerate(groups) for g, loads in enumerate(window)]
    memory = forecast_memory(
        [loads for *_, loads in flat], model, ep=cluster.ep, limit_gib=memory_gib, activations=activations
    )
    worst_window, worst_group, _ = flat[memory.place.window]
    # Seconds: of a plan, where one is wanted and can be made, and of static and balanced.
    odd = [w.num_ranks for w in windows if w.num_ranks % cluster.ep]
    trial, no_trial = None, ""
    if slots is None:
        no_trial = "not asked for"
    elif odd:
        no_trial = f"the loads have {odd[0]} source ranks, which do not fill EP groups of {cluster.ep}"
    else:
        trial = try_plans(groups, cluster=cluster, model=shape, slots=slots, sends=sends, progress=progress)
    predictions = [predict(window, cluster=cluster, model=shape, sends=sends) for window in groups]
    if trial is not None:
        predictions = [replace(now, planned=s) for now, s in zip(predictions, trial.seconds, strict=True)]
    rows = sum(int(window.load_MLRE.sum()) for window in windows)
    padding = sum(int(window.padding_MLRE.sum()) for window in windows if window.padding_MLRE is not None)
    numbers = windows[0].layer_numbers_L
    return Analysis(
        model=model,
        cluster=cluster,
        profile=Profile.read(cluster.profile),
        layer_numbers=tuple(range(shape.layers) if numbers is None else numbers.tolist()),
        micro_steps=sum(window.num_micro_steps for window in windows),
        sends=sends,
        rows=rows,
        coverage=_coverage(windows),
        padding=padding / max(1, rows),
        filled=sum(window.num_filled for window in windows) / max(1, rows),
        stages=_stages(windows, predictions, model=model, ep=cluster.ep),
        trial=trial,
        no_trial=no_trial,
        memory=replace(memory, place=memory.place._replace(window=worst_window)),
        memory_group=worst_group,
    )


def _check(windows: Sequence[LoadMatrix], model: ModelShape) -> ModelShape:
    """Return the model with as many layers as the loads have, or raise if they do not belong together."""
    if not windows:
        raise LoadsError("no windows were given; an analysis needs the loads of at least one")
    if any(w.num_experts != model.experts for w in windows):
        raise LoadsError(
            f"the loads are of {windows[0].num_experts} experts, model {model.name!r} has {model.experts}; "
            "give the model whose routes were counted"
        )
    layers = windows[0].num_layers
    if any(w.num_layers != layers for w in windows):
        found = sorted({w.num_layers for w in windows})
        raise LoadsError(f"windows have {' and '.join(map(str, found))} layers; give windows of the same layers")
    return model if model.layers == layers else model.replace(layers=layers)


def _groups(window: LoadMatrix, ep: int) -> Groups:
    """Return the window's EP groups, or the whole window if its ranks do not fill such groups."""
    return window.split_groups(ep) if window.num_ranks % ep == 0 else (window,)


def _stages(
    windows: Sequence[LoadMatrix], predictions: Sequence[Prediction], *, model: ModelShape, ep: int
) -> dict[Stage, StageAnalysis]:
    found: dict[Stage, StageAnalysis] = {}
    for name in get_args(Stage):
        mine = [(w, p) for w, p in zip(windows, predictions, strict=True) if w.stage == name]
        if not mine:
            continue
        loads = [w for w, _ in mine]
        first, *rest = (p for _, p in mine)
        widths = tuple((width, _skew(loads, width).dispatched) for width in WIDTHS if model.experts % width == 0)
        found[name] = StageAnalysis(skew=_skew(loads, ep), widths=widths, seconds=sum(rest, first))
    return found


def _skew(windows: Sequence[LoadMatrix], ep: int) -> SkewSummary:
    return skew([loads for window in windows for loads in _groups(window, ep)], ep=ep)


def _coverage(windows: Sequence[LoadMatrix]) -> float:
    """Return the mean over every (micro-step, layer, rank) that forwards tokens; each forwards about as many."""
    found = []
    for window in windows:
        if window.coverage_MLR is not None:
            busy_MLR = (window.load_MLRE.sum(axis=3) > 0) | (window.coverage_MLR < 1)
            found.append(window.coverage_MLR[busy_MLR])
    shares = np.concatenate(found) if found else np.ones(1)
    return float(shares.mean()) if len(shares) else 1.0
