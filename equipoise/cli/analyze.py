"""Say how many seconds uneven experts cost, what a plan would give back, and whether a rank runs out of memory.

    equipoise analyze --demo
    equipoise analyze rollouts.jsonl --model qwen3-30b-a3b --cluster h100 --ep 8 --schedule tokens:16384 --memory-gib 20

Everything is predicted; no GPU and no torch needed. Exit code 1 if the step will not fit into `--memory-gib`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.cli.options import ActivationsOption, Machine, Packing, Reading, Results
from equipoise.cli.output import answer, progress, seconds_notes, seconds_table, seconds_unit
from equipoise.loads.forecast import GIB, MemoryForecast
from equipoise.loads.skew import Distribution
from equipoise.sim.analysis import Analysis, StageAnalysis

if TYPE_CHECKING:
    from equipoise.core import LoadMatrix, ModelShape


# Draw an analysis on a terminal of 80 columns or more: the answer first, then seconds, skew, memory.


BLOCKS = [chr(0x2581 + i) for i in range(8)]
"""Bars of eight heights."""


def show(analysis: Analysis, console: Console, *, source: str) -> None:
    """Print the whole analysis of what `source` names."""
    console.print(_headline(analysis, source))
    console.print(answer(analysis))
    console.print(_heading("Time in expert layers per step", f"{seconds_unit(analysis)}, all predicted"))
    console.print(seconds_table(analysis))
    console.print(seconds_notes(analysis))
    for words, stage, planned in _distinct_stages(analysis):
        console.print(_heading(f"Skew, {words}", "busiest rank / mean rank, in rows; 1.00 is level"))
        console.print(_widths_table(stage, analysis.cluster.ep, planned))
        means = [layer.mean for layer in stage.skew.dispatched.layers()]
        console.print(_heading(f"Skew by layer, {words}", f"at EP {stage.skew.ranks}, over micro-steps"))
        console.print(Text("  " + sparkline(means, low=1.0, high=max(means))))
        console.print(_layers_table(stage, analysis.layer_numbers, columns=max(1, (console.width - 2) // 19)))
    console.print(_heading("Memory for received rows", "counted rows, bytes by formula"))
    console.print(_memory_words(analysis.memory, analysis.memory_group))


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """One bar per value, from `low` to `high`."""
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((min(max(v, low), high) - low) * scale)] for v in values)


def _headline(analysis: Analysis, source: str) -> Text:
    model, cluster = analysis.model, analysis.cluster
    text = Text()
    text.append(f"{source}: {model.name} on {cluster.name}, EP {cluster.ep}\n", style="bold")
    text.append(f"{len(analysis.layer_numbers)} MoE layers of {model.experts} experts, top-{model.top_k}, ")
    text.append(f"{model.experts // cluster.ep} experts per rank\n")
    text.append(
        f"{analysis.micro_steps} micro-steps, {_short(analysis.rows)} rows, {analysis.padding:.1%} of them padding, "
    )
    text.append(f"routes known: {_floor_percent(analysis.coverage)}")
    return text


def _heading(title: str, words: str) -> Text:
    return Text.assemble("\n", (title, "bold"), "  ", (words, "dim"))


Planned = list[tuple[str, Distribution]]
"""Skew with a plan, by the words it is drawn with."""


def _distinct_stages(analysis: Analysis) -> list[tuple[str, StageAnalysis, Planned]]:
    """Stages to draw: one where both have the same micro-steps, so that nothing is shown twice."""
    stages = list(analysis.stages.items())
    planned = {name: () if analysis.trial is None else (analysis.trial.skew_after(name),) for name, _ in stages}
    if len(stages) == 2 and stages[0][1].skew.dispatched == stages[1][1].skew.dispatched:
        return [("both stages alike", stages[1][1], [(f"planned, {n}", d) for n, ds in planned.items() for d in ds])]
    return [(str(name), stage, [("planned", d) for d in planned[name]]) for name, stage in stages]


def _widths_table(stage: StageAnalysis, ep: int, planned: Planned) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("  EP width", "mean", "p50", "p95", "max"):
        table.add_column(name, justify="right")
    has_padding = stage.skew.dispatched != stage.skew.without_padding
    if has_padding:
        table.add_column("mean without padding", justify="right")
    shown = {ep: stage.skew.dispatched, **dict(stage.widths)}
    for width in sorted(shown):
        cells = [f"{'> ' if width == ep else ''}{width}", *_figures(shown[width])]
        if has_padding and width == ep:
            cells.append(f"{stage.skew.without_padding.mean:.2f}")
        table.add_row(*cells, style="bold" if width == ep else "")
        for words, distribution in planned if width == ep else ():
            table.add_row(f"  {words}", *_figures(distribution), style="green")
    return table


def _figures(distribution: Distribution) -> list[str]:
    return [f"{x:.2f}" for x in (distribution.mean, distribution.p50, distribution.p95, distribution.max)]


def _layers_table(stage: StageAnalysis, numbers: Sequence[int], *, columns: int) -> Table:
    """Every layer with its mean and worst skew, side by side in as many columns as fit; the worst tenth stands out."""
    layers = stage.skew.dispatched.layers()
    means = [layer.mean for layer in layers]
    columns = min(columns, 5, len(layers))
    deep = math.ceil(len(layers) / columns)
    threshold = sorted(means)[-max(1, len(means) // 10)]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for _ in range(columns):
        table.add_column("  layer", justify="right", style="dim")
        table.add_column("mean", justify="right")
        table.add_column("max", justify="right")
    for row in range(deep):
        cells: list[Text] = []
        for i in range(row, len(layers), deep):
            style = "bold red" if means[i] >= threshold else ""
            cells += [Text(str(numbers[i])), Text(f"{means[i]:.2f}", style), Text(f"{layers[i].max:.2f}", style)]
        table.add_row(*cells)
    return table


def _memory_words(memory: MemoryForecast, group: int) -> Text:
    place, rows = memory.place, memory.rows_R
    text = Text()
    text.append(f"  peak     {memory.peak_rows:,} rows, {memory.peak_bytes / GIB:.2f} GiB, ")
    text.append(f"activations {memory.activations}\n")
    text.append(f"  where    {place.stage} window {place.window}, micro-step {place.micro_step}, ")
    text.append(f"layer {place.layer}, rank {place.rank}{f', EP group {group}' if group else ''}\n")
    text.append(f"  by rank  {min(rows):,} to {max(rows):,} rows at worst  {sparkline(rows, low=0, high=max(rows))}\n")
    text.append("  verdict  ")
    if memory.limit_bytes is None:
        text.append("no limit given; add --memory-gib", style="yellow")
    elif memory.fits:
        text.append(f"fits into {memory.limit_bytes / GIB:g} GiB", style="green")
    else:
        text.append(f"does not fit into {memory.limit_bytes / GIB:g} GiB", style="bold red")
        for fix in memory.fixes:
            text.append(f"\n  fix      {fix.peak_bytes / GIB:.2f} GiB  {fix.words}")
        if not memory.fixes:
            text.append("\n  fix      none of balance, smaller micro-steps, recomputing or a larger EP is enough alone")
    return text


def _floor_percent(share: float) -> str:
    """A share that is rounded down, so that 100 % means all."""
    return f"{math.floor(share * 1000) / 10:g} %"


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


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
    from equipoise.cli.options import check_slots
    from equipoise.cli.report import publish
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
