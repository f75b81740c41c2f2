"""Replay a step under several policies on a described cluster: seconds by part, sweeps, and where a plan begins to pay.

    equipoise simulate --demo
    equipoise simulate rollouts.jsonl --model qwen3-30b-a3b --cluster h100 --ep 16 --sweep ep=8,16 slots=0,1,2

Everything is simulated; no GPU and no torch needed. With --sweep the words NAME=VALUES after it are further axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from equipoise.cli.options import ActivationsOption, Machine, Packing, Reading, Results
from equipoise.cli.output import INTERRUPTED

if TYPE_CHECKING:
    from equipoise.cli.simulation import Source
    from equipoise.core import LoadMatrix, ModelShape
    from equipoise.sim import StepSetting

POLICIES = "static,eplb-history,eplb-oracle,lplb,reactive,equipoise,balanced"


TWO_NODES = Packing(ep=16)
"""The default, so that what crosses nodes is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the step is like beside its loads."""

    SECTION: ClassVar[str] = "The step"
    pipeline_stages: Annotated[int, typer.Option(help="Pipeline stages, one forward, one backward.")] = 1
    activations: ActivationsOption = "kept"
    sends: Annotated[
        Literal["rows", "tokens"], typer.Option(help="What crosses nodes: every row, or a token once per node.")
    ] = "rows"
    rollout_s: Annotated[float, typer.Option(help="Seconds of rollout, for the whole step.")] = 0.0
    other_s: Annotated[float, typer.Option(help="Seconds of what is not simulated: optimizer, head ...")] = 0.0
    planning_s: Annotated[
        float, typer.Option(help="Seconds of planning a window; it hides behind what runs before.")
    ] = 0.0

    def __post_init__(self) -> None:
        from equipoise.core import InfeasiblePlanError
        from equipoise.core.value import require_int
        from equipoise.sim.windows import require_seconds

        require_int("--pipeline-stages", self.pipeline_stages, low=1, error=InfeasiblePlanError)
        for name in ("rollout_s", "other_s", "planning_s"):
            require_seconds(f"--{name.replace('_', '-')}", getattr(self, name))

    def to_step(self, drawn: "Drawn") -> "StepSetting":
        """The same, and what is shown of it, as the simulator takes it."""
        from equipoise.sim import StepSetting
        from equipoise.sim.result import Shown

        return StepSetting(
            pipeline_stages=self.pipeline_stages,
            activations=self.activations,
            sends=self.sends,
            rollout_s=self.rollout_s,
            other_s=self.other_s,
            planning_s=self.planning_s,
            shown=Shown(window=drawn.shown_window, micro_step=drawn.shown_micro_step, group=drawn.shown_group),
            timeline_layers=drawn.timeline_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Which policies plan the step, and what they may use."""

    SECTION: ClassVar[str] = "The plans"
    policies: Annotated[str, typer.Option(help="Policies to compare, separated by commas.")] = POLICIES
    slots: Annotated[int, typer.Option(help="Replica slots per rank.")] = 1
    cross_node: Annotated[
        bool,
        typer.Option(
            "--cross-node",
            help="In recompute, let replicas stand in any node where that pays; every node then needs host memory for "
            "all experts.",
        ),
    ] = False
    history: Annotated[
        Path | None, typer.Option(help="Loads of an earlier step (.npz), for the policy eplb-history.")
    ] = None

    @property
    def names(self) -> list[str]:
        """The policies, one by one."""
        return [name.strip() for name in self.policies.split(",")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Whose timeline and bytes the result holds."""

    SECTION: ClassVar[str] = "What is shown"
    timeline_layers: Annotated[
        int, typer.Option(help="Layers of the micro-step that the timeline shows; 0: no timeline.")
    ] = 4
    shown_window: Annotated[int, typer.Option(help="Window whose timeline is shown, counted from 0.")] = 0
    shown_micro_step: Annotated[
        int, typer.Option(help="Micro-step whose timeline and bytes between ranks are shown, counted from 0.")
    ] = 0
    shown_group: Annotated[
        int | None,
        typer.Option(help="Of several EP groups, the one that is shown, counted from 0.  [default: the fullest]"),
    ] = None

    def __post_init__(self) -> None:
        from equipoise.core import InfeasiblePlanError
        from equipoise.core.value import require_int

        for name in ("timeline_layers", "shown_window", "shown_micro_step", "shown_group"):
            if getattr(self, name) is not None:
                require_int(f"--{name.replace('_', '-')}", getattr(self, name), low=0, error=InfeasiblePlanError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied:
    """What is simulated beside the step as it is."""

    SECTION: ClassVar[str] = "Beside the step"
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=V,V", help="Axis to sweep: ep, slots, micro (samples) or tokens; also several."),
    ] = None
    break_even: Annotated[bool, typer.Option(help="Whether to look for the tokens from which on a plan pays.")] = True


def simulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DUMP AXIS=V,V",
            help="Rollouts in any form, or a counts or loads .npz file; further axes of --sweep.",
            show_default=False,
        ),
    ] = None,
    *,
    reading: Reading,
    packing: Packing = TWO_NODES,
    demo: Annotated[bool, typer.Option("--demo", help="Simulate a generated step of Qwen3-30B-A3B shape.")] = False,
    machine: Machine,
    setting: Setting,
    compared: Compared,
    varied: Varied,
    drawn: Drawn,
    results: Results,
) -> None:
    """Compare policies on a step, with every cost charged."""
    from equipoise.cli.report import publish
    from equipoise.cli.simulation import Step, run
    from equipoise.cli.step_loads import read_history
    from equipoise.planner import PlanOptions
    from equipoise.sim.summary import summary

    dump, axes = split_words(words or [], varied.sweep or [])
    results.refuse_existing(dump, compared.history)
    # What can be wrong is asked before the dump is read, which may take minutes.
    hardware = machine.describe(ep=packing.ep)
    around, past = setting.to_step(drawn), read_history(compared.history, compared.names)
    step = Step(
        source=step_source(dump, reading, packing, demo=demo),
        cluster=hardware,
        setting=around,
        options=PlanOptions(cross_node=compared.cross_node),
        slots=compared.slots,
        history=past,
    )
    found, is_whole = run(step, compared.names, axes=axes, break_even=varied.break_even)
    name = "a generated step" if dump is None else dump.name
    text = summary(found, title=name)
    publish(found, lambda console: console.print(text, soft_wrap=True, end=""), title=name, results=results)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)


def split_words(words: list[str], sweep: list[str]) -> tuple[Path | None, dict[str, tuple[int, ...]]]:
    """Tell the dump from axes: an axis is NAME=VALUES; more than one other word is an error."""
    from equipoise.core import InfeasiblePlanError, RoutesError

    dumps = [word for word in words if not _names_axis(word)]
    if len(dumps) > 1:
        raise RoutesError(f"give one dump, not {len(dumps)}: {', '.join(dumps)}")
    given = [word for several in sweep for word in several.split()] + [word for word in words if _names_axis(word)]
    if given and not sweep:
        raise InfeasiblePlanError(f"{given[0]} names an axis; write --sweep {' '.join(given)}")
    axes: dict[str, tuple[int, ...]] = {}
    for word in given:
        name, values = _axis(word)
        if name in axes:
            raise InfeasiblePlanError(f"--sweep names the axis {name} twice; write all its values behind one {name}=")
        axes[name] = values
    return (Path(dumps[0]) if dumps else None), axes


def _names_axis(word: str) -> bool:
    from equipoise.sim.sweep import AXES

    name, equals, _ = word.partition("=")
    # A file may have an equals sign in its name.
    return bool(equals) and name in AXES


def _axis(word: str) -> tuple[str, tuple[int, ...]]:
    from equipoise.core import InfeasiblePlanError
    from equipoise.sim.sweep import checked_axis

    name, _, values = word.partition("=")
    numbers = values.split(",")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise InfeasiblePlanError(f"--sweep {word!r}: write a name and whole numbers, such as ep=8,16 or slots=0,1,2")
    return name, checked_axis(name, [int(number) for number in numbers])


def step_source(dump: Path | None, reading: Reading, packing: Packing, *, demo: bool) -> "Source":
    """Where the step's windows come from: generated samples, loads that are scheduled already, or a dump's samples."""
    from equipoise.cli.options import LOADS, npz_kind
    from equipoise.cli.simulation import Source
    from equipoise.cli.step_loads import check_packing, count_samples, demo_counts, load_step, read_samples
    from equipoise.core import RouteCounts, Routes

    def at(ep: int, micro: int | None) -> Packing:
        return replace(packing, ep=ep, schedule=packing.schedule if micro is None else f"samples:{micro}")

    samples: RouteCounts | Routes | None = demo_counts(dump, reading.model, demo=demo, samples=256)
    if samples is None:
        assert dump is not None, "refused where neither is given"
        if npz_kind(dump) == LOADS:
            return _scheduled(dump, *load_step(dump, reading, packing))
        # Read once, for all widths of a sweep.
        samples = read_samples(dump, reading, packing)
    # A dump may hold some of the model's layers.
    model, read = samples.model.replace(layers=len(samples.layer_numbers)), samples
    return Source(
        model=model,
        windows=lambda ep, micro: count_samples(read, at(ep, micro)),
        check=lambda ep, micro: check_packing(at(ep, micro), model),
        pair_LEE=read.pair_LEE if isinstance(read, RouteCounts) else None,
    )


def _scheduled(dump: Path, model: "ModelShape", windows: "Sequence[LoadMatrix]") -> "Source":
    """Loads of one window: groups of another width can be cut, and nothing can be packed anew."""
    from equipoise.cli.simulation import Source
    from equipoise.core import LoadsError, ScheduleError

    (loads,) = windows

    def check(ep: int, micro: int | None) -> None:
        if micro is not None:
            raise ScheduleError(
                f"{dump} holds loads, which are scheduled already: --sweep micro={micro} cannot pack them anew; give "
                "the samples, or leave micro out"
            )
        if loads.num_ranks % ep:
            raise LoadsError(
                f"{dump} has loads of {loads.num_ranks} source ranks, which do not fill EP groups of {ep}; give a "
                "width that divides them, or the samples"
            )

    return Source(model=model, windows=lambda ep, micro: (loads,), check=check)
