"""Predict a step on a described cluster: `analyze` gives the short answer, `simulate` compares policies in full.

    equipoise analyze --demo
    equipoise analyze rollouts.jsonl --model qwen3-30b-a3b --schedule tokens:16384
    equipoise analyze rollouts.jsonl --model qwen3-30b-a3b --ep 16 --memory-gib 20 --report answer.html

    equipoise simulate --demo
    equipoise simulate rollouts.jsonl --model qwen3-30b-a3b --sweep ep=8,16

Neither needs a GPU or torch. `analyze` exits with code 1 if the step does not fit into `--memory-gib`. In `simulate`
plans of `equipoise` keep that limit, or it ends with code 2 and says where and why; other policies stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.console import Console

from equipoise.cli import INTERRUPTED
from equipoise.cli.options import (
    DEFAULT_SENDS,
    ActivationsOption,
    CrossNodeFlag,
    DemoFlag,
    HistoryOption,
    MachineFlags,
    MemoryOption,
    PackingFlags,
    ReadingFlags,
    ResultFlags,
    SendsOption,
    WavesOption,
    check_slots,
    parse_waves,
    require_flags,
)
from equipoise.cli.output import progress, publish, show_analysis
from equipoise.core import InfeasiblePlanError, LoadsError, RoutesError
from equipoise.core.value import require_int

if TYPE_CHECKING:
    from equipoise.cli.step_loads import StepSource
    from equipoise.core import LoadMatrix
    from equipoise.sim import Simulation, StepSetting
    from equipoise.sim.result import BreakEvenCurve, SweepPoint
    from equipoise.sim.windows import StepCase

POLICIES = "static,eplb-history,eplb-oracle,lplb,reactive,equipoise,balanced"
GENERATED = "a generated step"
STOPPED = "{} left out: interrupted."
NO_PLANNING = "Break-even leaves out the planning time, because its windows have other sizes."
NO_CURVES = "Break-even left out: the layers and micro-steps of the last window that it looks at have no row."
Axes = Mapping[str, tuple[int, ...]]


def analyze(
    dump: Annotated[
        Path | None,
        typer.Argument(help="Rollouts in any format, or a counts or loads .npz file.", show_default=False),
    ] = None,
    *,
    reading: ReadingFlags,
    packing: PackingFlags,
    demo: DemoFlag = False,
    machine: MachineFlags,
    slots: Annotated[
        int | None, typer.Option(help="Replica slots per rank to plan with: 1 if left out, 0 for placement alone.")
    ] = None,
    plan: Annotated[bool, typer.Option(help="Whether to try a plan.")] = True,
    memory_gib: MemoryOption = None,
    activations: ActivationsOption = "kept",
    sends: SendsOption = DEFAULT_SENDS,
    results: ResultFlags,
) -> None:
    """Show what uneven experts cost, and what a plan gives back."""
    from equipoise.cli.step_loads import open_step
    from equipoise.sim import analyze_loads

    results.refuse_existing(dump)
    if not plan and slots is not None:
        raise InfeasiblePlanError(f"--no-plan makes --slots {slots} void; leave one of them out")
    tried = (1 if slots is None else slots) if plan else None
    cluster = machine.build_cluster(ep=packing.ep)
    source = open_step(dump, reading, packing, demo_samples=512 if demo else None)
    windows = source.windows(packing.ep, None)
    check_slots(tried or 0, cluster=cluster, model=source.model)
    with progress("planning layers (the first run compiles for a while)" if plan else "pricing") as show:
        analysis = analyze_loads(
            windows,
            model=source.model,
            cluster=cluster,
            slots=tried,
            memory_gib=memory_gib,
            activations=activations,
            sends=sends,
            progress=show,
        )
    analysis = replace(analysis, schedule=source.schedule)
    name = GENERATED if dump is None else dump.name
    publish(analysis, lambda console: show_analysis(analysis, console, source=name), title=name, results=results)
    if analysis.memory.fits is False:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlags:
    """What the step is like besides its loads."""

    SECTION: ClassVar[str] = "The step"
    pipeline_stages: Annotated[int, typer.Option(help="Pipeline stages, one forward, one backward.")] = 1
    activations: ActivationsOption = "kept"
    sends: SendsOption = DEFAULT_SENDS
    rollout_s: Annotated[float, typer.Option(help="Seconds of rollout, for the whole step.")] = 0.0
    other_s: Annotated[float, typer.Option(help="Seconds of what is not simulated: optimizer, head ...")] = 0.0
    planning_s: Annotated[float, typer.Option(help="Seconds to plan a window; hidden behind what runs before it.")] = (
        0.0
    )

    def build_setting(self, shown: "ShownFlags") -> "StepSetting":
        """Return these and the shown part as the simulator takes them; errors name the flags."""
        from equipoise.sim import StepSetting
        from equipoise.sim.result import Shown
        from equipoise.sim.windows import require_seconds

        require_flags(self, "pipeline_stages", low=1)
        for name in ("rollout_s", "other_s", "planning_s"):
            require_seconds(f"--{name.replace('_', '-')}", getattr(self, name))
        require_flags(shown, "timeline_layers", "shown_window", "shown_micro_step", "shown_group", low=0)
        place = Shown(window=shown.shown_window, micro_step=shown.shown_micro_step, group=shown.shown_group)
        return StepSetting(**asdict(self), shown=place, timeline_layers=shown.timeline_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFlags:
    """Which policies plan the step, and what they may use."""

    SECTION: ClassVar[str] = "The plans"
    policies: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = POLICIES
    slots: Annotated[int, typer.Option(help="Replica slots per rank.")] = 1
    cross_node: CrossNodeFlag = False
    memory_gib: MemoryOption = None
    waves: WavesOption = "1"
    history: HistoryOption = None

    @property
    def names(self) -> list[str]:
        """The names of the policies."""
        return [name.strip() for name in self.policies.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFlags:
    """What is simulated besides the step as it is."""

    SECTION: ClassVar[str] = "Besides the step"
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=V,V", help="Axes to sweep: ep, slots, micro (samples) or tokens; may be repeated."),
    ] = None
    break_even: Annotated[bool, typer.Option(help="Whether to find how many tokens a plan needs to pay.")] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFlags:
    """Which part of the step the result shows as a timeline and as bytes between ranks."""

    SECTION: ClassVar[str] = "What is shown"
    timeline_layers: Annotated[int, typer.Option(help="Layers that the timeline shows; 0: no timeline.")] = 4
    shown_window: Annotated[int, typer.Option(help="Window to show, counted from 0.")] = 0
    shown_micro_step: Annotated[int, typer.Option(help="Micro-step to show, counted from 0.")] = 0
    shown_group: Annotated[
        int | None, typer.Option(help="EP group to show, counted from 0.  [default: the one with the most rows]")
    ] = None


def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DUMP AXIS=V,V",
            help="Rollouts in any format, or a counts or loads .npz file; further axes of --sweep.",
            show_default=False,
        ),
    ] = None,
    *,
    reading: ReadingFlags,
    packing: PackingFlags,
    pack: Annotated[
        bool, typer.Option("--pack", help="Pack samples by their experts, within the limits of --schedule.")
    ] = False,
    demo: DemoFlag = False,
    machine: MachineFlags,
    step: StepFlags,
    policy: PolicyFlags,
    sweep: SweepFlags,
    shown: ShownFlags,
    results: ResultFlags,
) -> None:
    """Compare policies on a step, with every cost charged."""
    from equipoise.cli.step_loads import open_step, read_history
    from equipoise.core.options import PlanOptions
    from equipoise.loads.forecast import limit_in_bytes
    from equipoise.sim.step import simulate_case
    from equipoise.sim.summary import summary
    from equipoise.sim.windows import StepCase

    # Step 1: check the options, before the dump is read, which may take minutes.
    dump, axes = split_arguments(arguments or [], sweep.sweep or [])
    results.refuse_existing(dump, policy.history)
    cluster, setting = machine.build_cluster(ep=packing.ep), step.build_setting(shown)
    history = read_history(policy.history, policy.names)
    limit, waves = limit_in_bytes(policy.memory_gib), parse_waves(policy.waves)

    # Step 2: read the dump, and check what depends on it, before the step is simulated, which may take minutes too.
    pack_for = machine.ranks_per_node if pack else None
    source = open_step(dump, reading, packing, demo_samples=256 if demo else None, pack_for=pack_for)
    windows = source.windows(packing.ep, None)
    case = StepCase(
        cluster=cluster,
        model=source.model,
        slots=policy.slots,
        setting=setting,
        options=PlanOptions(cross_node=policy.cross_node, limit_bytes=limit, waves=waves),
        history=history,
        # Pairs say how often one sending of a token serves several experts.
        pair_LEE=source.pair_LEE if step.sends == "tokens" else None,
    )
    _check_step(source, windows, axes, case)

    # Step 3: simulate the step, then its sweep and its break-even.
    with progress("simulating (the first run compiles for a while)") as show:
        found = simulate_case(windows, policy.names, case, progress=show)
    found, is_whole = _add_sweep(found, source, windows, axes, case, break_even=sweep.break_even)
    found = replace(found, notes=(*found.notes, *filter(None, [source.schedule])))

    name = GENERATED if dump is None else dump.name

    def show_summary(console: Console) -> None:
        console.print(summary(found, title=name, width=console.width), soft_wrap=True, end="")

    publish(found, show_summary, title=name, results=results)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)


def split_arguments(arguments: list[str], sweep: list[str]) -> tuple[Path | None, dict[str, tuple[int, ...]]]:
    """Tell the dump from the axes, which are NAME=VALUES; return both."""
    from equipoise.sim.sweep import AXES, checked_axis

    # A file may have an equals sign in its name, but not the name of an axis before it.
    is_axis = {word: "=" in word and word.partition("=")[0] in AXES for word in arguments}
    dumps = [word for word in arguments if not is_axis[word]]
    if len(dumps) > 1:
        raise RoutesError(f"give one dump, not {len(dumps)}: {', '.join(dumps)}")
    given = [word for several in sweep for word in several.split()] + [word for word in arguments if is_axis[word]]
    if given and not sweep:
        raise InfeasiblePlanError(f"{given[0]} names an axis; write --sweep {' '.join(given)}")
    axes: dict[str, tuple[int, ...]] = {}
    for word in given:
        name, _, values = word.partition("=")
        numbers = values.split(",")
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise InfeasiblePlanError(
                f"--sweep {word!r}: write a name and whole numbers, such as ep=8,16 or slots=0,1,2"
            )
        if name in axes:
            raise InfeasiblePlanError(f"--sweep names the axis {name} twice; write all its values after one {name}=")
        axes[name] = checked_axis(name, [int(number) for number in numbers])
    return (Path(dumps[0]) if dumps else None), axes


def _check_step(source: "StepSource", windows: "Sequence[LoadMatrix]", axes: Axes, case: "StepCase") -> None:
    """Raise if the shown part, the slots or a point of the sweep cannot exist."""
    from equipoise.sim.sweep import check_rows

    cluster, shown = case.cluster, case.setting.shown
    require_int("--shown-window", shown.window, low=0, high=len(windows) - 1, error=LoadsError)
    window = windows[shown.window]
    require_int("--shown-micro-step", shown.micro_step, low=0, high=window.num_micro_steps - 1, error=LoadsError)
    if shown.group is not None:
        last = max(0, window.num_ranks // cluster.ep - 1)
        require_int("--shown-group", shown.group, low=0, high=last, error=LoadsError)
    check_slots(case.slots, cluster=cluster, model=source.model)
    for ep, micro in product(axes.get("ep", (cluster.ep,)), axes.get("micro", (None,))):
        check_slots(axes.get("slots", ()), cluster=cluster.with_ep(ep), model=source.model)
        source.check(ep, micro)
    if "tokens" in axes:
        check_rows(windows)


def _add_sweep(
    found: "Simulation",
    source: "StepSource",
    windows: "Sequence[LoadMatrix]",
    axes: Axes,
    case: "StepCase",
    *,
    break_even: bool,
) -> "tuple[Simulation, bool]":
    """Simulate the sweep and the break-even; an interrupt leaves the rest out and keeps the step.

    Returns: the simulation, and whether it has everything that was asked for
    """
    from equipoise.sim.result import Sweep
    from equipoise.sim.sweep import break_even_curves, sweep_points

    points: tuple[SweepPoint, ...] = ()
    curves: tuple[BreakEvenCurve, ...] | None = None
    notes, is_whole = found.notes, True
    try:
        if axes:
            with progress("sweeping") as show:
                points = sweep_points(source.windows, case, axes=axes, progress=show)
        if break_even:
            # The last window is an update, if there is one.
            window = windows[-1].split_groups(case.cluster.ep)[found.shown.group or 0]
            with progress("break-even") as show:
                curves = break_even_curves(window, case, progress=show)
    except KeyboardInterrupt:
        cut = [name for name, is_cut in (("Sweep", axes and not points), ("Break-even", break_even)) if is_cut]
        notes, is_whole = (*notes, *map(STOPPED.format, cut)), False
    if curves == ():
        notes = (*notes, NO_CURVES)
    if curves and case.setting.planning_s:
        notes = (*notes, NO_PLANNING)
    swept = Sweep(axes=dict(axes), points=points, curves=curves or ()) if points or curves else None
    return replace(found, notes=notes, sweep=swept), is_whole
