"""What `equipoise simulate` runs: the step under every policy, then its sweep and its break-even, each with a bar.

Knows the simulator, and what its options are called. Does not know files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from equipoise.cli.options import check_slots
from equipoise.cli.output import progress
from equipoise.core import Cluster, LoadMatrix, LoadsError, ModelShape
from equipoise.core.value import require_int
from equipoise.planner import PlanOptions
from equipoise.sim import Simulation, StepSetting, simulate
from equipoise.sim.result import BreakEvenCurve, Sweep, SweepPoint
from equipoise.sim.sweep import break_even_curves, check_rows, sweep_points

Axes = Mapping[str, tuple[int, ...]]
STOPPED = "{} left out: interrupted."
NO_PLANNING = "Break-even leaves the time of planning out, which its windows of other sizes would not take."
NO_CURVES = "Break-even left out: the layers and micro-steps of the last window that it looks at have no row."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the windows of a step come from, at an EP width and a number of samples per micro-step (None: as it is)."""

    model: ModelShape
    windows: Callable[[int, int | None], Sequence[LoadMatrix]]
    check: Callable[[int, int | None], None]
    """Raises, in no time, where there are no such windows."""
    pair_LEE: np.ndarray | None = None
    """[L, E, E] tokens that chose both experts, where they were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to simulate."""

    source: Source
    cluster: Cluster
    setting: StepSetting
    options: PlanOptions
    slots: int
    history: LoadMatrix | None


def run(step: Step, policies: Sequence[str], *, axes: Axes, break_even: bool) -> tuple[Simulation, bool]:
    """Simulate the step, and what was asked for beside it.

    An interrupt beside the step leaves the rest out and keeps the step, which may have taken minutes.

    Returns: the result, and whether it has all that was asked for
    """
    windows = step.source.windows(step.cluster.ep, None)
    check(step, windows, axes)
    given: dict[str, Any] = {name: getattr(step, name) for name in ("cluster", "setting", "options", "slots")}
    # Pairs say how often one sending of a token serves several experts.
    pairs = step.source.pair_LEE if step.setting.sends == "tokens" else None
    given |= {"model": step.source.model, "pair_LEE": pairs}
    with progress("simulating (the first run compiles for a while)") as show:
        found = simulate(windows, policies, history=step.history, progress=show, **given)
    points: tuple[SweepPoint, ...] = ()
    curves: tuple[BreakEvenCurve, ...] | None = None
    notes, is_whole = found.notes, True
    try:
        if axes:
            with progress("sweeping") as show:
                points = sweep_points(step.source.windows, axes=axes, progress=show, **given)
        if break_even:
            # The last window: an update, where there is one.
            window = windows[-1].split_groups(step.cluster.ep)[found.shown.group or 0]
            with progress("break-even") as show:
                curves = break_even_curves(window, progress=show, **given)
    except KeyboardInterrupt:
        cut = [name for name, is_cut in (("Sweep", axes and not points), ("Break-even", break_even)) if is_cut]
        notes, is_whole = (*notes, *map(STOPPED.format, cut)), False
    if curves == ():
        notes = (*notes, NO_CURVES)
    if curves and step.setting.planning_s:
        notes = (*notes, NO_PLANNING)
    sweep = Sweep(axes=dict(axes), points=points, curves=curves or ()) if points or curves else None
    return replace(found, notes=notes, sweep=sweep), is_whole


def check(step: Step, windows: Sequence[LoadMatrix], axes: Axes) -> None:
    """Raise for what cannot be, before the step is simulated: that may take minutes, and be lost."""
    model, shown = step.source.model, step.setting.shown
    require_int("--shown-window", shown.window, low=0, high=len(windows) - 1, error=LoadsError)
    last = windows[shown.window].num_micro_steps - 1
    require_int("--shown-micro-step", shown.micro_step, low=0, high=last, error=LoadsError)
    if shown.group is not None:
        groups = windows[shown.window].num_ranks // step.cluster.ep
        require_int("--shown-group", shown.group, low=0, high=max(0, groups - 1), error=LoadsError)
    check_slots(step.slots, cluster=step.cluster, model=model)
    for ep, micro in product(axes.get("ep", (step.cluster.ep,)), axes.get("micro", (None,))):
        check_slots(axes.get("slots", ()), cluster=step.cluster.with_ep(ep), model=model)
        step.source.check(ep, micro)
    if "tokens" in axes:
        check_rows(windows)
