"""What `equipoise simulate` runs: the step under every policy, then its sweep and its break-even, each with a bar.

Knows the simulator. Does not know files or words of the command line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from equipoise.cli.output import progress
from equipoise.cli.slots import check_slots
from equipoise.core import Cluster, LoadMatrix, ModelShape
from equipoise.planner import PlanOptions
from equipoise.sim import Simulation, StepSetting, simulate
from equipoise.sim.break_even import BreakEvenCurve, Sweep, SweepPoint
from equipoise.sim.sweep import break_even_curves, sweep_points


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step to simulate."""

    windows: Callable[[int, int | None], Sequence[LoadMatrix]]
    """Its windows at an EP width and a number of samples per micro-step (None: as it is)."""
    model: ModelShape
    cluster: Cluster
    setting: StepSetting
    options: PlanOptions
    slots: int
    history: LoadMatrix | None


def run(step: Step, policies: Sequence[str], *, axes: Mapping[str, tuple[int, ...]], break_even: bool) -> Simulation:
    """Simulate the step, and what was asked for beside it."""
    windows = step.windows(step.cluster.ep, None)
    check_slots(step.slots, cluster=step.cluster, model=step.model)
    for ep in axes.get("ep", (step.cluster.ep,)):
        check_slots(axes.get("slots", (step.slots,)), cluster=step.cluster.with_ep(ep), model=step.model)
    given: dict[str, Any] = {name: getattr(step, name) for name in ("cluster", "model", "setting", "options")}
    with progress("simulating (the first run compiles for a while)") as show:
        found = simulate(windows, policies, slots=step.slots, history=step.history, progress=show, **given)
    if not axes and not break_even:
        return found
    points: tuple[SweepPoint, ...] = ()
    curves: tuple[BreakEvenCurve, ...] = ()
    if axes:
        with progress("sweeping") as show:
            points = sweep_points(step.windows, axes=axes, slots=step.slots, progress=show, **given)
    if break_even:
        # The last window: an update, where there is one.
        window = windows[-1].split_groups(step.cluster.ep)[0]
        with progress("break-even") as show:
            curves = break_even_curves(window, slots=step.slots, progress=show, **given)
    return replace(found, sweep=Sweep(axes=dict(axes), points=points, curves=curves))
