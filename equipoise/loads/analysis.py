"""Analyse one step's loads: skew by layer and by EP width, seconds lost, memory. What `equipoise analyze` shows.

Puts together `skew.py`, `lost.py` and `forecast.py`; computes nothing of its own. Does not know files or terminals.

`Analysis.to_dict()`, written by `equipoise analyze` as JSON:
    format      "equipoise-analysis-1"
    model, cluster, ep, layer_numbers, micro_steps, rows
    coverage    share of forwarded tokens whose experts are known
    padding     share of the rows that are padding
    stages      for each stage: skew (see `SkewSummary.to_dict`), widths {EP width: mean, p50, p95, max}, lost
    lost        the stages together, and the assumed efficiency
    memory      see `MemoryForecast.to_dict`

Invariants (asserted by the tests):
1. Stages stand apart: skew is never taken over recompute and update together.
2. Widths that do not divide the experts are left out, never rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape, Stage
from equipoise.core.value import Value
from equipoise.loads.forecast import Activations, MemoryForecast, forecast_memory
from equipoise.loads.lost import EFFICIENCY, LostTime, estimate_lost
from equipoise.loads.skew import Distribution, SkewSummary, rank_loads, skew

WIDTHS = (8, 16, 32, 64)
"""EP widths that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageAnalysis(Value):
    """One stage of the step."""

    skew: SkewSummary
    widths: tuple[tuple[int, Distribution], ...]
    """(EP width, skew of the same micro-steps at that width)."""
    lost: LostTime

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        return {
            "skew": self.skew.to_dict(),
            "widths": {str(ep): distribution.to_dict() for ep, distribution in self.widths},
            "lost": self.lost.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis(Value):
    """Everything said about one step."""

    model: ModelShape
    cluster: Cluster
    layer_numbers: tuple[int, ...]
    micro_steps: int
    """Of all windows together."""
    rows: int
    """Dispatched in all windows and layers together, padding included."""
    coverage: float
    padding: float
    stages: dict[Stage, StageAnalysis]
    memory: MemoryForecast

    @property
    def lost(self) -> LostTime:
        """Seconds of the whole step."""
        return sum((stage.lost for stage in self.stages.values()), LostTime(seconds=0.0, ceiling_seconds=0.0))

    def to_dict(self) -> dict[str, Any]:
        """The document that `equipoise analyze` writes."""
        return {
            "format": "equipoise-analysis-1",
            "model": self.model.name,
            "cluster": self.cluster.name,
            "ep": self.cluster.ep,
            "layer_numbers": list(self.layer_numbers),
            "micro_steps": self.micro_steps,
            "rows": self.rows,
            "coverage": self.coverage,
            "padding": self.padding,
            "stages": {name: stage.to_dict() for name, stage in self.stages.items()},
            "lost": {**self.lost.to_dict(), "efficiency": EFFICIENCY, "measured": False},
            "memory": self.memory.to_dict(),
        }


def analyze_loads(
    windows: Sequence[LoadMatrix],
    *,
    model: ModelShape,
    cluster: Cluster,
    memory_gib: float | None = None,
    activations: Activations = "recomputed",
) -> Analysis:
    """Analyse the windows of one step under contiguous owners.

    Args:
        windows: loads of the step, one EP group
        model: row sizes and operations
        cluster: EP width and the device's peak
        memory_gib: memory a rank has left for received rows, GiB
        activations: kept for the backward pass, or recomputed
    """
    if not windows:
        raise LoadsError("no windows were given; an analysis needs the loads of at least one")
    if any(w.num_experts != model.experts for w in windows):
        raise LoadsError(
            f"the loads are of {windows[0].num_experts} experts, model {model.name!r} has {model.experts}; "
            "give the model whose routes were counted"
        )
    names: list[Stage] = [name for name in ("recompute", "update") if any(w.stage == name for w in windows)]
    rows = sum(int(w.load_MLRE.sum()) for w in windows)
    padding = sum(int(w.padding_MLRE.sum()) for w in windows if w.padding_MLRE is not None)
    numbers = windows[0].layer_numbers_L
    return Analysis(
        model=model,
        cluster=cluster,
        layer_numbers=tuple(range(windows[0].num_layers)) if numbers is None else tuple(numbers.tolist()),
        micro_steps=sum(w.num_micro_steps for w in windows),
        rows=rows,
        coverage=_coverage(windows),
        padding=padding / rows if rows else 0.0,
        stages={name: _stage([w for w in windows if w.stage == name], model, cluster) for name in names},
        memory=forecast_memory(windows, model, ep=cluster.ep, limit_gib=memory_gib, activations=activations),
    )


def _stage(windows: list[LoadMatrix], model: ModelShape, cluster: Cluster) -> StageAnalysis:
    lost = LostTime(seconds=0.0, ceiling_seconds=0.0)
    for window in windows:
        received = rank_loads(window, ep=cluster.ep)
        lost += estimate_lost(received, stage=window.stage, row_flops=model.row_flops, flops=cluster.flops)
    widths = tuple((ep, skew(windows, ep=ep).dispatched) for ep in WIDTHS if model.experts % ep == 0)
    return StageAnalysis(skew=skew(windows, ep=cluster.ep), widths=widths, lost=lost)


def _coverage(windows: Sequence[LoadMatrix]) -> float:
    """Mean over every (micro-step, layer, rank) that forwards anything, each of which forwards about as many tokens."""
    found = []
    for window in windows:
        if window.coverage_MLR is not None:
            busy_MLR = (window.load_MLRE.sum(axis=3) > 0) | (window.coverage_MLR < 1)
            found.append(window.coverage_MLR[busy_MLR])
    shares = np.concatenate(found) if found else np.ones(1)
    return float(shares.mean()) if len(shares) else 1.0
