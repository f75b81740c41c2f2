"""Draw an analysis on a terminal of 80 columns or more: skew, seconds lost, memory.

Knows figures of `Analysis` and rich. Computes none of them.
"""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from equipoise.loads.analysis import Analysis, StageAnalysis
from equipoise.loads.forecast import GIB, MemoryForecast
from equipoise.loads.lost import EFFICIENCY, LostTime
from equipoise.loads.skew import Distribution

BLOCKS = [chr(0x2581 + i) for i in range(8)]
"""Bars of eight heights."""


def show(analysis: Analysis, console: Console, *, source: str) -> None:
    """Print the whole analysis of what `source` names."""
    console.print(_headline(analysis, source))
    for words, stage in _distinct_stages(analysis):
        console.print(_heading(f"Skew, {words}", "busiest rank / mean rank, in rows; 1.00 is level"))
        console.print(_widths_table(stage, analysis.cluster.ep))
        means = [layer.mean for layer in stage.skew.dispatched.layers()]
        console.print(_heading(f"Skew by layer, {words}", f"at EP {stage.skew.ranks}, over micro-steps"))
        console.print(Text("  " + sparkline(means, low=1.0, high=max(means))))
        console.print(_layers_table(stage, analysis.layer_numbers, columns=max(1, (console.width - 2) // 19)))
    console.print(_heading("Expert compute per step", "a model, not a measurement"))
    console.print(_lost_table(analysis))
    console.print(_lost_words(analysis))
    console.print(_heading("Memory for received rows", "counted rows, bytes by formula"))
    console.print(_memory_words(analysis.memory))


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


def _distinct_stages(analysis: Analysis) -> list[tuple[str, StageAnalysis]]:
    """Stages to draw: one where both have the same micro-steps, so that nothing is shown twice."""
    stages = list(analysis.stages.items())
    if len(stages) == 2 and stages[0][1].skew.dispatched == stages[1][1].skew.dispatched:
        return [("both stages alike", stages[1][1])]
    return [(str(name), stage) for name, stage in stages]


def _widths_table(stage: StageAnalysis, ep: int) -> Table:
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


def _lost_table(analysis: Analysis) -> Table:
    unit, scale = ("s", 1.0) if analysis.lost.seconds >= 1 else ("ms", 1e3)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("  stage")
    for name in (f"now, {unit}", f"if balanced, {unit}", f"lost, {unit}", "lost"):
        table.add_column(name, justify="right")
    for name, stage in analysis.stages.items():
        table.add_row(f"  {name}", *_lost_cells(stage.lost, scale))
    if len(analysis.stages) > 1:
        table.add_row("  step", *_lost_cells(analysis.lost, scale), style="bold")
    return table


def _lost_cells(lost: LostTime, scale: float) -> list[str]:
    seconds = (lost.seconds, lost.ceiling_seconds, lost.lost_seconds)
    return [*(f"{x * scale:.2f}" for x in seconds), f"{lost.lost_share:.0%}"]


def _lost_words(analysis: Analysis) -> Text:
    peak = analysis.cluster.flops / 1e12
    words = f"  Expert GEMMs alone, at {EFFICIENCY:.0%} of {peak:,.0f} TFLOP/s; no dispatch, no attention.\n"
    return Text(words + "  Lost is what perfect balance could give back at most.", style="dim")


def _memory_words(memory: MemoryForecast) -> Text:
    place, rows = memory.place, memory.rows_R
    text = Text()
    text.append(f"  peak     {memory.peak_rows:,} rows, {memory.peak_bytes / GIB:.2f} GiB\n")
    text.append(f"  where    {place.stage} window {place.window}, micro-step {place.micro_step}, ")
    text.append(f"layer {place.layer}, rank {place.rank}\n")
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
            text.append("\n  fix      none of balance, smaller micro-steps or a larger EP is enough alone")
    return text


def _floor_percent(share: float) -> str:
    """A share that is rounded down, so that 100 % means all."""
    return f"{math.floor(share * 1000) / 10:g} %"


def _short(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
