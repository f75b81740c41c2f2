"""Analyse one step's loads: seconds lost and what a plan would give back, skew by layer and EP width, memory.

What `equipoise analyze` shows. Puts together `prediction.py`, `trial.py`, `loads.skew` and `loads.forecast`; computes
nothing of its own. Does not know files or terminals.

Where the loads have several times as many source ranks as the EP group has, they are cut into that many groups of
consecutive ranks. Any other width of expert parallelism is shown by its skew alone, as if the same rows met there.
Seconds are predicted for loads whose unknown routes are estimated (`planner.estimate`), so that now and then compare.

`Analysis.to_dict()`, written by `equipoise analyze` as JSON:
    format      "equipoise-analysis-2"
    model, cluster, ep, layer_numbers, micro_steps, rows
    coverage    share of forwarded tokens whose experts are known
    padding     share of the rows that are padding
    profile     device, kind ("measured" or "derived"): whose figures the seconds are predicted with
    stages      for each stage: skew (see `SkewSummary.to_dict`), widths {EP width: mean, p50, p95, max}, seconds
    seconds     the stages together. Always predicted, of expert layers alone:
                now, balanced, planned   each {compute, all_to_all, transfers, total}; all_to_all is null where source
                                         ranks are not those of the EP group
                lost, saved              {seconds, share}, a share of now: now - balanced, now - planned
                planned and saved are null without a plan
    plan        null, or slots, buffer_bytes (replica slots per rank), displaced and replicas (how many), worth_it,
                estimated_share, and skew {stage: before, after} of the planned loads
    no_plan     why there is no plan; null if there is one
    memory      see `MemoryForecast.to_dict`; place.group beside it names the EP group

Invariants (asserted by the tests):
1. Stages stand apart: skew is never taken over recompute and update together.
2. Widths that do not divide the experts are left out, never rounded.
3. Groups are never added up: two opposite groups of skew s have mean skew s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.value import Value
from equipoise.cost import Profile
from equipoise.loads.forecast import Activations, MemoryForecast, forecast_memory
from equipoise.loads.skew import Distribution, SkewSummary, skew
from equipoise.planner.estimate import complete
from equipoise.sim.prediction import Prediction, predict
from equipoise.sim.trial import WORTH, Groups, Progress, Trial, try_plans

WIDTHS = (8, 16, 32, 64)
"""EP widths that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageAnalysis(Value):
    """One stage of the step."""

    skew: SkewSummary
    widths: tuple[tuple[int, Distribution], ...]
    """(EP width, skew of the same micro-steps at that width)."""
    seconds: Prediction

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
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
    rows: int
    """Dispatched in all windows and layers together, padding included."""
    coverage: float
    padding: float
    stages: dict[Stage, StageAnalysis]
    trial: Trial | None
    no_trial: str
    """Why there is no trial; empty if there is one."""
    memory: MemoryForecast
    memory_group: int
    """EP group of the memory's peak."""

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
        """The document that `equipoise analyze` writes."""
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
    progress: Progress | None = None,
) -> Analysis:
    """Analyse the windows of one step.

    Args:
        windows: loads of the step
        model: the model whose routes were counted
        cluster: EP group, device and links
        slots: replica slots per rank of the plan that is tried; 0 for placement alone, None for no plan
        memory_gib: memory a rank has left for received rows, GiB
        activations: kept for the backward pass, or recomputed
        progress: called with (layers planned, layers in all)
    """
    shape = _check(windows, model)
    groups = [_groups(window, cluster.ep) for window in windows]
    memory, group = _forecast(groups, model, ep=cluster.ep, limit_gib=memory_gib, activations=activations)
    no_trial = _why_not(windows, cluster.ep, slots)
    trial = None
    if not no_trial and slots is not None:
        trial = try_plans(groups, cluster=cluster, model=shape, slots=slots, progress=progress)
    predictions = _predictions(groups, trial, cluster=cluster, model=shape)
    return Analysis(
        model=model,
        cluster=cluster,
        profile=Profile.read(cluster.profile),
        layer_numbers=_layer_numbers(windows[0]),
        micro_steps=sum(window.num_micro_steps for window in windows),
        rows=_rows(windows),
        coverage=_coverage(windows),
        padding=_padding_share(windows),
        stages=_stages(windows, predictions, model=model, ep=cluster.ep),
        trial=trial,
        no_trial=no_trial,
        memory=memory,
        memory_group=group,
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


def _why_not(windows: Sequence[LoadMatrix], ep: int, slots: int | None) -> str:
    """Why no plan can or shall be made; empty if one can."""
    if slots is None:
        return "not asked for"
    odd = [w.num_ranks for w in windows if w.num_ranks % ep]
    if odd:
        return f"the loads have {odd[0]} source ranks, which do not fill EP groups of {ep}"
    return ""


def _groups(window: LoadMatrix, ep: int) -> Groups:
    """The window's EP groups; the whole window where its ranks do not fill such groups."""
    return window.split_groups(ep) if window.num_ranks % ep == 0 else (window,)


def _forecast(
    groups: Sequence[Groups], model: ModelShape, *, ep: int, limit_gib: float | None, activations: Activations
) -> tuple[MemoryForecast, int]:
    """The worst of all windows and groups, and the group it is in."""
    flat = [(w, g, loads) for w, window in enumerate(groups) for g, loads in enumerate(window)]
    found = forecast_memory([loads for *_, loads in flat], model, ep=ep, limit_gib=limit_gib, activations=activations)
    window, group, _ = flat[found.place.window]
    return replace(found, place=found.place._replace(window=window)), group


def _predictions(
    groups: Sequence[Groups], trial: Trial | None, *, cluster: Cluster, model: ModelShape
) -> list[Prediction]:
    """Seconds of every window, with those of the plan that was tried; unknown routes are estimated, as in planning."""
    completed = [tuple(complete(loads)[0] for loads in window) for window in groups]
    found = [predict(window, cluster=cluster, model=model) for window in completed]
    if trial is None:
        return found
    return [replace(now, planned=seconds) for now, seconds in zip(found, trial.seconds, strict=True)]


def _stages(
    windows: Sequence[LoadMatrix], predictions: Sequence[Prediction], *, model: ModelShape, ep: int
) -> dict[Stage, StageAnalysis]:
    found: dict[Stage, StageAnalysis] = {}
    names: tuple[Stage, ...] = ("recompute", "update")
    for name in names:
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


def _layer_numbers(window: LoadMatrix) -> tuple[int, ...]:
    numbers = window.layer_numbers_L
    return tuple(range(window.num_layers)) if numbers is None else tuple(numbers.tolist())


def _rows(windows: Sequence[LoadMatrix]) -> int:
    return sum(int(window.load_MLRE.sum()) for window in windows)


def _padding_share(windows: Sequence[LoadMatrix]) -> float:
    padding = sum(int(window.padding_MLRE.sum()) for window in windows if window.padding_MLRE is not None)
    return padding / max(1, _rows(windows))


def _coverage(windows: Sequence[LoadMatrix]) -> float:
    """Mean over every (micro-step, layer, rank) that forwards anything, each of which forwards about as many tokens."""
    found = []
    for window in windows:
        if window.coverage_MLR is not None:
            busy_MLR = (window.load_MLRE.sum(axis=3) > 0) | (window.coverage_MLR < 1)
            found.append(window.coverage_MLR[busy_MLR])
    shares = np.concatenate(found) if found else np.ones(1)
    return float(shares.mean()) if len(shares) else 1.0
