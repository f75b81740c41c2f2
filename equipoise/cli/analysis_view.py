"""Draw an analysis on a terminal of 80 columns or more: the answer first, then seconds, skew, memory.

Knows figures of `Analysis` and rich. Computes none of them. Seconds are drawn by `seconds_view.py`.
"""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.cli.seconds_view import answer, seconds_notes, seconds_table, seconds_unit
from equipoise.loads.forecast import GIB, MemoryForecast
from equipoise.loads.skew import Distribution
from equipoise.sim.analysis import Analysis, StageAnalysis

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
