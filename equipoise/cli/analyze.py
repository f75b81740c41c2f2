"""Say how many seconds uneven experts cost, what a plan would give back, and whether a rank runs out of memory.

    equipoise analyze --demo
    equipoise analyze rollouts.jsonl --model qwen3-30b-a3b --cluster h100 --ep 8 --schedule tokens:16384 --memory-gib 20

Everything is predicted; no GPU and no torch needed. Exit code 1 if the step will not fit into `--memory-gib`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.options import (
    DEFAULT_SCHEDULE,
    ClusterOption,
    ForceFlag,
    FormatOption,
    JsonFlag,
    LastRowOption,
    ModelOption,
    Reading,
    ReportOption,
    ShortFlag,
    refuse_existing,
)
from equipoise.cli.output import print_json, progress, screen

if TYPE_CHECKING:
    from equipoise.cli.step_loads import Packing
    from equipoise.core import LoadMatrix, ModelShape
    from equipoise.sim import Analysis


def analyze(
    dump: Annotated[
        Path | None,
        typer.Argument(help="Rollouts in any form, or a counts or loads .npz file.", show_default=False),
    ] = None,
    model: ModelOption = None,
    cluster: ClusterOption = "h100",
    ep: Annotated[int, typer.Option(help="Ranks of the expert-parallel group.")] = 8,
    schedule: Annotated[
        str, typer.Option(help="samples:N per rank and micro-step, tokens:N budget, or a schedule file (.json).")
    ] = DEFAULT_SCHEDULE,
    mini_batches: Annotated[int, typer.Option(help="Optimizer steps per RL step.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel ranks that share a sample, within the EP group.")] = 1,
    sp: Annotated[int, typer.Option(help="Sequence-parallel ranks that share a micro-batch, within the group.")] = 1,
    recompute: Annotated[bool, typer.Option(help="Whether old log-probs take a forward pass of their own.")] = True,
    slots: Annotated[
        int | None,
        typer.Option(help="Replica slots per rank of the plan that is tried: 1 if left out, 0 for placement alone."),
    ] = None,
    plan: Annotated[bool, typer.Option(help="Whether to try a plan.")] = True,
    memory_gib: Annotated[
        float | None, typer.Option(help="GiB a rank has left for received rows, after weights and optimizer.")
    ] = None,
    keep_activations: Annotated[
        bool, typer.Option("--keep-activations", help="Expert activations are kept for backward, not recomputed.")
    ] = False,
    form: FormatOption = None,
    last_row: LastRowOption = "recorded",
    allow_short: ShortFlag = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the JSON document to this file.")] = None,
    report: ReportOption = None,
    force: ForceFlag = False,
    demo: Annotated[bool, typer.Option("--demo", help="Analyse a generated step of Qwen3-30B-A3B shape.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what uneven experts cost a step, and what a plan gives back."""
    from equipoise.cli.slots import check_slots
    from equipoise.cli.step_loads import Packing
    from equipoise.core import Cluster
    from equipoise.sim import analyze_loads

    refuse_existing(out, report, force=force)
    tried = _tried_slots(slots, plan=plan)
    packing = Packing(schedule=schedule, ep=ep, mini_batches=mini_batches, cp=cp, sp=sp, recompute=recompute)
    hardware = Cluster.preset(cluster, ep=ep)
    reading = Reading(model=model, form=form, last_row=last_row, allow_short=allow_short)
    shape, windows = _load(dump, reading, packing, demo=demo)
    check_slots(tried or 0, cluster=hardware, model=shape)
    with progress("planning layers (the first run compiles for a while)" if plan else "pricing") as show:
        analysis = analyze_loads(
            windows,
            model=shape,
            cluster=hardware,
            slots=tried,
            memory_gib=memory_gib,
            activations="kept" if keep_activations else "recomputed",
            progress=show,
        )
    name = "a generated step" if dump is None else dump.name
    _publish(analysis, source=name, out=out, report=report, as_json=as_json)
    if analysis.memory.fits is False:
        raise typer.Exit(1)


def _tried_slots(slots: int | None, *, plan: bool) -> int | None:
    """Replica slots of the plan to try, None for no plan; options that contradict each other are refused."""
    from equipoise.core import InfeasiblePlanError

    if not plan and slots is not None:
        raise InfeasiblePlanError(f"--no-plan makes --slots {slots} void; leave one of them out")
    if slots is not None and slots < 0:
        raise InfeasiblePlanError(f"--slots is {slots}; it must be 0 (placement alone) or more")
    return (1 if slots is None else slots) if plan else None


def _publish(analysis: "Analysis", *, source: str, out: Path | None, report: Path | None, as_json: bool) -> None:
    from equipoise.cli.analysis_view import show
    from equipoise.cli.report import write_result

    console = screen(as_json=as_json)
    show(analysis, console, source=source)
    write_result(analysis, console, title=source, out=out, report=report)
    if as_json:
        print_json(analysis.to_dict())


def _load(
    dump: Path | None, reading: Reading, packing: "Packing", *, demo: bool
) -> "tuple[ModelShape, tuple[LoadMatrix, ...]]":
    from equipoise.cli.step_loads import count_windows, demo_counts, load_step

    counts = demo_counts(dump, reading.model, demo=demo, samples=512)
    if counts is not None:
        return counts.model, count_windows(counts, packing)
    assert dump is not None, "refused where neither is given"
    return load_step(dump, reading, packing)
