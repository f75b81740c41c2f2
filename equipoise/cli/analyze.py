"""Say how many seconds uneven experts cost, what a plan would give back, and whether a rank runs out of memory.

    equipoise analyze --demo
    equipoise analyze rollouts.jsonl --model qwen3-30b-a3b --cluster h100 --ep 8 --schedule tokens:16384 --memory-gib 20

Everything is predicted; no GPU and no torch needed. Exit code 1 if the step will not fit into `--memory-gib`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equipoise.cli.machine import Machine
from equipoise.cli.options import ActivationsOption, Packing, Reading, Results
from equipoise.cli.output import progress

if TYPE_CHECKING:
    from equipoise.core import LoadMatrix, ModelShape


def analyze(
    dump: Annotated[
        Path | None,
        typer.Argument(help="Rollouts in any form, or a counts or loads .npz file.", show_default=False),
    ] = None,
    *,
    reading: Reading,
    packing: Packing,
    demo: Annotated[bool, typer.Option("--demo", help="Analyse a generated step of Qwen3-30B-A3B shape.")] = False,
    machine: Machine,
    slots: Annotated[
        int | None,
        typer.Option(help="Replica slots per rank of the plan that is tried: 1 if left out, 0 for placement alone."),
    ] = None,
    plan: Annotated[bool, typer.Option(help="Whether to try a plan.")] = True,
    memory_gib: Annotated[
        float | None, typer.Option(help="GiB a rank has left for received rows, after weights and optimizer.")
    ] = None,
    activations: ActivationsOption = "kept",
    results: Results,
) -> None:
    """Show what uneven experts cost, and what a plan gives back."""
    from equipoise.cli.analysis_view import show
    from equipoise.cli.report import publish
    from equipoise.cli.slots import check_slots
    from equipoise.sim import analyze_loads

    results.refuse_existing(dump)
    tried = _tried_slots(slots, plan=plan)
    hardware = machine.describe(ep=packing.ep)
    shape, windows = _load(dump, reading, packing, demo=demo)
    check_slots(tried or 0, cluster=hardware, model=shape)
    with progress("planning layers (the first run compiles for a while)" if plan else "pricing") as report:
        analysis = analyze_loads(
            windows,
            model=shape,
            cluster=hardware,
            slots=tried,
            memory_gib=memory_gib,
            activations=activations,
            progress=report,
        )
    name = "a generated step" if dump is None else dump.name
    publish(analysis, lambda console: show(analysis, console, source=name), title=name, results=results)
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


def _load(
    dump: Path | None, reading: Reading, packing: Packing, *, demo: bool
) -> "tuple[ModelShape, tuple[LoadMatrix, ...]]":
    from equipoise.cli.step_loads import count_windows, demo_counts, load_step

    counts = demo_counts(dump, reading.model, demo=demo, samples=512)
    if counts is not None:
        return counts.model, count_windows(counts, packing)
    assert dump is not None, "refused where neither is given"
    return load_step(dump, reading, packing)
